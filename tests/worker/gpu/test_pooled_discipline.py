"""Runners of models of vectors and scores keep a device's rules, on a device that is not there."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.worker.device.cards import H200
from tests.worker.device.device import FakeDevice
from tests.worker.device.faults import DeviceFault, HostSync, LaunchFault, MixedDevices
from tests.worker.device.models import head_of, inventions, spec_of
from tests.worker.device.prompts import PromptLimits, prompt_plans
from tests.worker.device.session import session
from tests.worker.pooled.published import PUBLISHED
from trunkline_kernels.gpu import text_attention
from trunkline_worker.model.encoders.encoder import Encoder
from trunkline_worker.model.encoders.encoder_attention import triton_attention
from trunkline_worker.model.encoders.encoder_config import family_of, parse_encoder
from trunkline_worker.model.encoders.encoder_weights import build_encoder
from trunkline_worker.model.pooling.pooling_spec import Pooling
from trunkline_worker.runner.pooling_runner import EncoderStates, PoolingRunner

CONTEXT, MOST_SEQS, STEP_TOKENS, BLOCK = 1024, 24, 2048, 16
OPTIONS: dict[str, Any] = {"max_step_tokens": STEP_TOKENS, "max_running_requests": MOST_SEQS, "block_size": BLOCK}
limits_of = partial(
    PromptLimits, context_length=CONTEXT, max_seqs=MOST_SEQS, max_step_tokens=STEP_TOKENS, block_size=BLOCK
)


def encode(name: str, *, count: int, dtype: torch.dtype = torch.bfloat16) -> FakeDevice:
    """Random texts through three layers of a published encoder."""
    config = {**PUBLISHED[name].config, "num_hidden_layers": 3}
    (architecture,) = config["architectures"]
    family = family_of(architecture)
    assert family is not None
    spec = parse_encoder(config, architecture, family)
    vocab, cuda = spec.sizes.vocab_size, torch.device("cuda")
    device = FakeDevice(H200, inventions(vocab, seed=3))
    limits = limits_of(vocab_size=vocab, context_length=min(CONTEXT, spec.context_length), is_divisible=False)
    with device.running():
        weights = build_encoder(spec, "", dtype, cuda, lambda target, name: None)
        encoder = Encoder(spec, weights, triton_attention(dtype, cuda), deterministic=False)
        runner = PoolingRunner(EncoderStates(encoder, cuda), head_of(spec.sizes.hidden, 1, Pooling.MEAN))
        for plan in prompt_plans(limits, seed=3, count=count):
            runner.forward(plan)
            device.check()
    return device


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bge-small-en-v1.5", torch.float32),
        ("bge-reranker-v2-m3", torch.bfloat16),
        ("gte-modernbert-base", torch.bfloat16),
    ],
    ids=str,
)
def test_texts_of_encoders_keep_the_rules(name: str, dtype: torch.dtype) -> None:
    launches = encode(name, count=20, dtype=dtype).launches
    assert launches == {"_text_attention": 3 * 20}


@pytest.mark.parametrize("options", [{}, pytest.param({"deterministic": True}, marks=pytest.mark.slow)], ids=str)
def test_prompts_of_decoders_keep_the_rules(options: dict[str, Any]) -> None:
    spec = spec_of("qwen3-0.6b", layers=2)
    num_blocks = MOST_SEQS * CONTEXT // BLOCK
    with session(spec, num_blocks=num_blocks, context_length=CONTEXT, num_labels=3, **OPTIONS, **options) as found:
        wait: Callable[[], Any] | None = None
        for plan in prompt_plans(limits_of(vocab_size=spec.vocab_size, is_divisible=True), seed=4, count=40):
            begun = found.begin(plan)
            if wait is not None:
                wait()
            wait = begun
        assert wait is not None
        wait()
    assert not {"_choose", "_draw", "_tile_peaks"} & found.device.launches.keys(), "nothing is sampled"


# Faults that the contract of the kernel notices.


def tiles_of_one_text(real: Any, lengths: Sequence[int], dtype: torch.dtype) -> NDArray[np.int32]:
    """As if texts that are side by side were one."""
    found: NDArray[np.int32] = real(lengths, dtype)
    found[:, 1], found[:, 2] = 0, sum(lengths) + 1
    return found


def tiles_of_later_texts(real: Any, lengths: Sequence[int], dtype: torch.dtype) -> NDArray[np.int32]:
    found: NDArray[np.int32] = real(lengths, dtype)
    found[:, 1:] += 1
    return found


def tiles_of_wide_numbers(real: Any, lengths: Sequence[int], dtype: torch.dtype) -> NDArray[np.int64]:
    found: NDArray[np.int32] = real(lengths, dtype)
    return found.astype(np.int64)


def tiles_of_the_host(real: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, **options: Any) -> Tensor:
    found: Tensor = real(q, k, v, torch.zeros(tiles.shape, dtype=tiles.dtype), **options)
    return found


def keys_of_fewer_texts(real: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, **options: Any) -> Tensor:
    found: Tensor = real(q, k[1:], v, tiles, **options)
    return found


def reads_the_tiles(real: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, **options: Any) -> Tensor:
    tiles.max().item()
    found: Tensor = real(q, k, v, tiles, **options)
    return found


@pytest.mark.parametrize(
    ("fault", "message", "name", "mutant"),
    [
        (LaunchFault, "is what there is", "tiles_of_texts", tiles_of_one_text),
        (LaunchFault, "is what there is|outside its text", "tiles_of_texts", tiles_of_later_texts),
        (LaunchFault, "tiles is torch.int64", "tiles_of_texts", tiles_of_wide_numbers),
        (LaunchFault, "k is ", "text_attention", keys_of_fewer_texts),
        (MixedDevices, "host", "text_attention", tiles_of_the_host),
        (HostSync, "the host reads", "text_attention", reads_the_tiles),
    ],
)
def test_a_fault_among_texts_is_noticed(
    fault: type[DeviceFault], message: str, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_attention, name, partial(mutant, getattr(text_attention, name)))
    with pytest.raises(fault, match=message):
        encode("bge-small-en-v1.5", count=5)
