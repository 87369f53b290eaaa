"""AWQ and GPTQ by words that were written by hand."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.checkpoint.checkpoint import Checkpoint
from trunkline_worker.model.quantized.awq_format import AwqScheme
from trunkline_worker.model.quantized.gptq_format import GptqScheme
from trunkline_worker.model.quantized.stored_part import Scheme, StoredPart

SCALES = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]])


def words(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def read(directory: Path, scheme: Scheme, inner: int, tensors: dict[str, Tensor]) -> list[list[float]]:
    """The weight [8, inner]."""
    save_file({f"part.{name}": tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    with Checkpoint(directory) as checkpoint:
        weight = scheme.read(StoredPart(checkpoint, "part", 8, inner, torch.device("cpu")))
    assert not isinstance(weight, QuantizedWeight), "no kernel takes a weight so small"
    return weight.tolist()


def test_awq_has_the_columns_of_a_word_in_its_own_order(tmp_path: Path) -> None:
    columns_0_to_7, columns_8_to_15 = 0x75316420, 0xFDB9ECA8  # each with its number as its value
    tensors = {"qweight": words([columns_0_to_7], [columns_8_to_15]), "qzeros": words([0x11111111]), "scales": SCALES}
    weight = read(tmp_path, AwqScheme(2, has_zeros=True), 2, tensors)
    assert weight == [[(row - 1) * scale, (row + 7) * scale] for row, scale in enumerate(SCALES[0].tolist())]


def test_gptq_stores_zero_points_minus_one_and_version_2_as_they_are(tmp_path: Path) -> None:
    for less_one, stored in ((True, 0x76543210), (False, 0x87654321)):
        tensors = {"qweight": words([0x76543210] * 8), "qzeros": words([stored]), "scales": SCALES}
        weight = read(tmp_path, GptqScheme(4, 8, less_one), 8, tensors)
        for row, scale in enumerate(SCALES[0].tolist()):
            assert weight[row] == [(value - row - 1) * scale for value in range(8)]


def test_a_zero_point_of_0_borrows_from_its_neighbour(tmp_path: Path) -> None:
    tensors = {"qweight": words([0x76543210] * 8), "qzeros": words([0x88888850 - 0x11111111]), "scales": SCALES}
    weight = read(tmp_path, GptqScheme(4, 8, less_one=True), 8, tensors)
    assert [row[0] / scale for row, scale in zip(weight, SCALES[0].tolist(), strict=True)] == [0, -5, *[-8] * 6]
