"""GPTQ as AutoGPTQ and GPTQModel store it: 4 or 8 bits, packed along the inner dimension.

Version 1 of the format stores each zero point minus one. Software subtracts that from whole words, so that a zero point
of 0 borrows from its neighbour, and adding to whole words restores both.

Source: Frantar et al. (2023), https://github.com/ModelCloud/GPTQModel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.quantized.integers import integer_weight, num_words, unpacked
from trunkline_worker.model.quantized.module_names import compiled
from trunkline_worker.model.quantized.scheme_entries import check_known, read_group
from trunkline_worker.model.quantized.stored_part import FLOATS, Scheme, StoredPart, StoredSchemes

ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each integer of a word
KEYS = ("quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "pack_dtype", "lm_head",
        "dynamic", "modules_in_block_to_quantize")  # fmt: skip
# How the weights were found, and with what software they should be loaded.
WITHOUT_EFFECT = ("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "act_group_aware",
                  "meta", "quantizer", "model_name_or_path", "model_file_base_name", "tokenizer", "dataset",
                  "batch_size", "pad_token_id", "model_seqlen", "block_name_to_quantize",
                  "module_name_preceding_first_block", "use_cuda_fp16", "use_exllama", "disable_exllama",
                  "exllama_config", "max_input_length", "cache_block_outputs", "backend")  # fmt: skip


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """group: inner elements that share a scale; None: all of a row

    less_one: zero points are stored minus one; symmetric: they are in the middle; ordered: g_idx says the group of each
    inner element
    """

    bits: int
    group: int | None
    less_one: bool
    symmetric: bool = False
    ordered: bool = False
    main: str = "qweight"

    def read(self, part: StoredPart) -> QuantizedWeight | Tensor:
        rows, inner, bits = part.rows, part.inner, self.bits
        group = self.group or inner
        groups = -(-inner // group)
        words = part.tensor(self.main, [num_words(inner, bits), rows], dtypes=["I32"])
        scale = part.tensor("scales", [groups, rows], dtypes=FLOATS).t()
        packed = part.tensor("qzeros", [groups, num_words(rows, bits)], dtypes=["I32"])
        stored = unpacked(packed + ONES[bits] if self.less_one else packed, bits)[:, :rows].t()
        in_middle = self.symmetric and (packed.is_meta or bool((stored == 1 << (bits - 1)).all()))
        self._check_order(part, group)
        part.skip_zeros("bias")  # AutoGPTQ stores one for every product
        return integer_weight(
            unpacked(words.t(), bits)[:, :inner], scale, None if in_middle else stored, bits=bits, group=group
        )

    def _check_order(self, part: StoredPart, group: int) -> None:
        """Raises ModelError if the groups are not made of neighbours."""
        is_needed = self.ordered and group < part.inner
        if not is_needed and not part.has("g_idx"):
            return
        order = part.tensor("g_idx", [part.inner], dtypes=["I32", "I64"])
        if order.is_meta or not (is_needed or order.any()):
            return
        if not torch.equal(order.long(), torch.arange(part.inner, device=order.device) // group):
            raise part.refused("g_idx", "orders inputs by activation (desc_act), which is not supported: use a "
                               "checkpoint with desc_act false")  # fmt: skip


def gptq(config: Entries) -> StoredSchemes:
    check_known(config, (*KEYS, *WITHOUT_EFFECT))
    bits = config.one_of("bits", config.integer("bits", 1, 16), tuple(ONES))
    config.one_of("lm_head", config.flag("lm_head", False), (False,))
    if config.has("pack_dtype"):
        config.one_of("pack_dtype", config.text("pack_dtype"), ("int32",))
    key = "checkpoint_format" if config.has("checkpoint_format") else "format"
    form = config.one_of(key, config.text(key).lower(), ("gptq", "gptq_v2")) if config.has(key) else "gptq"
    scheme = GptqScheme(
        bits, read_group(config), form == "gptq", config.flag("sym", True), config.flag("desc_act", False)
    )
    plain = [compiled(rule) for rule in _rules(config)]
    only = _only(config)

    def scheme_of(name: str) -> Scheme | None:
        return None if any(rule.match(name) for rule in plain) or not name.endswith(only) else scheme

    return StoredSchemes("gptq", scheme_of)


def _rules(config: Entries) -> list[str]:
    """Returns the expressions for names of products that are not quantised. Others would have sizes of their own."""
    if not config.has("dynamic"):
        return []
    rules = config.object("dynamic")
    for rule, sizes in rules.values.items():
        if not rule.startswith("-:"):
            raise rules.refused(rule, sizes, "rules that begin with -:, for products that are not quantised")
    return [rule.removeprefix("-:") for rule in rules.values]


def _only(config: Entries) -> tuple[str, ...]:
    """Returns the ends of the names of quantised products."""
    key = "modules_in_block_to_quantize"
    if not config.has(key):
        return ("",)
    lists = config.values[key]
    listed = [name for names in lists for name in names] if _is_lists(lists) else []
    if not listed or not all(isinstance(name, str) for name in listed):
        raise config.refused(key, lists, "a list of lists of names")
    return tuple(listed)


def _is_lists(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, list) for each in value)
