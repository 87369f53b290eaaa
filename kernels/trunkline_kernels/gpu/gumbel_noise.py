"""The noise of a draw: a function of the key of seed and position, and the token id, without generator state.

Reference: trunkline_worker.step.sampling_key.
"""

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    """MurmurHash3's 32-bit finaliser."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def gumbel_noise(low, high, token):
    """Returns Gumbel noise of tokens, float32. low, high: uint32 halves of the position's key"""
    x = _mixed(token.to(tl.uint32) * 0x9E3779B1 + low)
    x = _mixed(x ^ high)
    # At most 1 - 2 ** -24, so that the logarithm of 1 - uniform is finite.
    uniform = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # Below 1e-2, log(1 - v) is computed by its series, because 1 - v would lose v's lower bits.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    exponential = tl.where(uniform < 1e-2, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def position_key(low, high, position):
    """Returns the key of a position as uint32 halves, low and high: MurmurHash3's finaliser of seed and position."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = seed + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    x = x ^ (x >> 33)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)
