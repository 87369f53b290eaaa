"""Quantised files that are damaged or contradict config.json: one line names the tensor, and nothing is served."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.model.oracle import checked
from tests.worker.quantized.checkpoints import change_tensors, write_checkpoint
from tests.worker.quantized.stored_formats import FORMATS
from trunkline_worker.model.checkpoint.entries import without as leave_out
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.loading import load_model
from trunkline_worker.model.quantized.quantization_config import parse_schemes
from trunkline_worker.model.quantized.stored_part import spread

Q_PROJ = "model.layers.1.self_attn.q_proj"


def problem(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, **{"dtype": "float32", "device": torch.device("cpu"), **options})
    return checked(caught.value)


def without(tensor: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(f"{Q_PROJ}.{tensor}")


def instead(tensor: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    name = f"{Q_PROJ}.{tensor}"
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def one(value: float) -> Callable[[Tensor], Tensor]:
    """Changes one value."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.float().reshape(-1)
        changed[3] = value
        return changed.view(tensor.shape).to(tensor.dtype)

    return change


def byte(value: int) -> Callable[[Tensor], Tensor]:
    """Changes all bytes."""
    return lambda tensor: torch.full_like(tensor.view(torch.uint8), value).view(tensor.dtype)


NAN = "has NaN or infinite values: the file is damaged"
BROKEN: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    ("fp8-blocks", without("weight"), f"lacks the tensor {Q_PROJ}.weight"),
    ("fp8-blocks", without("weight_scale_inv"), f"lacks the tensor {Q_PROJ}.weight_scale_inv"),
    ("fp8-blocks", instead("weight_scale_inv", lambda t: t[1:]), f"{Q_PROJ}.weight_scale_inv has shape [3, 2], config"),
    ("fp8-blocks", instead("weight_scale_inv", one(float("nan"))), f"{Q_PROJ}.weight_scale_inv {NAN}"),
    ("fp8-blocks", instead("weight", lambda t: t.bfloat16()), f"{Q_PROJ}.weight is stored as BF16, which is not"),
    ("fp8-blocks", instead("weight", one(float("nan"))), f"{Q_PROJ}.weight {NAN}"),
    ("fp8-tensor", instead("weight_scale", lambda t: t.int()), f"{Q_PROJ}.weight_scale is stored as I32"),
    ("fp8-exponents", instead("weight_scale_inv", byte(255)), f"{Q_PROJ}.weight_scale_inv {NAN}"),
    ("int8-channel", without("weight_scale"), f"lacks the tensor {Q_PROJ}.weight_scale"),
    ("int8-channel-zeros", without("weight_zero_point"), f"lacks the tensor {Q_PROJ}.weight_zero_point"),
    ("packed4-zeros", without("weight_packed"), f"lacks the tensor {Q_PROJ}.weight_packed"),
    ("packed4-zeros", without("weight_zero_point"), f"lacks the tensor {Q_PROJ}.weight_zero_point"),
    ("packed4-zeros", instead("weight_zero_point", lambda t: t[1:]), "weight_zero_point has shape [15, 2], config"),
    ("packed4-zeros", instead("weight_shape", lambda t: t + 1), "weight_shape says [129, 129], config.json says [128"),
    ("packed4-zeros", instead("weight_scale", one(float("inf"))), f"{Q_PROJ}.weight_scale {NAN}"),
    ("packed4-groups", instead("weight_packed", lambda t: t[:, 1:]), "weight_packed has shape [128, 15], config"),
    ("awq", without("qzeros"), f"lacks the tensor {Q_PROJ}.qzeros"),
    ("awq", instead("scales", lambda t: t[:1]), f"{Q_PROJ}.scales has shape [1, 128], config.json says [2, 128]"),
    ("awq", instead("scales", one(float("nan"))), f"{Q_PROJ}.scales {NAN}"),
    ("gptq", without("scales"), f"lacks the tensor {Q_PROJ}.scales"),
    ("gptq", instead("g_idx", lambda t: t.flip(0)), f"{Q_PROJ}.g_idx orders inputs by activation (desc_act), which is"),
    ("gptq", instead("bias", one(1.0)), f"unexpected tensor {Q_PROJ}.bias"),
    ("mxfp4", without("weight_scales"), f"lacks the tensor {Q_PROJ}.weight_scales"),
    ("compressed-mxfp4", instead("weight_scale", byte(255)), f"{Q_PROJ}.weight_packed stands for values that are not"),
]


@pytest.mark.parametrize(("name", "change", "told"), BROKEN)
def test_a_tensor_that_is_broken_is_named(
    name: str, change: Callable[[dict[str, Tensor]], Any], told: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, FORMATS[name], attention_bias=False)
    change_tensors(tmp_path, change)
    assert told in problem(tmp_path)


def test_values_past_the_dtype_are_refused_with_the_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FORMATS["fp8-blocks"])
    change_tensors(tmp_path, instead("weight_scale_inv", one(1e6)))
    assert f"{Q_PROJ}.weight stands for values past those of float16: use --dtype bfloat16" in problem(
        tmp_path, dtype="float16"
    )


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FORMATS["fp8-blocks"])
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is damaged or cut short" in problem(tmp_path)


def test_weights_are_not_quantised_twice(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FORMATS["fp8-blocks"])
    told = problem(tmp_path, quantization="int8")
    assert told == "quantization=int8: the weights are quantised already, by fp8: leave it out"


FP8 = {"quant_method": "fp8"}
AWQ, GPTQ = FORMATS["awq"].config, FORMATS["gptq"].config
PACKED = FORMATS["packed4-groups"].config


def of_weights(**changes: Any) -> dict[str, Any]:
    group = PACKED["config_groups"]["group_0"]
    return PACKED | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"quantization_config": BITSANDBYTES},
            'quantised by "bitsandbytes"',
        ),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, 'quantised by "NVFP4", which is not supported'),
        ({"quantization_config": {"bits": 4}}, "quantised by null"),
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, 'quantised by "MLX"'),
        ({"quantization_config": FP8, "compression_config": FP8}, "both quantization_config, compression_config are"),
        ({"quantization_config": 4}, "quantization_config 4 is not supported; supported: an object"),
        ({"quantization_config": {"quant_method": [1]}}, "quantised by a list of 1"),
        ({"quantization_config": FP8 | {"weight_block_size": [0, 1]}}, "quantization_config.weight_block_size a list"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, 'quantization_config.fmt "e5m2" is not supported'),
        ({"quantization_config": FP8 | {"ignored_layers": ["("]}}, "is no regular expression"),
        ({"quantization_config": FP8 | {"ignored_layers": "lm_head"}}, "supported: a list of names"),
        ({"quantization_config": FP8 | {"rotation": "hadamard"}}, "quantization_config.rotation"),
        ({"quantization_config": AWQ | {"version": "gemv"}}, 'quantization_config.version "gemv" is not supported'),
        ({"quantization_config": AWQ | {"bits": 8}}, "quantization_config.bits 8 is not supported; supported: 4"),
        ({"quantization_config": AWQ | {"group_size": 0}}, "quantization_config.group_size 0 is not supported"),
        ({"quantization_config": GPTQ | {"bits": 3}}, "quantization_config.bits 3 is not supported; supported: 4, 8"),
        ({"quantization_config": GPTQ | {"checkpoint_format": "marlin"}}, 'checkpoint_format "marlin" is not'),
        ({"quantization_config": GPTQ | {"lm_head": True}}, "quantization_config.lm_head true is not supported"),
        ({"quantization_config": GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}}, "quantization_config.dynamic.+:.* an"),
        ({"quantization_config": GPTQ | {"modules_in_block_to_quantize": [1]}}, "supported: a list of lists of names"),
        ({"quantization_config": PACKED | {"format": "nvfp4-pack-quantized"}}, 'format "nvfp4-pack-quantized" is not'),
        ({"quantization_config": PACKED | {"quantization_status": "frozen"}}, 'quantization_status "frozen" is not'),
        ({"quantization_config": PACKED | {"transform_config": {"a": 1}}}, "transform_config an object of 1 is not"),
        ({"quantization_config": PACKED | {"sparsity_config": {"format": "2:4"}}}, 'sparsity_config.format "2:4" is'),
        ({"quantization_config": PACKED | {"config_groups": {"W4A16": ["Linear"]}}}, "W4A16 a list of 1 is not"),
        ({"quantization_config": of_weights(actorder="group")}, 'weights.actorder "group" is not supported'),
        ({"quantization_config": of_weights(num_bits=3)}, "weights.num_bits 3 is not supported; supported: 4, 8"),
        ({"quantization_config": of_weights(strategy="tensor_group")}, 'weights.strategy "tensor_group" is not'),
        ({"quantization_config": of_weights(group_size=0)}, "weights.group_size 0 is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FORMATS["fp8-tensor"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    found = problem(tmp_path)
    assert told in found
    assert "config.json" in found
    if "quantised by" in told:
        assert "serve the unquantised checkpoint; --quantization int8" in found


def test_a_key_that_the_operator_ignores_counts_as_absent(tmp_path: Path) -> None:
    form = FORMATS["fp8-tensor"]
    write_checkpoint(tmp_path, replace(form, config=form.config | {"rotation": "none"}))
    assert "--ignore-config-keys" in problem(tmp_path)
    load_model(tmp_path, device=torch.device("cpu"), ignore_config_keys=("quantization_config.rotation",))


ODD_VALUES: list[Any] = [
    None, True, 0, -1, 2.5, float("nan"), 1e13, 10**40, "", "a\nb", "\ud800", "x" * 5000, "(", [], {}, [1], [[2]],
    ["("], {"a": 1}, {"a": None}, {"a": ["b"]},
]  # fmt: skip


def variants(value: Any) -> Iterator[Any]:
    """The value with one of its entries, at any depth, gone or replaced by an odd one."""
    yield from ODD_VALUES
    if isinstance(value, dict):
        for key in value:
            yield {name: entry for name, entry in value.items() if name != key}
            yield from ({**value, key: changed} for changed in variants(value[key]))


@pytest.mark.parametrize("name", FORMATS)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(name: str) -> None:
    refused = 0
    for config in variants(FORMATS[name].config):
        try:
            parse_schemes({"quantization_config": config})
        except ModelError as error:
            checked(error)
            refused += 1
    assert refused > 30


def test_a_block_that_is_far_larger_than_the_weight_takes_no_memory() -> None:
    scales = spread(torch.ones(64, 1), (1, 1 << 40), 64, 32)
    assert scales.shape == (64, 32)


def test_a_scale_past_float32_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FORMATS["int8-channel"])
    change_tensors(tmp_path, instead("weight_scale", lambda scale: scale.double() * 1e300))
    assert f"{Q_PROJ}.weight stands for values that are not finite" in problem(tmp_path)


@pytest.mark.parametrize("change", [without("g_idx"), instead("g_idx", torch.zeros_like)])
def test_inputs_that_are_ordered_need_their_order(change: Callable[[dict[str, Tensor]], Any], tmp_path: Path) -> None:
    form = FORMATS["gptq"]
    write_checkpoint(tmp_path, replace(form, config=form.config | {"desc_act": True}))
    change_tensors(tmp_path, change)
    assert f"{Q_PROJ}.g_idx" in problem(tmp_path)


def test_a_key_within_keys_can_be_declared_harmless() -> None:
    config = {"a": {"b": {"c": 1, "d": 2}}, "e.f": 3, "g": {"h": 4}}
    assert leave_out(config, ("a.b.c", "e.f", "g.x")) == {"a": {"b": {"d": 2}}, "g": {"h": 4}}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}}, "format": "nvfp4-pack-quantized"},
         "nvfp4-pack-quantized"),
    ],
)  # fmt: skip
def test_a_format_that_is_refused_is_named_with_a_way_out(config: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){name}.*serve the unquantised checkpoint"):
        parse_schemes({"quantization_config": config})


def test_an_awq_checkpoint_in_float16_is_dequantised_once(tmp_path: Path) -> None:
    """There are no kernels for it on a CPU, and the reference would dequantise in each step."""
    write_checkpoint(tmp_path, FORMATS["awq"])
    assert load_model(tmp_path, dtype="float16", device=torch.device("cpu")).quantized_kinds == frozenset()
