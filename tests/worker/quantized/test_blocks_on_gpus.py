"""FP8 checkpoints with a scale per block of 128 x 128 stay quantised on GPUs (interpreted here)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.engine_rig import drive, make_engine, make_submit
from tests.worker.quantized.checkpoints import write_checkpoint
from tests.worker.quantized.stored_formats import exponents, fp8
from trunkline_kernels.quantized_weight import QuantizedWeight, dequantize
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.model.gpu_weight import GpuWeight
from trunkline_worker.model.loading import LoadedModel, load_model

FORM = fp8(lambda r, i: (-(-r // 128), -(-i // 128)), "weight_scale_inv", weight_block_size=[128, 128])
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, dtype="float32", device=torch.device("cpu"), kernels="triton", **options)


def products_of(model: LoadedModel) -> tuple[GpuWeight, ...]:
    assert isinstance(model.decoder, GpuDecoder)
    return model.decoder._layers[0].products


def values_of(theirs: Any) -> list[Tensor]:
    """The products of the first layer, in the order of LayerSpec.products."""
    (layer,) = theirs.model.layers
    attention, mlp = layer.self_attn, layer.mlp
    return [
        torch.cat([part.weight.detach() for part in parts])
        for parts in (
            (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,), (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("form", [FORM, exponents(FORM)], ids=["floats", "exponents"])
def test_every_product_stays_in_blocks(form: Any, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, form, **SIZES)
    model = load(tmp_path)
    for product, values in zip(products_of(model), values_of(theirs), strict=True):
        assert isinstance(product.weight, QuantizedWeight)
        assert product.weight.in_blocks
        assert torch.equal(dequantize(product.weight), values)
    assert model.quantized_kinds == {"fp8"}
    stored = sum(values.numel() for values in values_of(theirs))
    assert stored < model.weight_bytes.layers < 1.02 * stored
    engine = make_engine(tmp_path, kernels="triton", kv_blocks=64)
    assert len(drive(engine, [make_submit(1, [5, 9, 3], max_tokens=2, ignore_eos=True)]).tokens[1]) == 2


def test_a_part_that_ends_within_a_block_is_not_joined_with_the_next(tmp_path: Path) -> None:
    """Its product is dequantised: keys and values have 64 rows each."""
    theirs = write_checkpoint(tmp_path, FORM, **{**SIZES, "num_key_value_heads": 1})
    model = load(tmp_path)
    qkv, *others = products_of(model)
    expected, *_ = values_of(theirs)
    assert isinstance(qkv.weight, Tensor)
    assert torch.equal(qkv.weight, expected)
    assert all(isinstance(other.weight, QuantizedWeight) for other in others)


def test_deterministic_workers_dequantise_it(tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, FORM, **SIZES)
    model = load(tmp_path, deterministic=True)
    for product, values in zip(products_of(model), values_of(theirs), strict=True):
        assert isinstance(product.weight, Tensor)
        assert torch.equal(product.weight, values)
    assert not model.quantized_kinds
