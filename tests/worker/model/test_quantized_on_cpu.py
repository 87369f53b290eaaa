"""--quantization on a CPU, against the reference and against what the weights stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import base_config, their_model
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.loading import LoadedModel, load_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9]]


def load(directory: Path, **options: Any) -> LoadedModel:
    return load_model(directory, device=torch.device("cpu"), **options)


@pytest.fixture(params=["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    # A token uses all experts: in bfloat16, it may else choose others than in the reference.
    experts = {"moe_intermediate_size": 64, "num_experts_per_tok": 6} if "Moe" in request.param else {}
    their_model(tmp_path, base_config(request.param) | SIZES | experts)
    return tmp_path


@pytest.mark.parametrize(("dtype", "tolerance", "saved"), [("float32", 1e-4, 3.0), ("bfloat16", 5e-2, 1.6)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_logits_are_those_of_the_reference(
    kind: str, dtype: str, tolerance: float, saved: float, checkpoint: Path
) -> None:
    quantized = load(checkpoint, dtype=dtype, quantization=kind)
    reference = load(checkpoint, dtype=dtype, quantization=kind, kernels="torch")
    plain = load(checkpoint, dtype=dtype)
    assert isinstance(quantized.decoder, CpuDecoder)
    read, whole = (model.weight_bytes.layers + model.weight_bytes.experts for model in (quantized, plain))
    assert read < whole / saved
    found, expected, unquantized = (
        torch.cat(ragged_logits(model, SEQUENCES)).float() for model in (quantized, reference, plain)
    )
    if quantized.spec.routing is None:
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    else:  # a rounding of the router's logits changes shares, and so all logits of a token
        error = float((found - expected).square().mean() / expected.square().mean()) ** 0.5
        assert error < 2 * tolerance
    assert not torch.equal(found, unquantized)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_deterministic_logits_do_not_depend_on_others(kind: str, checkpoint: Path) -> None:
    model = load(checkpoint, dtype="float32", quantization=kind, deterministic=True)
    together = ragged_logits(model, SEQUENCES)
    for tokens, logits in zip(SEQUENCES, together, strict=True):
        (alone,) = ragged_logits(model, [tokens], chunks=(1,))
        assert torch.equal(alone, logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [("LlamaForCausalLM", {}), ("Qwen3ForCausalLM", {}), ("MistralForCausalLM", {"sliding_window": 3})],
)
def test_all_layers_in_one_call_equal_separate_calls_to_the_bit(
    architecture: str, keys: dict[str, Any], kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    their_model(tmp_path, base_config(architecture) | SIZES | keys)
    model = load(tmp_path, dtype=dtype, quantization=kind, deterministic=True)
    assert isinstance(model.decoder, CpuDecoder)
    assert model.decoder._at_once is not None
    at_once = torch.cat(ragged_logits(model, SEQUENCES))
    monkeypatch.setattr(model.decoder, "_at_once", None)
    assert torch.equal(at_once, torch.cat(ragged_logits(model, SEQUENCES)))


@pytest.mark.parametrize("architecture", ["GraniteForCausalLM", "Olmo2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_layers_with_other_parts_are_separate_calls(architecture: str, tmp_path: Path) -> None:
    their_model(tmp_path, base_config(architecture))
    decoder = load(tmp_path, dtype="float32").decoder
    assert isinstance(decoder, CpuDecoder)
    assert decoder._at_once is None


def test_a_model_need_only_fit_into_memory_when_it_is_quantised(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(checkpoint, dtype="float32").weight_bytes
    free = (whole.layers + whole.experts) // 2 + 2 * whole.head
    monkeypatch.setattr("trunkline_worker.model.weight_reading.free_bytes", lambda device: free)
    load(checkpoint, dtype="float32", quantization="int8")
    with pytest.raises(ModelError, match="the weights take"):
        load(checkpoint, dtype="float32")


def test_what_a_cpu_cannot_quantise_is_refused_by_name(tmp_path: Path) -> None:
    their_model(tmp_path, base_config("Qwen3ForCausalLM"))
    with pytest.raises(ModelError, match="quantization=fp8 needs a GPU: a CPU has int8 and int4"):
        load(tmp_path, quantization="fp8")
    with pytest.raises(ModelError, match="quantization=int8 needs the C kernels"):
        load(tmp_path, quantization="int8", dtype="float16")
    with pytest.raises(ModelError, match="quantization=int4: int4 weights need an inner dimension that 64 divides"):
        load(tmp_path, quantization="int4")
