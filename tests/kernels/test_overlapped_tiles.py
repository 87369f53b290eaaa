"""Prefill attention whose tiles overlap, interpreted: what the plain loop over tiles computes, to the bit."""

import math
from typing import Any

import pytest
import torch

from tests.kernels import attention_cases
from tests.kernels.attention_cases import SHAPES, make_case
from tests.kernels.attention_rig import OVERLAPPED, attend, truth_of
from trunkline_kernels.gpu.ragged_attention import HOPPER_SHARED_MEMORY, tiling_for
from trunkline_kernels.ragged_batch import KVLayer


# The interpreter takes its time: the quick ones are those that one tile more or less makes a difference to.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("one token", "whole prompts") else pytest.mark.slow) for name in SHAPES],
)
def test_overlapped_tiles_equal_the_naive_truth_and_the_plain_loop(name: str) -> None:
    q, kv, batch, truth = make_case(SHAPES[name][:12], 6, 2)
    found = attend(q, kv, batch, tiling=OVERLAPPED, padding_tiles=2)
    torch.testing.assert_close(found, truth_of(q, batch, truth))
    assert torch.equal(found, attend(q, kv, batch))


@pytest.mark.parametrize("head_dim", [16, 80])
def test_every_head_dim(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cases, "HEAD_DIM", head_dim)
    q, kv, batch, truth = make_case([(5, 37), (1, 40), (70, 70)], 7, 1)
    torch.testing.assert_close(attend(q, kv, batch, tiling=OVERLAPPED), truth_of(q, batch, truth))


def test_keys_and_values_of_8_bits() -> None:
    q, kv, batch, _ = make_case([(5, 70), (64, 64)], 4, 2)
    scales = torch.tensor([0.5]), torch.tensor([2.0])
    eight = KVLayer(kv.keys.to(torch.float8_e4m3fn), kv.values.to(torch.float8_e4m3fn), *scales)
    assert torch.equal(attend(q, eight, batch, tiling=OVERLAPPED), attend(q, eight, batch))


def test_what_no_query_sees_is_not_read() -> None:
    """A block of another sequence, or one that holds nothing, may hold no numbers."""
    q, kv, batch, truth = make_case([(40, 40)], 4, 2)
    kv.keys[0], kv.values[0] = math.nan, math.inf
    batch.block_tables[:, 3:] = 0
    assert 0 not in batch.block_tables[0, :3]
    torch.testing.assert_close(attend(q, kv, batch, tiling=OVERLAPPED), truth_of(q, batch, truth))


@pytest.mark.parametrize("options", [{"split": 32}, {"window": 20}], ids=str)
def test_pieces_and_windows_go_one_way_whatever_the_tiling_says(options: dict[str, Any]) -> None:
    q, kv, batch, _ = make_case([(33, 100), (1, 70)], 6, 2)
    assert not OVERLAPPED.overlaps(split=options.get("split", 0), window=options.get("window"))
    found = attend(q, kv, batch, tiling=OVERLAPPED, **options)
    assert torch.equal(found, attend(q, kv, batch, **options))


def test_tiles_overlap_where_products_are_asynchronous_and_registers_suffice() -> None:
    def tiles_at_once(**other: Any) -> int:
        shape: dict[str, Any] = {"head_dim": 128, "group": 4, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
        return tiling_for(**{**shape, "shared_memory": HOPPER_SHARED_MEMORY, **other}).tiles_at_once

    assert tiles_at_once() == 2
    assert tiles_at_once(shared_memory=163 << 10) == 1
    assert tiles_at_once(kv_dtype=torch.float8_e4m3fn) == 1
    assert tiles_at_once(head_dim=256) == 1
    assert tiles_at_once(split=True) == 1
