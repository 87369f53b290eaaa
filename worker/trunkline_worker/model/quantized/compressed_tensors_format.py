"""What config.json says of a checkpoint that compressed-tensors (llm-compressor) wrote."""

from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.quantized.compressed_tensors_schemes import IntScheme, PackedScheme
from trunkline_worker.model.quantized.fp8_format import Fp8Scheme
from trunkline_worker.model.quantized.module_names import by_precedence, named
from trunkline_worker.model.quantized.mxfp4_format import COMPRESSED, GROUP
from trunkline_worker.model.quantized.scheme_entries import MOST_GROUP, check_known, names, read_block
from trunkline_worker.model.quantized.stored_part import Scheme, StoredSchemes

KEYS = ("quant_method", "format", "config_groups", "ignore", "quantization_status", "kv_cache_scheme", "version",
        "global_compression_ratio", "run_compressed", "sparsity_config")  # fmt: skip
GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
# The last ones only say how scales were found.
WEIGHT_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder",
               "observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # fmt: skip
FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "mxfp4-pack-quantized",
           "mxfp8-quantized", "dense")  # fmt: skip


def compressed_tensors(config: Entries) -> StoredSchemes:
    check_known(config, KEYS)
    if config.has("quantization_status"):
        config.one_of("quantization_status", config.text("quantization_status"), ("compressed",))
    if config.has("sparsity_config"):
        sparsity = config.object("sparsity_config")
        if sparsity.has("format"):
            sparsity.one_of("format", sparsity.text("format"), ("dense",))
    ignored = list(map(named, names(config, "ignore")))
    if not config.has("config_groups"):
        raise config.refused("config_groups", None, "an object")
    groups = config.object("config_groups")
    schemes: dict[str, Scheme | None] = {}
    quantizes_activations = False
    for key in groups.values:
        group = groups.object(key)
        check_known(group, GROUP_KEYS)
        schemes |= dict.fromkeys(names(group, "targets"), _scheme(group, config))
        quantizes_activations |= group.has("input_activations") or group.has("output_activations")
    targets = [(named(target), schemes[target]) for target in by_precedence(schemes)]

    def scheme_of(name: str) -> Scheme | None:
        if any(is_named(name) for is_named in ignored):
            return None
        return next((scheme for is_named, scheme in targets if is_named(name)), None)

    return StoredSchemes(
        "compressed-tensors",
        scheme_of,
        quantizes_activations=quantizes_activations,
        quantizes_kv=config.has("kv_cache_scheme"),
    )


def _scheme(group: Entries, config: Entries) -> Scheme | None:
    has_own = group.has("format")
    form = (group if has_own else config).one_of("format", (group if has_own else config).text("format"), FORMATS)
    if form == "dense" or not group.has("weights"):
        return None
    weights = group.object("weights")
    check_known(weights, WEIGHT_KEYS)
    if weights.has("actorder"):  # "weight" and "static" change nothing of what is stored
        weights.one_of("actorder", weights.values["actorder"], ("weight", "static", False))
    kind = weights.one_of("type", weights.text("type").lower(), ("int", "float"))
    bits = weights.integer("num_bits", 1, 16)
    if form == "mxfp4-pack-quantized":
        weights.one_of("group_size", weights.values.get("group_size"), (GROUP,))
        return COMPRESSED
    strategy = weights.text("strategy").lower()
    size = weights.integer("group_size", 1, MOST_GROUP) if strategy == "group" else 0
    if kind == "float":
        weights.one_of("num_bits", bits, (8,))
        weights.one_of("strategy", strategy, ("tensor", "channel", "group", "block"))
        blocks = {"group": (1, size)} | (
            {"block": read_block(weights, "block_structure")} if strategy == "block" else {}
        )
        return Fp8Scheme(blocks.get(strategy))
    strategy = weights.one_of("strategy", strategy, ("tensor", "channel", "group"))
    symmetric = weights.flag("symmetric", True)
    if form == "pack-quantized":
        return PackedScheme(weights.one_of("num_bits", bits, (4, 8)), strategy, size, symmetric)
    weights.one_of("num_bits", bits, tuple(range(2, 9)))
    return IntScheme(strategy, size, symmetric)
