"""Stateless randomness: the noise of a token is a function of (seed, choice, position, token id) and nothing else.

There is no generator state to transfer, so any worker can continue any generation. Integers are mixed in 32- and 64-bit
arithmetic that a GPU kernel reproduces bit for bit.

Sampling is the exponential race, also known as the Gumbel-max trick: with E(token) exponential, the token of greatest
log p(token) - log E(token) is distributed as p. E = -log(1 - v) keeps full precision where it matters, at small v.
"""

import numpy as np
import xxhash
from numpy.typing import NDArray

MASK_64 = (1 << 64) - 1
GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads consecutive positions
GOLDEN_32 = np.uint32(0x9E3779B1)

# Since v = (x + 0.5) / 2^32 lies in [2^-33, 1 - 2^-33], -log E lies in [-3.14, 22.88]: a token whose log-probability is
# more than this below the best one's can never win, whatever its noise.
NOISE_SPREAD = 26.1


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's choices, 64 bits."""
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"))


def position_key(seed: int, position: int) -> int:
    """The key of one position, 64 bits: MurmurHash3's finaliser over seed and position."""
    x = (seed + (position + 1) * GOLDEN_64) & MASK_64
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & MASK_64
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & MASK_64
    return x ^ (x >> 33)


def token_bits(keys: NDArray[np.uint64], token_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """32 uniform bits for each (position key, token id); the arrays broadcast."""
    low, high = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    x = token_ids.astype(np.uint32) * GOLDEN_32 + low
    _mix(x)
    x ^= high
    _mix(x)
    return x


def _mix(x: NDArray[np.uint32]) -> None:
    """MurmurHash3's 32-bit finaliser, in place."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)


def race_noise(keys: NDArray[np.uint64], token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """-log E for each (position key, token id): Gumbel noise."""
    v = (token_bits(keys, token_ids).astype(np.float64) + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log1p(-v))
    return noise
