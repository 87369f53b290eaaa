"""AWQ as AutoAWQ stores it: 4 bits, transposed, the columns of a word in an order of their own.

Source: Lin et al. (2024), https://github.com/casper-hansen/AutoAWQ, format "gemm".
"""

from dataclasses import dataclass

from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.quantized.integers import integer_weight, num_words, unpacked
from trunkline_worker.model.quantized.scheme_entries import check_known, names, read_group
from trunkline_worker.model.quantized.stored_part import FLOATS, StoredPart, StoredSchemes

BITS = 4
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of 8 neighbouring columns in their word
KEYS = ("quant_method", "bits", "group_size", "zero_point", "version", "modules_to_not_convert", "backend", "do_fuse",
        "fuse_max_seq_len", "modules_to_fuse", "exllama_config")  # fmt: skip


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """group: inner elements that share a scale; None: all of a row"""

    group: int | None
    has_zeros: bool
    main: str = "qweight"

    def read(self, part: StoredPart) -> QuantizedWeight | Tensor:
        rows, inner = part.rows, part.inner
        group = self.group or inner
        groups, words = -(-inner // group), num_words(rows, BITS)
        values = _in_order(part.tensor(self.main, [inner, words], dtypes=["I32"]))[:, :rows].t()
        scale = part.tensor("scales", [groups, rows], dtypes=FLOATS).t()
        zero = None
        if self.has_zeros:
            zero = _in_order(part.tensor("qzeros", [groups, words], dtypes=["I32"]))[:, :rows].t()
        return integer_weight(values, scale, zero, bits=BITS, group=group)


def _in_order(words: Tensor) -> Tensor:
    """[n, num_words] → [n, num_words * 8]"""
    return unpacked(words, BITS).view(len(words), -1, 8)[..., PLACES].flatten(1)


def awq(config: Entries) -> StoredSchemes:
    check_known(config, KEYS)
    config.one_of("bits", config.integer("bits", 1, 16, default=BITS), (BITS,))
    if config.has("version"):
        config.one_of("version", config.text("version").lower(), ("gemm",))
    scheme = AwqScheme(read_group(config), config.flag("zero_point", True))
    plain = names(config, "modules_to_not_convert")  # parts of names, as in AutoAWQ
    return StoredSchemes("awq", lambda name: None if any(each in name for each in plain) else scheme)
