"""Attention of whole prompts by the library: what the truth is, when it is chosen, and the keys it is handed."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.attention_cases import naive
from tests.kernels.tensors import random
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.prompt_attention import (
    OWN,
    FreshPrompts,
    key_of,
    library_is_chosen,
    library_takes,
    prompt_attention,
)
from trunkline_kernels.gpu.rotary_kv import rotary_kv
from trunkline_kernels.ragged_batch import KVLayer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE: dict[str, Any] = {"head_dim": 128, "group": 4, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}


@pytest.mark.parametrize("window", [None, 1, 5])
def test_each_prompt_attends_to_itself(window: int | None) -> None:
    lens = [2, 17, 33]
    starts = [0, *itertools.accumulate(lens)]
    packed = random(sum(lens), 6 + 2 + 2, 24)
    q, keys, values = torch.split(packed, [6, 2, 2], dim=1)
    fresh = FreshPrompts(0, sum(lens), max(lens), torch.tensor(starts, dtype=torch.int32))
    found = prompt_attention(q, keys, values, fresh, scale=24**-0.5, window=window)
    expected = [naive(q[a:b], keys[a:b], values[a:b], 0, window) for a, b in itertools.pairwise(starts)]
    torch.testing.assert_close(found, torch.cat(expected).float())


@pytest.mark.parametrize("tokens_of_padding", [0, 2])
def test_rotated_keys_replace_the_others_where_they_are_kept(tokens_of_padding: int) -> None:
    tokens, heads, kv_heads, dim, block = 7, 4, 2, 16, 4
    qkv = random(tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.outer(torch.arange(50.0), torch.rand(dim // 2))
    slots = torch.arange(tokens)
    slots[tokens - tokens_of_padding :] = -1
    kv = KVLayer(torch.zeros(3, block, kv_heads, dim), torch.zeros(3, block, kv_heads, dim))
    inputs = kv, torch.arange(tokens), slots, angles.cos(), angles.sin()
    kept = qkv.clone()
    q = rotary_kv(kept, *inputs, num_heads=heads, keep_keys=True)
    assert torch.equal(q, rotary_kv(before := qkv.clone(), *inputs, num_heads=heads))
    assert torch.equal(before, qkv), "without keep_keys the keys stay as they are"
    _, keys, values = torch.split(kept.view(tokens, -1, dim), [heads, kv_heads, kv_heads], dim=1)
    real = tokens - tokens_of_padding
    assert torch.equal(keys[:real], kv.keys.flatten(0, 1)[:real])
    assert torch.equal(values[:real], kv.values.flatten(0, 1)[:real])
    assert torch.equal(values, qkv.view(tokens, -1, dim)[:, heads + kv_heads :])


def test_the_table_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, own = (key_of(device=name, **SHAPE) for name in ("NVIDIA H200", "NVIDIA L4"))
    tuned_tilings.write(tmp_path / "tuned.json", {library: ({}, {}), own: (OWN, {})})
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(tmp_path / "tuned.json"))
    assert library_is_chosen(library, CUDA)
    assert not library_is_chosen(own, CUDA)
    assert not library_is_chosen(key_of(device="NVIDIA A100", **SHAPE), CUDA), "what was not measured"


@pytest.mark.parametrize(
    ("other", "takes"),
    [
        ({}, True),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, False),
        ({"kv_dtype": torch.float8_e4m3fn}, False),
        ({"head_dim": 250}, False),
        ({"head_dim": 512}, False),
        ({"head_dim": 80}, True),
    ],
    ids=str,
)
def test_only_what_the_library_takes_goes_there(other: dict[str, Any], takes: bool) -> None:
    assert library_takes(key_of(device="NVIDIA H200", **{**SHAPE, **other}), CUDA) == takes


def test_keys_of_8_bits_are_read_from_the_pool_on_every_device() -> None:
    assert not library_takes(key_of(device="", **{**SHAPE, "kv_dtype": torch.float8_e4m3fn}), CPU)
