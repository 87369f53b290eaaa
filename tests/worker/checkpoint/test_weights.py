"""What the loader does with weights that are not numbers, or that contradict the config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parameters import one_in
from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import base_config, silence, their_logits, their_model, weights_of, write_config
from trunkline_worker.model import loading, weight_reading
from trunkline_worker.model.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.weight_check import WeightCheck
from trunkline_worker.model.checkpoint.weight_stream import WeightStream
from trunkline_worker.model.loading import LoadedModel, load_model

CPU = torch.device("cpu")
TOKENS = list(range(20))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    their_model(tmp_path, base_config("LlamaForCausalLM"))
    return tmp_path


def load(directory: Path, **options: object) -> LoadedModel:
    return load_model(directory, device=CPU, **options)  # type: ignore[arg-type]


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Writes the weights with these tensors instead; None: without it. A double underscore stands for a dot."""
    present = load_file(directory / SINGLE)
    for name, tensor in tensors.items():
        present.pop(name.replace("__", "."), None)
        if tensor is not None:
            present[name.replace("__", ".")] = tensor
    save_file(present, directory / SINGLE)


@pytest.mark.parametrize("value", one_in(3, [float("nan"), float("inf"), float("-inf")]))
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_found_in_every_tensor(
    value: float, stored: torch.dtype, directory: Path
) -> None:
    right = {name: tensor.to(stored) for name, tensor in load_file(directory / SINGLE).items()}
    for index, name in enumerate(right):
        broken = right[name].clone()
        broken.view(-1)[(index * 7) % broken.numel()] = value
        save_file({**right, name: broken}, directory / SINGLE)
        with pytest.raises(ModelError, match=f"tensor {name} has NaN or infinite values: the file is damaged"):
            load(directory)


def test_values_that_the_served_dtype_does_not_hold_are_refused(directory: Path) -> None:
    norm = load_file(directory / SINGLE)["model.norm.weight"]
    norm[3] = 1e5
    change(directory, model__norm__weight=norm)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has values from .* to 100000, past those of float16"):
        load(directory, dtype="float16")
    for dtype in ("float32", "bfloat16"):
        load(directory, dtype=dtype)


def test_weights_that_are_streamed_to_a_device_are_looked_at_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = load_file(directory / SINGLE)["model.norm.weight"]
    norm[3] = float("nan")
    change(directory, model__norm__weight=norm)
    stream = WeightStream(CPU, piece_bytes=64)
    monkeypatch.setattr(loading, "Checkpoint", lambda directory, _, **options: Checkpoint(directory, stream, **options))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight has NaN"):
        load(directory)


def test_the_check_names_the_first_tensor_that_is_not_finite() -> None:
    check = WeightCheck()
    assert check.broken() is None
    for name, values in (
        ("empty", []),
        ("fine", [1.0, -2.0]),
        ("first", [0.0, float("nan")]),
        ("second", [float("inf")]),
    ):
        check.see(torch.tensor(values), name)
    assert check.broken() == "first"


def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(directory: Path) -> None:
    shard = {name: tensor.flip(0).contiguous() for name, tensor in load_file(directory / SINGLE).items()}
    save_file(shard, directory / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(shard, "model-00001-of-00001.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    got = ragged_logits(load(directory, kernels="torch"), [TOKENS])[0]
    torch.testing.assert_close(got, from_pretrained(directory), atol=2e-4, rtol=1e-4)
    (directory / SINGLE).unlink()
    sharded = ragged_logits(load(directory, kernels="torch"), [TOKENS])[0]
    torch.testing.assert_close(sharded, from_pretrained(directory), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(got, sharded)


def tied() -> dict[str, object]:
    return {**base_config("LlamaForCausalLM"), "tie_word_embeddings": True}


def from_pretrained(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with silence():
        model: Any = AutoModelForCausalLM.from_pretrained(directory)
        return their_logits(model.float(), TOKENS)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("case", ["absent", "equal", "different", "head alone"])
def test_a_tied_head_is_what_transformers_makes_of_the_file(case: str, kernels: str, tmp_path: Path) -> None:
    their_model(tmp_path, tied())
    embedding = load_file(tmp_path / SINGLE)[EMBEDDING]
    if case == "equal":
        change(tmp_path, lm_head__weight=embedding.clone())
    elif case == "different":
        change(tmp_path, lm_head__weight=embedding.flip(0).contiguous())
    elif case == "head alone":
        change(tmp_path, lm_head__weight=embedding.clone(), model__embed_tokens__weight=None)
    model = load(tmp_path, kernels=kernels)
    torch.testing.assert_close(ragged_logits(model, [TOKENS])[0], from_pretrained(tmp_path), atol=2e-4, rtol=1e-4)


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    their_model(tmp_path, tied())
    change(tmp_path, lm_head__weight=torch.zeros(5, 24))
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[5, 24\]"):
        load(tmp_path)


def test_equal_weights_stay_tied(tmp_path: Path) -> None:
    their_model(tmp_path, tied())
    change(tmp_path, lm_head__weight=load_file(tmp_path / SINGLE)[EMBEDDING].clone())
    weights = weights_of(load(tmp_path, kernels="torch"))
    assert weights.head.weight is weights.embedding


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_config_without_dtype_is_served_as_it_is_stored(stored: torch.dtype, directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["dtype"]
    write_config(directory, config)
    save_file({name: value.to(stored) for name, value in load_file(directory / SINGLE).items()}, directory / SINGLE)
    assert load(directory).dtype == stored
    write_config(directory, {**config, "torch_dtype": "bfloat16"})
    assert load(directory).dtype == torch.bfloat16
    write_config(directory, {**config, "torch_dtype": "bfloat16", "dtype": "float32"})
    assert load(directory).dtype == torch.float32


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reading, "free_bytes", lambda device: 10_000)
    with pytest.raises(ModelError, match=r"the weights take .* GiB in float32, .* GiB are free"):
        load(directory)
