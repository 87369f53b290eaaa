"""Encoders compute what transformers computes, for texts of mixed lengths side by side and without padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from tests.worker.pooled.checkpoints import ENCODERS, write_model, write_modules
from tests.worker.pooled.pooled_rig import LENGTHS, PooledEngine, prompts_of
from trunkline.v1.worker_pb2 import Capability, Task


@torch.inference_mode()
def states_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """[length, hidden]"""
    states: torch.Tensor = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("most_tokens", [64, 2048])
def test_vectors_are_those_of_transformers(name: str, most_tokens: int, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, "Model")
    write_modules(tmp_path, pooling="pooling_mode_mean_tokens")
    served = PooledEngine(tmp_path, max_step_tokens=most_tokens)
    prompts = prompts_of()
    for prompt, vector in zip(prompts, served.outputs(prompts), strict=True):
        expected = normalize(states_of(model, prompt).mean(0), dim=0)
        assert torch.allclose(vector, expected, atol=1e-5, rtol=0)
    assert served.description.task == Task.TASK_EMBED
    assert list(served.description.capabilities) == [Capability.CAPABILITY_VECTORS]
    assert served.description.pooling.dimensions == 48


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_all_kernels_make_the_same_vectors(name: str, kernels: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, "Model", num_hidden_layers=2)
    write_modules(tmp_path, pooling="pooling_mode_mean_tokens")
    prompts = prompts_of([1, 70, 9])
    options = {"max_step_tokens": 64, "max_running_requests": 4}
    truth = PooledEngine(tmp_path, **options).outputs(prompts)
    found = PooledEngine(tmp_path, kernels=kernels, **options).outputs(prompts)
    for vector, expected in zip(found, truth, strict=True):
        assert torch.allclose(vector, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert"])
def test_vectors_in_bfloat16_point_the_same_way(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, "Model", dtype=torch.bfloat16)
    write_modules(tmp_path, pooling="pooling_mode_mean_tokens")
    served = PooledEngine(tmp_path)
    assert served.description.dtype == "bfloat16"
    prompts = prompts_of()
    for prompt, vector in zip(prompts, served.outputs(prompts), strict=True):
        assert cosine_similarity(vector, states_of(model, prompt).mean(0), dim=0) >= 0.9999


POOLED = {
    "pooling_mode_cls_token": lambda states: states[0],
    "pooling_mode_lasttoken": lambda states: states[-1],
    "pooling_mode_max_tokens": lambda states: states.amax(0),
    "pooling_mode_mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
}


@pytest.mark.parametrize("pooling", POOLED)
def test_every_pooling_of_sentence_transformers(pooling: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, "bert", "Model")
    write_modules(tmp_path, pooling=pooling, normalize=False)
    prompts = prompts_of()
    for prompt, vector in zip(prompts, PooledEngine(tmp_path).outputs(prompts), strict=True):
        assert torch.allclose(vector, POOLED[pooling](states_of(model, prompt)), atol=1e-4, rtol=1e-5)


def test_dense_modules_project_what_is_pooled(tmp_path: Path) -> None:
    model = write_model(tmp_path, "bert", "Model")
    weights = write_modules(tmp_path, pooling="pooling_mode_cls_token", dense=[(40, 48), (24, 40)])
    served = PooledEngine(tmp_path)
    assert served.description.pooling.dimensions == 24
    prompts = prompts_of()
    for prompt, vector in zip(prompts, served.outputs(prompts), strict=True):
        expected = states_of(model, prompt)[0]
        for weight in weights.values():
            expected = torch.tanh(weight @ expected)
        assert torch.allclose(vector, normalize(expected, dim=0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_pairs_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    model = write_model(tmp_path, name, "ForSequenceClassification", num_labels=num_labels)
    served = PooledEngine(tmp_path)
    prompts = prompts_of([length for length in LENGTHS if length > 1])
    submits = [served.submit(prompt, first_segment_tokens=len(prompt) // 2) for prompt in prompts]
    for prompt, scores in zip(prompts, served.run(submits)[0], strict=True):
        types = torch.arange(len(prompt)) >= len(prompt) // 2
        segments = {} if name.startswith("modern") else {"token_type_ids": types[None].long()}
        if model.config.to_dict().get("type_vocab_size") == 1:
            segments = {}
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt]), **segments).logits[0]
        expected = logits.sigmoid() if num_labels == 1 else logits.softmax(0)
        assert torch.allclose(scores, expected, atol=1e-5, rtol=0)
    assert served.description.task == Task.TASK_SCORE
    assert list(served.description.pooling.labels) == [f"LABEL_{index}" for index in range(num_labels)]
    assert not served.description.pooling.takes_no_pairs


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_deterministic_vectors_do_not_depend_on_the_batch_to_the_bit(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, "Model")
    write_modules(tmp_path, pooling="pooling_mode_mean_tokens")
    served = PooledEngine(tmp_path, deterministic=True)
    prompts = prompts_of()
    together = served.outputs(prompts)
    alone = [served.outputs([prompt])[0] for prompt in reversed(prompts)]
    assert all(map(torch.equal, together, reversed(alone)))


def test_a_prompt_longer_than_a_step_has_one_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path, "bert", "Model")
    write_modules(tmp_path, pooling="pooling_mode_mean_tokens")
    served = PooledEngine(tmp_path, max_step_tokens=64)
    together: list[list[int]] = []
    served.engine.before_launch = together.append
    submits = [served.submit(prompt) for prompt in prompts_of([20, 300, 20, 40])]
    served.run(submits)
    first, long, *others = (submit.handle for submit in submits)
    assert sorted(map(sorted, together)) == [[first], [long], others] or [long] in together
    assert sum(map(len, together)) == len(submits), "no prompt takes part in two steps"


def test_raw_and_shorter_vectors(tmp_path: Path) -> None:
    model = write_model(tmp_path, "bert", "Model", matryoshka_dimensions=[48, 16, 8])
    write_modules(tmp_path, pooling="pooling_mode_cls_token")
    served = PooledEngine(tmp_path)
    assert list(served.description.pooling.offered_dimensions) == [8, 16]
    (prompt,) = prompts_of([12])
    expected = states_of(model, prompt)[0]
    (raw,), (short,) = served.outputs([prompt], raw=True), served.outputs([prompt], dimensions=16)
    assert torch.allclose(raw, expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(short, normalize(expected[:16], dim=0), atol=1e-5, rtol=0)
