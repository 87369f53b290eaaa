"""Decoders make vectors and scores as transformers does, whole, in chunks, and after a cached prefix."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from tests.worker.pooled.checkpoints import DECODERS, write_model, write_modules
from tests.worker.pooled.pooled_rig import LENGTHS, PooledEngine, prompts_of
from trunkline.v1.worker_pb2 import Task
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.pooling.pooled_decoder import QWEN3_RERANKER

POOLINGS = {
    "pooling_mode_lasttoken": lambda states: states[-1],
    "pooling_mode_cls_token": lambda states: states[0],
    "pooling_mode_mean_tokens": lambda states: states.mean(0),
    "pooling_mode_max_tokens": lambda states: states.amax(0),
}


@torch.inference_mode()
def states_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """[length, hidden]"""
    states: torch.Tensor = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers_whole_and_in_chunks(name: str, pooling: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, "Model")
    write_modules(tmp_path, pooling=pooling)
    prompts = prompts_of()
    expected = [normalize(POOLINGS[pooling](states_of(model, prompt)), dim=0) for prompt in prompts]
    for options in ({}, {"max_step_tokens": 48}, {"kernels": "torch", "max_step_tokens": 48}):
        for vector, truth in zip(PooledEngine(tmp_path, **options).outputs(prompts), expected, strict=True):
            assert torch.allclose(vector, truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "head"),
    [("qwen3", "Model"), pytest.param("qwen2", "ForSequenceClassification", marks=pytest.mark.slow)],
)
def test_the_triton_kernels_make_the_same_vectors_and_scores(name: str, head: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, head, num_hidden_layers=2)
    options: dict[str, Any] = {"max_step_tokens": 12, "max_running_requests": 3, "run_ahead": 1, "kv_blocks": 8}
    prompts = prompts_of([1, 17, 5])
    truth = PooledEngine(tmp_path).outputs(prompts)
    for found, expected in zip(
        PooledEngine(tmp_path, kernels="triton", **options).outputs(prompts), truth, strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-5, rtol=0)


def test_the_triton_kernels_refuse_poolings_of_every_state(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3", "Model")
    write_modules(tmp_path, pooling="pooling_mode_mean_tokens")
    with pytest.raises(ModelError, match="needs --kernels torch"):
        PooledEngine(tmp_path, kernels="triton")


@pytest.mark.parametrize("name", DECODERS)
def test_vectors_in_bfloat16_point_the_same_way(name: str, tmp_path: Path) -> None:
    """With larger matrices than those of trained models, rounding counts for more: 0.9998 for Qwen3."""
    model = write_model(tmp_path, name, "Model", dtype=torch.bfloat16, matrix_noise=0.0)
    write_modules(tmp_path, pooling="pooling_mode_lasttoken")
    prompts = prompts_of()
    for prompt, vector in zip(prompts, PooledEngine(tmp_path).outputs(prompts), strict=True):
        assert cosine_similarity(vector, states_of(model, prompt)[-1], dim=0) >= 0.9999


@pytest.mark.parametrize("pooling", ["pooling_mode_lasttoken", "pooling_mode_mean_tokens"])
def test_a_prefix_comes_from_the_cache_unless_its_states_are_pooled(pooling: str, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3", "Model")
    write_modules(tmp_path, pooling=pooling)
    served = PooledEngine(tmp_path)
    (shared, *tails) = prompts_of([64, 3, 20, 7])
    prompts = [shared + tail for tail in tails]
    fresh = [PooledEngine(tmp_path).outputs([prompt])[0] for prompt in prompts]
    served.outputs([shared])
    submits = [served.submit(prompt) for prompt in prompts]
    found, collected = served.run(submits)
    expected = 64 if pooling == "pooling_mode_lasttoken" else 0
    assert [collected.cached[submit.handle] for submit in submits] == [expected] * len(prompts)
    for vector, truth in zip(found, fresh, strict=True):
        assert torch.allclose(vector, truth, atol=1e-6, rtol=0)


@pytest.mark.parametrize("pooling", ["pooling_mode_lasttoken", "pooling_mode_mean_tokens"])
def test_deterministic_vectors_do_not_depend_on_batch_or_chunks_to_the_bit(pooling: str, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3", "Model")
    write_modules(tmp_path, pooling=pooling)
    prompts = prompts_of()
    small = PooledEngine(tmp_path, deterministic=True, max_step_tokens=48)
    large = PooledEngine(tmp_path, deterministic=True)
    alone = [large.outputs([prompt])[0] for prompt in prompts]
    assert all(map(torch.equal, small.outputs(prompts), alone))


@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
def test_without_modules_a_decoder_embeds_with_its_last_token(head: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, "mistral", head)
    served = PooledEngine(tmp_path, task="embed", any_dimensions=True)
    assert served.description.task == Task.TASK_EMBED
    assert served.description.pooling.any_dimensions
    prompts = prompts_of()
    base = model if head == "Model" else model.model
    for prompt, vector in zip(prompts, served.outputs(prompts, dimensions=20), strict=True):
        assert torch.allclose(vector, normalize(states_of(base, prompt)[-1][:20], dim=0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_labels", [1, 4])
def test_scores_of_classifiers_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, "ForSequenceClassification", num_labels=num_labels)
    served = PooledEngine(tmp_path, max_step_tokens=64)
    assert served.description.task == Task.TASK_SCORE
    prompts = prompts_of()
    for prompt, scores in zip(prompts, served.outputs(prompts), strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt])).logits[0]
        expected = logits.sigmoid() if num_labels == 1 else logits.softmax(0)
        assert torch.allclose(scores, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_generating_model_scores_by_its_answers_yes_and_no(tied: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen3", "ForCausalLM", tie_word_embeddings=tied)
    added = [{"content": "<|im_start|>"}]
    tokenizer = {"model": {"vocab": {"no": 11, "yes": 23}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    served = PooledEngine(tmp_path, task="score")
    prompts = prompts_of(LENGTHS)
    for prompt, scores in zip(prompts, served.outputs(prompts), strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        assert torch.allclose(scores, logits[[11, 23]].softmax(0)[1:], atol=1e-5, rtol=0)
    pooling = served.description.pooling
    assert list(pooling.labels) == ["yes"]
    for part in ("{instruction}", "{query}", "{document}"):
        assert pooling.pair_template.count(part) == 1
    assert pooling.default_instruction


@pytest.mark.parametrize(("name", "num_labels"), [("qwen3", 1), ("qwen3", 3), ("qwen2", 1), ("llama", 1)])
def test_a_classifier_that_qwen3_reranker_was_converted_to_has_its_template(
    name: str, num_labels: int, tmp_path: Path
) -> None:
    write_model(tmp_path, name, "ForSequenceClassification", num_labels=num_labels)
    pooling = PooledEngine(tmp_path).description.pooling
    is_reranker = (name, num_labels) == ("qwen3", 1)
    assert (pooling.pair_template == QWEN3_RERANKER, bool(pooling.default_instruction)) == (is_reranker, is_reranker)
    assert pooling.takes_no_pairs == (not is_reranker)


@pytest.mark.parametrize("no", [11, None])
def test_a_logit_score_of_yes_and_no_on_qwen3_has_the_template(no: int | None, tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3", "ForCausalLM")
    write_logit_score(tmp_path, true_token_id=23, false_token_id=no)
    template = PooledEngine(tmp_path).description.pooling.pair_template
    assert template == ("" if no is None else QWEN3_RERANKER)


def write_logit_score(folder: Path, **config: Any) -> None:
    modules = [{"type": f"sentence_transformers.{kind}", "path": kind} for kind in ("Transformer", "LogitScore")]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "LogitScore").mkdir()
    (folder / "LogitScore/config.json").write_text(json.dumps(config))


def test_a_logit_score_of_sentence_transformers_names_its_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama", "ForCausalLM")
    write_logit_score(tmp_path, true_token_id=7, false_token_id=None)
    served = PooledEngine(tmp_path)
    (prompt,) = prompts_of([30])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1, 7].sigmoid()
    assert torch.allclose(served.outputs([prompt])[0], expected, atol=1e-5, rtol=0)
    assert not served.description.pooling.pair_template


def test_a_model_generates_unless_it_is_made_for_something_else(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", "ForCausalLM")
    served = PooledEngine(tmp_path)
    assert served.description.task == Task.TASK_GENERATE
    assert not served.description.HasField("pooling")


def test_steps_take_longer_by_default_where_no_stream_waits_for_the_next(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", "ForCausalLM")
    for options, target_ms in (({}, 100.0), ({"task": "embed"}, 500.0), ({"task": "embed", "itl_target_ms": 0.0}, 0.0)):
        served = PooledEngine(tmp_path, **options)
        assert served.description.itl_target_ms == target_ms
        assert served.engine.scheduler.limits.itl_target_s == target_ms / 1e3
