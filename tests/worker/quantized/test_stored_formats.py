"""Checkpoints that are stored quantised: the logits are transformers' with the values that outside code finds."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parameters import one_in
from tests.worker.engine_rig import Collected, drive, make_engine, make_submit
from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import their_logits
from tests.worker.quantized.checkpoints import write_checkpoint
from tests.worker.quantized.stored_formats import FORMATS
from trunkline.v1.worker_pb2 import Submit
from trunkline_worker.model.architectures.config_json import read_spec
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.loading import LoadedModel, load_model
from trunkline_worker.model.rotary_tables import table_bytes

MANY = int(os.environ.get("TRUNKLINE_FUZZ_CONFIGURATIONS", "25"))  # make fuzz tries 100 of a method
PROMPT = [5, 9, 3, 60, 41, 7, 7, 12, 30, 1, 2, 19]
KEPT = {"int8-tensor": "int8", "int8-channel": "int8", "packed8-channel": "int8", "packed4-groups": "int4"}
KEPT |= {"gptq": "int4", "gptq-v2": "int4", "gptq-symmetric": "int4", "awq": "int4", "awq-rows": "int4"}
KEPT |= dict.fromkeys(["int8-groups", "packed8-groups", "gptq-8-symmetric"], "int8")
KEPT |= dict.fromkeys(
    ["packed4-zeros", "packed4-channel", "awq", "awq-rows", "gptq", "gptq-v2", "gptq-symmetric"], "int4"
)


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, **{"dtype": "float32", "device": torch.device("cpu"), **options})


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, FORMATS[name])
    expected = their_logits(theirs, PROMPT)
    assert expected.abs().max() > 0.5
    for kernels in ("auto", "torch"):
        (logits,) = ragged_logits(load(tmp_path, kernels=kernels), [PROMPT])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", one_in(6, FORMATS))
def test_logits_with_experts_equal_transformers(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    theirs = write_checkpoint(tmp_path, FORMATS[name], architecture="Qwen3MoeForCausalLM", **sizes)
    expected = their_logits(theirs, PROMPT)
    assert expected.abs().max() > 0.5
    for kernels in ("auto", "torch"):
        model = load(tmp_path, kernels=kernels)
        (logits,) = ragged_logits(model, [PROMPT])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        if name in KEPT:
            assert model.quantized_kinds == {KEPT[name]}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "awq", "gptq", "mxfp4"])
def test_logits_equal_transformers_in_random_configurations(method: str, tmp_path: Path) -> None:
    forms = [form for form in FORMATS.values() if form.config["quant_method"] == method]
    for seed in range(MANY):
        draw = random.Random(f"{method} {seed}")
        heads = draw.choice([1, 2, 4])
        sizes: dict[str, Any] = {
            "hidden_size": 192 * draw.choice([1, 2]),
            "intermediate_size": 192 * draw.choice([1, 2, 3]),
            "num_hidden_layers": draw.choice([1, 2]),
            "head_dim": draw.choice([64, 96, 192]) if heads > 1 else 192,
            "num_attention_heads": heads * 2,
            "num_key_value_heads": heads,
            "tie_word_embeddings": draw.random() < 0.3,
            "attention_bias": draw.random() < 0.5,
        }
        architecture = draw.choice(["LlamaForCausalLM", "Qwen3ForCausalLM"])
        theirs = write_checkpoint(tmp_path, draw.choice(forms), architecture=architecture, seed=seed, **sizes)
        prompt = [draw.randrange(61) for _ in range(draw.randrange(1, 30))]
        (logits,) = ragged_logits(load(tmp_path), [prompt])
        torch.testing.assert_close(logits, their_logits(theirs, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", KEPT)
def test_integers_stay_quantised(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FORMATS[name])
    model = load(tmp_path)
    assert model.quantized_kinds == {KEPT[name]}
    write_checkpoint(tmp_path, FORMATS["fp8-tensor"])
    dense = load(tmp_path)
    assert not dense.quantized_kinds
    assert model.weight_bytes.layers < dense.weight_bytes.layers / (3.5 if KEPT[name] == "int8" else 4.5)


def test_a_checkpoint_need_only_fit_into_memory_as_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, FORMATS["packed4-groups"])
    kept = load(tmp_path).weight_bytes
    needed = kept.layers + 2 * kept.head + table_bytes(read_spec(tmp_path), 64)  # the embedding is as large as the head
    monkeypatch.setattr("trunkline_worker.model.weight_reading.free_bytes", lambda device: needed)
    load(tmp_path)
    monkeypatch.setattr("trunkline_worker.model.weight_reading.free_bytes", lambda device: needed - 1000)
    with pytest.raises(ModelError, match="the weights take"):
        load(tmp_path)


def test_parts_that_are_not_quantised_are_held_apart(tmp_path: Path) -> None:
    form = FORMATS["packed4-groups"]
    ignore = ["lm_head", "re:.*0.self_attn.k_proj$", "model.layers.1.mlp.up_proj"]
    form = replace(form, config=form.config | {"ignore": ignore})
    theirs = write_checkpoint(tmp_path, form, plain=("0.self_attn.k_proj", "1.mlp.up_proj"), attention_bias=True)
    for kernels in ("auto", "torch"):
        (logits,) = ragged_logits(load(tmp_path, kernels=kernels), [PROMPT])
        torch.testing.assert_close(logits, their_logits(theirs, PROMPT), atol=1e-4, rtol=0)


def test_parts_of_different_schemes_are_held_apart(tmp_path: Path) -> None:
    form, other, third = FORMATS["packed4-groups"], FORMATS["packed8-channel"], FORMATS["float-channel"]
    groups = {
        "a": form.config["config_groups"]["group_0"],
        "b": other.config["config_groups"]["group_0"] | {"targets": ["re:.*v_proj$"]},
        "c": third.config["config_groups"]["group_0"] | {"targets": ["re:.*up_proj$"], "format": "float-quantized"},
    }
    mixed = replace(form, config=form.config | {"config_groups": groups})
    others = {"v_proj": other, "up_proj": third}
    theirs = write_checkpoint(tmp_path, mixed, others=others, architecture="LlamaForCausalLM")
    for kernels in ("auto", "torch"):
        (logits,) = ragged_logits(load(tmp_path, kernels=kernels), [PROMPT])
        torch.testing.assert_close(logits, their_logits(theirs, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "packed4-zeros", "int8-channel"])
def test_deterministic_tokens_do_not_depend_on_chunks_others_or_preemption(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FORMATS[name])
    draw = random.Random(3)
    prompts = [[draw.randrange(61) for _ in range(length)] for length in (14, 15, 30, 31, 40)]

    def submit(index: int) -> Submit:
        return make_submit(
            index + 1, prompts[index], max_tokens=12, ignore_eos=True, logprobs=1, temperature=0.9, seed=11
        )

    def bits(collected: Collected, index: int) -> list[tuple[int, float]]:
        outputs = collected.outputs[index + 1]
        return [(entry.chosen.token_id, entry.chosen.logprob) for output in outputs for entry in output.logprobs]

    options: dict[str, Any] = {"deterministic": True}
    alone = {}
    for index in range(len(prompts)):
        alone[index] = bits(drive(make_engine(tmp_path, kv_blocks=64, **options), [submit(index)]), index)
        assert len(alone[index]) == 12
    for blocks, chunk in ((64, 7), (5, 64)):
        engine = make_engine(
            tmp_path, kv_blocks=blocks, max_step_tokens=chunk, admission="optimistic", itl_target_ms=0.0, **options
        )
        together = drive(engine, list(map(submit, alone)))
        assert {index: bits(together, index) for index in alone} == alone
    assert engine.scheduler.stats.preemptions > 0


def test_what_the_kernels_do_not_take_is_served_by_the_reference(tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, FORMATS["awq"])
    (logits,) = ragged_logits(load(tmp_path, dtype="float16"), [PROMPT])
    torch.testing.assert_close(logits.float(), their_logits(theirs, PROMPT), atol=0.05, rtol=0.02)
