"""Rotary embedding of every kind against transformers', within the context that is served."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parameters import one_in
from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import (
    VOCAB,
    base_config,
    parse_problem,
    silence,
    their_logits,
    their_model,
    write_config,
)
from trunkline_worker.model.architectures.rope_scaling import ROPE_KINDS
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import parse_spec
from trunkline_worker.model.loading import load_model
from trunkline_worker.model.rotary_tables import rotary_tables

CPU = torch.device("cpu")
HEAD_DIMS = (4, 8, 10, 64)


NOT_FINITE: list[dict[str, Any]] = [
    {"type": "yarn", "factor": 4.0, "beta_fast": 5e-324},
    {"type": "yarn", "factor": 4.0, "beta_slow": 1e-310, "truncate": False},
    {"type": "yarn", "factor": 1e-300, "original_max_position_embeddings": 2},
    {"type": "linear", "factor": 1e-300},
    {"type": "linear", "factor": 5e-324},
    {"type": "dynamic", "factor": 5e-324},
    {"type": "llama3", "factor": 1e-300, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 5e-324, "high_freq_factor": 1e-323},
    {"type": "longrope", "short_factor": [1e-46] * 4, "long_factor": [1.0] * 4},
    {"type": "longrope", "short_factor": [5e-324] * 4, "long_factor": [1.0] * 4},
]


@pytest.mark.parametrize("scaling", NOT_FINITE, ids=str)
def test_settings_without_finite_angles_are_refused(scaling: dict[str, Any], tmp_path: Path) -> None:
    base = {**base_config("LlamaForCausalLM"), "head_dim": 8, "rope_scaling": scaling}
    their_model(tmp_path, {**base, "rope_scaling": None})
    write_config(tmp_path, base)
    try:
        served = load_model(tmp_path, device=CPU)
    except ModelError:
        return
    assert ragged_logits(served, [[1, 2, 3]])[0].isfinite().all()


def random_scaling(draw: random.Random, kind: str, head_dim: int) -> dict[str, Any]:
    """A scaling of this kind with whatever may be said of it."""
    scaling: dict[str, Any] = {draw.choice(("rope_type", "type")): kind}

    def maybe(**values: Any) -> None:
        for key, value in values.items():
            if draw.random() < 0.5:
                scaling[key] = value

    if kind != "default":
        scaling["factor"] = draw.choice((1.0, 1.5, 2, 4.0, 8.0))
    if kind in ("llama3", "yarn", "longrope"):
        maybe(original_max_position_embeddings=draw.choice((16, 24, 64)))
    if kind == "llama3":
        scaling["low_freq_factor"] = draw.choice((1, 1.0, 1.5))
        scaling["high_freq_factor"] = draw.choice((2.0, 4, 4.0))
    elif kind == "yarn":
        maybe(
            attention_factor=draw.choice((None, 0.5, 1.3)),
            mscale=draw.choice((0.0, 0.7, 1.0)),
            mscale_all_dim=draw.choice((0.0, 0.8, 1.0)),
            beta_fast=draw.choice((None, 0, 16, 32.0)),
            beta_slow=draw.choice((None, 0, 1, 2.0)),
            truncate=draw.choice((True, False)),
        )
        if draw.random() < 0.1:
            scaling["factor"] = None
    elif kind == "longrope":
        maybe(attention_factor=draw.choice((None, 0.9, 1.2)))
        for name in ("short_factor", "long_factor"):
            scaling[name] = [round(draw.uniform(1, 6), 3) for _ in range(head_dim // 2)]
        if draw.random() < 0.5:
            del scaling["factor"]
    return scaling


def random_config(draw: random.Random, kind: str) -> dict[str, Any]:
    head_dim = draw.choice(HEAD_DIMS)
    config = {**base_config("LlamaForCausalLM"), "head_dim": head_dim, "max_position_embeddings": draw.choice((48, 64))}
    config["rope_theta"] = draw.choice((10000.0, 10000, 500000.0, 150.0))
    scaling = random_scaling(draw, kind, head_dim)
    if draw.random() < 0.3:
        scaling["rope_theta"] = draw.choice((10000.0, 20000))
    if draw.random() < 0.2:
        config["original_max_position_embeddings"] = draw.choice((16, 32))
    config[draw.choice(("rope_scaling", "rope_parameters"))] = scaling
    if "rope_scaling" in config and draw.random() < 0.3:
        config["rope_parameters"] = {"rope_type": "default"}
    return config


def contexts(config: dict[str, Any]) -> set[int]:
    """Every context length that a worker may be asked to serve, as far as it makes a difference."""
    spec = parse_spec(config)
    lengths = {spec.context_length, spec.most_context, 20, (spec.context_length + spec.most_context) // 2}
    return {length for length in lengths if length <= min(spec.most_context, 600)}


@pytest.mark.parametrize("kind", one_in(2, ROPE_KINDS))
def test_tables_are_those_of_transformers_for_a_sequence_of_the_served_context(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    draw = random.Random(kind)
    compared = 0
    for _ in range(40):
        config = random_config(draw, kind)
        write_config(tmp_path, config)
        spec = parse_spec(config)
        for context in contexts(config):
            with silence():
                theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
                # transformers chooses by the sequence's length: one that fills the context has what all have here.
                cos, sin = theirs(torch.zeros(1), torch.arange(context)[None])
            half = spec.head_dim // 2
            ours = rotary_tables(spec.ropes[0], context)
            torch.testing.assert_close(
                ours[0], cos[0, :, :half], atol=1e-5, rtol=0, msg=partial("{}: {}".format, config)
            )
            torch.testing.assert_close(
                ours[1], sin[0, :, :half], atol=1e-5, rtol=0, msg=partial("{}: {}".format, config)
            )
            compared += 1
    assert compared > 60


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_logits_of_a_full_context_are_those_of_transformers(kind: str, kernels: str, tmp_path: Path) -> None:
    draw = random.Random(kind)
    for _ in range(2):
        config = random_config(draw, kind)
        theirs = their_model(tmp_path, config)
        for context in sorted(contexts(config))[:3]:
            tokens = [draw.randrange(VOCAB) for _ in range(context)]
            model = load_model(tmp_path, device=CPU, kernels=kernels, context_length=context)
            torch.testing.assert_close(
                ragged_logits(model, [tokens])[0], their_logits(theirs, tokens), atol=3e-4, rtol=1e-4
            )


def served(scaling: dict[str, Any], **changes: Any) -> tuple[int, int]:
    spec = parse_spec({**base_config("LlamaForCausalLM"), "rope_scaling": scaling, **changes})
    return spec.context_length, spec.most_context


def test_context_lengths_follow_from_the_scaling() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert served(yarn, max_position_embeddings=32) == (128, 128)  # a checkpoint that is not extended yet
    assert served(yarn, max_position_embeddings=128) == (128, 128)  # one that is
    assert served({"type": "yarn", "factor": 4.0}, max_position_embeddings=32) == (128, 128)
    assert served({"type": "linear", "factor": 4.0}, max_position_embeddings=32) == (32, 128)
    assert served({"type": "dynamic", "factor": 4.0}, max_position_embeddings=32) == (32, 128)
    for name in ("longrope", "su"):
        long = {"type": name, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        assert served(long, max_position_embeddings=64, original_max_position_embeddings=16) == (16, 64)
        assert served(long, max_position_embeddings=64) == (64, 64)
    assert served({"type": "default"}, max_position_embeddings=32) == (32, 32)


def test_an_attn_factor_multiplies_as_in_vllm() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}
    rope = parse_spec({**base_config("Qwen3ForCausalLM"), "rope_scaling": yarn}).ropes[0]
    assert rope.attention_factor == pytest.approx(1.0)


def test_the_context_length_is_in_the_fingerprint_where_it_decides_the_logits(tmp_path: Path) -> None:
    long = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    base = {**base_config("LlamaForCausalLM"), "original_max_position_embeddings": 16}

    def fingerprints(scaling: dict[str, Any], *lengths: int) -> list[str]:
        their_model(tmp_path, {**base, "rope_scaling": scaling})
        return [load_model(tmp_path, device=CPU, context_length=length).fingerprint for length in lengths]

    short, also_short, longer, longest = fingerprints(long, 10, 16, 17, 64)
    assert short == also_short != longer == longest
    plain, also_plain, past, further = fingerprints({"type": "dynamic", "factor": 4.0}, 10, 64, 65, 66)
    assert plain == also_plain
    assert len({plain, past, further}) == 3
    assert len(set(fingerprints({"type": "linear", "factor": 4.0}, 10, 64, 100))) == 1


def test_an_operator_reads_which_factors_are_used(tmp_path: Path) -> None:
    long = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = {**base_config("LlamaForCausalLM"), "original_max_position_embeddings": 16, "rope_scaling": long}
    their_model(tmp_path, {**config, "rope_scaling": long | {"type": "longrope"}})
    (note,) = load_model(tmp_path, device=CPU).notes
    assert "longrope with short factors, context length 16" in note
    assert "up to 64" in note
    (note,) = load_model(tmp_path, device=CPU, context_length=17).notes
    assert "longrope with long factors, context length 17" in note
    with pytest.raises(ModelError, match="--context-length 65 is more than the model's 64"):
        load_model(tmp_path, device=CPU, context_length=65)


def test_a_theta_that_only_the_losing_object_has_is_refused() -> None:
    config = {**base_config("LlamaForCausalLM"), "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    yarn: dict[str, Any] = {"type": "yarn", "factor": 4.0}
    with pytest.raises(ModelError, match="lacks their rope_theta 1000000"):
        parse_spec({**config, "rope_scaling": yarn})
    assert parse_spec({**config, "rope_scaling": {**yarn, "rope_theta": 1e6}}).ropes[0].theta == 1e6
    assert parse_spec({**config, "rope_theta": 1e6, "rope_scaling": yarn}).ropes[0].theta == 1e6


def test_random_keys_and_values_of_a_scaling_are_refused_by_name_or_harmless() -> None:
    draw = random.Random(11)
    odd: list[Any] = [None, True, "4", "", [], {}, [1.0], 0, -1, float("nan"), float("inf"), 1e300, 10**400]
    refused = 0
    for _ in range(3000):
        kind = draw.choice(ROPE_KINDS)
        config = random_config(draw, kind)
        where = "rope_scaling" if "rope_scaling" in config else "rope_parameters"
        key = draw.choice([*sorted(config[where]), "attention_factor", "mrope_section", "alpha"])
        config[where] = {**config[where], key: draw.choice(odd)}
        if draw.random() < 0.2:
            config[where] = draw.choice(odd)
        problem = parse_problem(config)
        if problem is not None:
            refused += 1
            assert "rope" in problem.lower()
    assert refused > 1000
