"""Block identity is pinned: routers and workers of different versions must agree on it."""

import struct

import xxhash

from trunkline.block_hash import HASH_BYTES, block_hash, prompt_hashes, root_hash

# Computed once from the definition with xxHash's own hexdigest; a change here breaks every running fleet.
ROOT_EMPTY = "1f3d0ac4f4e2edb2f0d305c00fdc3ff8"
ROOT_FULL = "a5f3c18bbf83cc84e820f54ba9551092"
CHAIN = ["1bceb351c9474414556b120c0fc7ad96", "d3b8648d3375a9bda7f6177aeb41b2ea"]


def test_golden_vectors() -> None:
    assert root_hash("model").hex() == ROOT_EMPTY
    assert root_hash("model", "adapter", "v1", b"salt").hex() == ROOT_FULL
    assert [h.hex() for h in prompt_hashes(root_hash("model"), list(range(40)), 16)] == CHAIN


def test_the_definition_is_little_endian_tokens_after_the_parent() -> None:
    parent = bytes(range(16))
    expected = xxhash.xxh3_128(parent + struct.pack("<3I", 1, 2, 0xFFFFFFFF)).digest()
    assert block_hash(parent, [1, 2, 0xFFFFFFFF]) == expected
    assert len(expected) == HASH_BYTES


def test_length_prefixes_keep_fields_apart() -> None:
    roots = {
        root_hash("ab", "c"),
        root_hash("a", "bc"),
        root_hash("abc"),
        root_hash("", "abc"),
        root_hash("", "", "abc"),
        root_hash("", "", "", b"abc"),
    }
    assert len(roots) == 6


def test_only_full_blocks_have_a_hash() -> None:
    root = root_hash("model")
    assert [len(prompt_hashes(root, list(range(n)), 16)) for n in (0, 1, 15, 16, 17, 31, 32)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_prompts_hashes_are_those_of_its_blocks_one_after_another() -> None:
    parent = root_hash("model")
    tokens = list(range(1000, 1050))
    for index, digest in enumerate(prompt_hashes(parent, tokens, 8)):
        parent = block_hash(parent, tokens[8 * index : 8 * index + 8])
        assert digest == parent
