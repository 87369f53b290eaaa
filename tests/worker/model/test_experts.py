"""Models with a mixture of experts: what engines do to requests changes no token, and damaged files are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parameters import one_in
from tests.worker.model.checkpoints import VOCAB, write_checkpoint
from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import base_config, checked, their_model
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import parse_spec
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.loading import LoadedModel, load_model

CPU = torch.device("cpu")
NAMES = ("qwen3-moe-some-layers", "mixtral-window", "olmoe", "qwen2-moe")
PROMPTS = [[(7 * place + length) % VOCAB for place in range(length)] for length in (55, 3, 17, 40)]


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, device=CPU, **options)


@pytest.mark.parametrize("dtype", one_in(2, ["bfloat16", "float32"]))
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_bits_depend_on_no_other_row(name: str, kernels: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    model = load(tmp_path, dtype=dtype, kernels=kernels, deterministic=True)
    assert isinstance(model.decoder, CpuDecoder) == (kernels == "auto")
    for tokens, logits in zip(PROMPTS, ragged_logits(model, PROMPTS), strict=True):
        for chunk in (1, 7, len(tokens)):
            assert torch.equal(ragged_logits(model, [tokens], chunks=(chunk,))[0], logits)


def change(path: Path, function: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    function(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@torch.inference_mode()
def test_of_experts_with_equal_scores_the_first_ones_are_used(kernels: str, tmp_path: Path) -> None:
    their_model(tmp_path, base_config("MixtralForCausalLM") | {"num_local_experts": 6, "num_experts_per_tok": 3})
    gates = [f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in range(2)]

    def all_alike(tensors: dict[str, Tensor]) -> None:
        for gate in gates:
            tensors[gate].zero_()

    def others_differ(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name and name.split(".experts.")[1][0] in "345":
                tensor += 1.0

    change(tmp_path, all_alike)
    expected = ragged_logits(load(tmp_path, kernels=kernels), PROMPTS[1:2])[0]
    change(tmp_path, others_differ)
    assert torch.equal(ragged_logits(load(tmp_path, kernels=kernels), PROMPTS[1:2])[0], expected)
    change(tmp_path, lambda tensors: tensors["model.layers.0.block_sparse_moe.experts.2.w2.weight"].add_(1.0))
    assert not torch.equal(ragged_logits(load(tmp_path, kernels=kernels), PROMPTS[1:2])[0], expected)


EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"
FIRST, FUSED = "model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
GATE = "model.layers.0.mlp.gate.weight"
BROKEN: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (lambda tensors: tensors.pop(EXPERT), f"lacks the tensor {EXPERT}"),
    (lambda tensors: tensors.pop(GATE), f"lacks the tensor {GATE}"),
    (
        lambda tensors: tensors.update({EXPERT: tensors[EXPERT][1:]}),
        f"{EXPERT} has shape [19, 24], config.json says [20",
    ),
    (lambda tensors: tensors.update({GATE: tensors[GATE][1:]}), f"{GATE} has shape [5, 24], config.json says [6, 24]"),
    (lambda tensors: tensors[EXPERT].fill_(torch.nan), f"{EXPERT} has NaN or infinite values"),
    (
        lambda tensors: tensors.update({EXPERT.replace("4", "6"): tensors[EXPERT] + 0}),
        "unexpected tensor model.layers.1.mlp",
    ),
    (
        lambda tensors: tensors.update({FUSED: tensors.pop(FIRST)}),
        f"has the experts of a layer in one tensor, {FUSED}",
    ),
    (
        lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}),
        f"{EXPERT} is stored as I8, which is not",
    ),
]


@pytest.mark.parametrize(("damage", "told"), BROKEN)
def test_a_damaged_or_missing_tensor_of_an_expert_is_named(
    damage: Callable[[dict[str, Tensor]], Any], told: str, tmp_path: Path
) -> None:
    their_model(tmp_path, base_config("Qwen3MoeForCausalLM"))
    change(tmp_path, damage)
    with pytest.raises(ModelError) as refused:
        load(tmp_path)
    assert told in checked(refused.value)


def test_a_token_may_have_at_most_64_experts() -> None:
    config = base_config("Qwen3MoeForCausalLM") | {"num_experts": 4096}
    routing = parse_spec(config | {"num_experts_per_tok": 64}).routing
    assert routing is not None
    assert routing.top_k == 64
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        parse_spec(config | {"num_experts_per_tok": 65})


def test_experts_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    their_model(tmp_path, base_config("Qwen3MoeForCausalLM"))
    read = load(tmp_path).weight_bytes
    assert read.experts == 4 * load(tmp_path).spec.expert_params
    monkeypatch.setattr("trunkline_worker.model.weight_reading.free_bytes", lambda device: read.layers + read.experts)
    with pytest.raises(ModelError, match="the weights take"):
        load(tmp_path)
