"""MXFP4: floats of 4 bits, two in a byte, in groups of 32 that share a power of two.

Source: OCP Microscaling Formats (MX) Specification, version 1.0. transformers names the tensors weight_blocks and
weight_scales, compressed-tensors weight_packed and weight_scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.quantized.module_names import skipped
from trunkline_worker.model.quantized.scheme_entries import check_known, names
from trunkline_worker.model.quantized.stored_part import (
    BYTES_OF_EXPONENTS,
    StoredPart,
    StoredSchemes,
    powers_of_two,
    spread,
)

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth one is the sign


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    main: str
    scale: str

    def read(self, part: StoredPart) -> Tensor:
        part.skip(("input_scale", "input_global_scale"))
        rows, inner = part.rows, part.inner
        groups = -(-inner // GROUP)
        half = GROUP // 2
        packed = part.tensor(self.main, [rows, -(-inner // 2)], [rows, groups, half], dtypes=["U8"]).reshape(rows, -1)
        exponents = part.tensor(self.scale, [rows, groups], dtypes=BYTES_OF_EXPONENTS)
        places = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()
        values = torch.tensor((*VALUES, *(-value for value in VALUES)), device=part.device)[places]
        return values[:, :inner] * spread(powers_of_two(exponents), (1, GROUP), rows, inner)


COMPRESSED = Mxfp4Scheme("weight_packed", "weight_scale")


def mxfp4(config: Entries) -> StoredSchemes:
    check_known(config, ("quant_method", "modules_to_not_convert", "dequantize"))
    is_skipped, scheme = skipped(names(config, "modules_to_not_convert")), Mxfp4Scheme("weight_blocks", "weight_scales")
    return StoredSchemes("mxfp4", lambda name: None if is_skipped(name) else scheme)
