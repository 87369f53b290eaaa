"""Block identity: the chained hash by which routers and workers name the KV blocks of a prompt.

`h_i = xxh3_128(h_{i-1} || tokens_i)`, tokens as little-endian uint32, digests big-endian (xxHash's canonical form);
`h_{-1}` hashes the root: model fingerprint, adapter, adapter version and isolation salt, each length-prefixed.
xxHash is not collision-resistant, so a hash is only a hint: code that reuses KV compares the tokens themselves.
"""

from collections.abc import Iterable, Sequence
from struct import pack

from xxhash import xxh3_128_digest

HASH_BYTES = 16  # one digest
TOKEN_BYTES = 4


def root_hash(fingerprint: str, adapter: str = "", adapter_version: str = "", salt: bytes = b"") -> bytes:
    """The hash before a chain's first block. Length prefixes keep ("ab", "c") and ("a", "bc") apart."""
    fields = (fingerprint.encode(), adapter.encode(), adapter_version.encode(), salt)
    return xxh3_128_digest(b"".join(pack("<I", len(field)) + field for field in fields))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The bytes of tokens that are hashed: TOKEN_BYTES for each token."""
    return pack(f"<{len(token_ids)}I", *token_ids)


def packed_blocks(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The full blocks of a prompt, packed, in order."""
    width = TOKEN_BYTES * block_size
    data = pack_tokens(token_ids)  # packing all tokens at once takes a third of the time of packing each block
    return [data[end - width : end] for end in range(width, len(data) + 1, width)]


def packed_hash(parent: bytes, packed: bytes) -> bytes:
    """The hash of one full block that follows `parent`, its tokens packed."""
    return xxh3_128_digest(parent + packed)


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block that follows `parent`."""
    return packed_hash(parent, pack_tokens(token_ids))


def prompt_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of a prompt's full blocks, in order. A trailing partial block has none."""
    return chain_hashes(root, packed_blocks(token_ids, block_size))


def chain_hashes(root: bytes, blocks: Iterable[bytes]) -> list[bytes]:
    """The hashes of consecutive packed blocks, the first of which follows `root`."""
    hashes: list[bytes] = []
    parent = root
    for packed in blocks:
        parent = xxh3_128_digest(parent + packed)
        hashes.append(parent)
    return hashes
