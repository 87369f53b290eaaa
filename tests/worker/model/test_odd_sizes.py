"""Sizes that no published model has: kernels read and write what is theirs, or the size is refused."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import base_config, their_logits, their_model
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import parse_spec
from trunkline_worker.model.cpu_decoder import MAX_GROUP, MAX_HEAD_DIM, MAX_HIDDEN, CpuDecoder
from trunkline_worker.model.loading import load_model

CPU = torch.device("cpu")


def random_sizes(draw: random.Random) -> dict[str, Any]:
    kv_heads = draw.choice((1, 2, 3, 5))
    return {
        **base_config("Qwen3ForCausalLM"),
        "vocab_size": draw.choice((1, 2, 3, 17, 33, 130)),
        "hidden_size": draw.choice((1, 3, 7, 8, 15, 33, 100)),
        "intermediate_size": draw.choice((1, 2, 5, 17, 63, 129)),
        "num_hidden_layers": draw.choice((1, 2, 3)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw.choice((1, 2, 3, 7, MAX_GROUP, MAX_GROUP + 1)),
        "head_dim": draw.choice((2, 4, 6, 10, 14, 22, 30, 34, 66, MAX_HEAD_DIM, MAX_HEAD_DIM + 2)),
        "sliding_window": draw.choice((1, 2, 3, 15, 17, 33)),
        "max_window_layers": draw.choice((0, 1, 28)),
        "eos_token_id": 0,
    }


@pytest.mark.parametrize("seed", range(12))
def test_odd_sizes_give_the_logits_of_transformers(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    config = random_sizes(draw)
    theirs = their_model(tmp_path, config)
    sequences = [[draw.randrange(config["vocab_size"]) for _ in range(length)] for length in (1, 5, 16, 37)]
    fits = config["head_dim"] <= MAX_HEAD_DIM
    fits = fits and config["num_attention_heads"] // config["num_key_value_heads"] <= MAX_GROUP
    block_size = draw.choice((1, 3, 5, 16, 17, 40))
    for kernels in ("auto", "torch"):
        model = load_model(tmp_path, device=CPU, kernels=kernels)
        assert isinstance(model.decoder, CpuDecoder) == (fits and kernels == "auto")
        for tokens, logits in zip(sequences, ragged_logits(model, sequences, block_size=block_size), strict=True):
            torch.testing.assert_close(logits, their_logits(theirs, tokens), atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_odd_sizes_are_the_same_in_the_c_kernels_in_bfloat16(seed: int, tmp_path: Path) -> None:
    draw = random.Random(100 + seed)
    config = {
        **random_sizes(draw),
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": draw.choice((2, 6, 34)),
    }
    their_model(tmp_path, config)
    sequences = [[draw.randrange(config["vocab_size"]) for _ in range(length)] for length in (1, 18, 37)]
    c, plain = (load_model(tmp_path, device=CPU, dtype="bfloat16", kernels=kernels) for kernels in ("auto", "torch"))
    assert isinstance(c.decoder, CpuDecoder)
    size = draw.choice((1, 3, 16, 40))
    for one, other in zip(ragged_logits(c, sequences, block_size=size), ragged_logits(plain, sequences), strict=True):
        assert one.isfinite().all()
        scale = other.abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), atol=0.15 * scale, rtol=0)


@pytest.mark.parametrize("head_dim", [1, 3, 5, 7, 255])
def test_an_odd_head_dim_is_refused_by_name(head_dim: int) -> None:
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        with pytest.raises(ModelError, match=f"head_dim {head_dim} is not supported"):
            parse_spec({**base_config(architecture), "head_dim": head_dim})
    config = {**base_config("MistralForCausalLM"), "hidden_size": 4 * head_dim, "head_dim": None}
    with pytest.raises(ModelError, match=f"head_dim {head_dim} is not supported"):
        parse_spec(config)


def test_rows_wider_than_the_c_kernels_take_go_through_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_HIDDEN * 4 <= 1 << 19  # the kernels keep a row of float32 on a thread's stack
    monkeypatch.setattr("trunkline_worker.model.cpu_decoder.MAX_HIDDEN", 23)
    their_model(tmp_path, base_config("LlamaForCausalLM"))
    assert not isinstance(load_model(tmp_path, device=CPU).decoder, CpuDecoder)
