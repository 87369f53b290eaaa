"""Loads a Hugging Face model directory into a decoder that is ready to run."""

from collections.abc import Iterator, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_kernels.cpu.packed_linear import QUANTIZED_BITS
from trunkline_kernels.ragged_batch import KVPool, allocate_kv
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.block_format import BlockFormat
from trunkline_worker.model.checkpoint.checkpoint import EMBEDDING, Checkpoint, digest_of, fingerprint
from trunkline_worker.model.checkpoint.generation_defaults import read_generation_defaults
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.weight_digest import WeightDigests
from trunkline_worker.model.checkpoint.weight_stream import WeightStream
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.model.cpu_decoder import CpuDecoder, cpu_decoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.pooling.head_reading import files_of_head, head_tensors, read_head
from trunkline_worker.model.pooling.pooled_decoder import PooledDecoder
from trunkline_worker.model.pooling.pooling_head import PoolingHead
from trunkline_worker.model.pooling.pooling_spec import PoolingSpec
from trunkline_worker.model.quantized.part_reading import PartReader
from trunkline_worker.model.quantized.quantization_config import read_schemes
from trunkline_worker.model.quantized.stored_part import StoredSchemes
from trunkline_worker.model.rotary_tables import check_rotary
from trunkline_worker.model.weight_reading import DUMMY_SEED, never_quantized, read_weights
from trunkline_worker.model.weights import (
    DecoderWeights,
    Linear,
    StoredLinear,
    WeightBytes,
    quantized_kinds,
    stored,
    weight_bytes,
    whole_product,
)

if TYPE_CHECKING:
    from trunkline_worker.model.gpu_decoder import GpuDecoder

# Part of the fingerprint. Raise it when a change of kernels or model code changes the bits of results.
KERNEL_BUILD = "13"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, and the settings of its directory that the worker needs to serve it."""

    decoder: "Decoder | CpuDecoder | GpuDecoder"
    spec: DecoderSpec
    fingerprint: str  # of config, weights and kernels
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    context_length: int
    eos_token_ids: frozenset[int]
    default_sampling: SamplingParams
    deterministic: bool
    weight_bytes: WeightBytes
    quantized_kinds: frozenset[str] = frozenset()  # of the layers' products, see QuantizedWeight
    head: PoolingHead | None = None  # of a model of vectors or scores
    pooling: PoolingSpec | None = None  # its spec
    notes: tuple[str, ...] = ()  # lines for the operator, logged at start-up

    def block_format(self, block_size: int) -> BlockFormat:
        """Returns the format of KV blocks of so many tokens."""
        spec = self.spec
        return BlockFormat(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, _name(self.kv_dtype))

    def execution_fingerprint(self, block_size: int) -> str:
        """Returns the fingerprint of all that a token depends on. Workers where it is equal can continue one another's
        generations."""
        return digest_of(self.fingerprint, repr(self.block_format(block_size)))

    def kv_pool(self, num_blocks: int, block_size: int) -> KVPool:
        """Allocates an empty pool of KV blocks on the model's device."""
        block = self.block_format(block_size)
        return allocate_kv(
            num_layers=block.num_layers,
            num_blocks=num_blocks,
            block_size=block.block_size,
            num_kv_heads=block.num_kv_heads,
            head_dim=block.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
        )


@torch.inference_mode()
def load_model(
    directory: Path,
    *,
    dtype: str = "auto",
    device: torch.device,
    load_format: str = "auto",
    kernels: str = "auto",
    quantization: str = "none",
    kv_dtype: str = "auto",
    deterministic: bool = False,
    context_length: int | None = None,
    ignore_config_keys: tuple[str, ...] = (),
    pooled: PooledDecoder | None = None,
) -> LoadedModel:
    """Loads config, weights and generation defaults. Raises ModelError (one line) if the model cannot be served.

    kernels: "triton", "torch" (the references), or "auto": Triton on a GPU; on a CPU, C if it supports the model
    ignore_config_keys: keys of config.json that are treated as absent
    pooled: if the output is a vector or a score
    """
    spec = read_spec(directory, ignore_config_keys) if pooled is None else pooled.spec
    if context_length is not None and context_length > spec.most_context:
        raise ModelError(f"--context-length {context_length} is more than the model's {spec.most_context}")
    context = context_length or spec.context_length
    check_rotary(spec, context)
    eos, defaults = read_generation_defaults(directory, spec.vocab_size, ignore_config_keys)
    schemes = _stored_schemes(directory, ignore_config_keys, quantization)
    if kernels == "auto":
        on_gpu = "triton" if pooled is None or pooled.needs_last_state_only else "torch"
        kernels = on_gpu if device.type == "cuda" else "c"
    if kernels != "triton":
        if kv_dtype != "auto":
            raise ModelError(f"kv_dtype={kv_dtype} needs the Triton kernels: use a GPU, or leave it out")
        if quantization not in ("none", *QUANTIZED_BITS):
            raise ModelError(f"quantization={quantization} needs a GPU: a CPU has {' and '.join(QUANTIZED_BITS)}")
    if kernels == "triton":
        if pooled is not None and not pooled.needs_last_state_only:
            raise ModelError("kernels=triton is for the pooling lasttoken: this one needs --kernels torch")
        # Imported only here: Triton is not installed on every system, and takes a third of a second to import.
        from trunkline_worker.model import gpu_decoder

        gpu_decoder.check_options(
            spec, device, deterministic=deterministic, quantization=quantization, kv_dtype=kv_dtype
        )
    with ExitStack() as stack:
        checkpoint: Checkpoint | None = None
        digests: WeightDigests | None = None
        if load_format != "dummy":
            stream = None if device.type == "cpu" else WeightStream(device)
            checkpoint = stack.enter_context(Checkpoint(directory, stream, may_be_base=pooled is not None))
            others = [] if pooled is None else files_of_head(pooled.pooling, directory)
            digests = stack.enter_context(WeightDigests([*checkpoint.files, *others]))
        kind = _dtype(dtype, spec, checkpoint)
        # Weights are quantised one by one, so that the unquantised model need not fit into memory.
        kept = _kept_kinds(kernels, device, kind, schemes, quantization=quantization, deterministic=deterministic)
        form = partial(_form, quantization=quantization, whole_in=kind if kernels == "triton" else None)
        keeps_blocks = kernels != "triton" and quantization == "none" and kind is not torch.float16
        weights = read_weights(
            spec, kind, device, checkpoint, form, context=context,
            read_part=PartReader(checkpoint, schemes, kept=kept, keeps_blocks=keeps_blocks, dtype=kind)
            if checkpoint
            else never_quantized,
            left=None if pooled is None else head_tensors(pooled.pooling),
        )  # fmt: skip
        head = None
        if pooled is not None:
            head = read_head(pooled.pooling, directory, checkpoint, weights.embedding, is_tied=spec.tie_word_embeddings)
            weights = replace(weights, head=Linear(weights.embedding[:1], None))  # not to be packed for no use
        read_bytes, kinds = weight_bytes(weights), quantized_kinds(weights)
        decoder: Decoder | CpuDecoder | GpuDecoder
        if kernels == "triton":
            decoder = gpu_decoder.GpuDecoder(
                spec, weights, context_length=context, deterministic=deterministic,
                kv_dtype=KV_DTYPES.get(kv_dtype, kind),
            )  # fmt: skip
        else:
            decoder = _host_decoder(
                spec, weights, kernels, quantization, context_length=context, deterministic=deterministic
            )
            kernels = "c" if isinstance(decoder, CpuDecoder) else "torch"
        weight_digests = [] if digests is None else digests.digests()
    facts = (
        _name(kind), KERNEL_BUILD, device.type, kernels, quantization, kv_dtype,
        "deterministic" if deterministic else "", load_format, str(DUMMY_SEED) if load_format == "dummy" else "",
        *(rope.depends_on(context) for rope in spec.ropes), *sorted(set(ignore_config_keys)),
        *sorted(kept if schemes is not None else ()),  # of 8-bit floats, activations are rounded too
        "" if pooled is None else repr(pooled.pooling),
    )  # fmt: skip
    return LoadedModel(
        decoder=decoder,
        spec=spec,
        fingerprint=fingerprint(directory, weight_digests, *facts),
        dtype=kind,
        kv_dtype=KV_DTYPES.get(kv_dtype, kind),
        device=device,
        context_length=context,
        eos_token_ids=eos,
        default_sampling=defaults,
        deterministic=deterministic,
        weight_bytes=read_bytes,
        quantized_kinds=kinds,
        head=head,
        pooling=None if pooled is None else pooled.pooling,
        notes=(*_context_note(spec, context), *_sampling_note(defaults), *_tile_note(decoder), *_stored_note(schemes)),
    )


def _host_decoder(
    spec: DecoderSpec,
    weights: DecoderWeights[StoredLinear],
    kernels: str,
    quantization: str,
    *,
    context_length: int,
    deterministic: bool,
) -> Decoder | CpuDecoder:
    """Returns the decoder with the C kernels, if they are asked for and support the model, else that in torch."""
    if kernels == "c":
        decoder = cpu_decoder(spec, weights, context_length=context_length, deterministic=deterministic)
        if decoder is not None:
            return decoder
        if quantization != "none":
            raise ModelError(
                f"quantization={quantization} needs the C kernels: --dtype bfloat16 or float32, and a C compiler"
            )
    return Decoder(spec, weights, context_length=context_length, deterministic=deterministic)


def _stored_schemes(directory: Path, ignored_keys: tuple[str, ...], quantization: str) -> StoredSchemes | None:
    """Returns how the checkpoint's weights are quantised; None: they are not. Raises ModelError if they would be
    quantised again."""
    schemes = read_schemes(directory, ignored_keys)
    if schemes is not None and quantization != "none":
        raise ModelError(
            f"quantization={quantization}: the weights are quantised already, by {schemes.method}: leave it out"
        )
    return schemes


def _kept_kinds(
    kernels: str,
    device: torch.device,
    dtype: torch.dtype,
    schemes: StoredSchemes | None,
    *,
    quantization: str,
    deterministic: bool,
) -> Set[str]:
    """Returns the kinds of weights that stay quantised as the checkpoint stores them."""
    if quantization != "none":
        return frozenset()
    if kernels != "triton":
        return frozenset() if dtype is torch.float16 else QUANTIZED_BITS.keys()  # float16 has no C kernels
    from trunkline_worker.model import gpu_decoder

    kept = gpu_decoder.kept_kinds(device, deterministic=deterministic)
    # Products of 8-bit floats round activations too.
    return kept if schemes is None or schemes.quantizes_activations else kept - {"fp8"}


def _form(product: StoredLinear, *, quantization: str, whole_in: torch.dtype | None) -> StoredLinear:
    """Returns a weight as it is kept.  whole_in: the dtype of one whose parts are held apart; None: they may be"""
    kept = stored(product, quantization)
    return kept if whole_in is None else whole_product(kept, whole_in)


def _context_note(spec: DecoderSpec, context: int) -> Iterator[str]:
    """Yields a note on the context length in use if RoPE scaling allows more than one."""
    for rope in spec.ropes:
        chosen = rope.depends_on(context)
        if rope.kind != "default" and (chosen or context != spec.most_context):
            scaling = f"RoPE scaling {rope.kind}" + (f" with {chosen}" if chosen else "")
            yield f"{scaling}, context length {context}; --context-length may be up to {spec.most_context}"


def _sampling_note(defaults: SamplingParams) -> Iterator[str]:
    given = ", ".join(f"{field.name} {value:g}" for field, value in defaults.ListFields())
    if given:
        yield f"sampling defaults from generation_config.json, used even if do_sample is false: {given}"


def _tile_note(decoder: object) -> Iterator[str]:
    if isinstance(decoder, Decoder) and decoder.tile_rows == 1:
        yield "--deterministic computes one token at a time: here, products of several rows depend on the rows' order"


def _stored_note(schemes: StoredSchemes | None) -> Iterator[str]:
    if schemes is not None and schemes.quantizes_activations:
        yield f"{schemes.method}: the checkpoint's scales of activations have no effect"
    if schemes is not None and schemes.quantizes_kv:
        yield f"{schemes.method}: the checkpoint's scheme of the KV cache has no effect: --kv-dtype says its dtype"


def _dtype(asked: str, spec: DecoderSpec, checkpoint: Checkpoint | None) -> torch.dtype:
    """Returns the requested dtype, else the config's, else the dtype in which the embedding is stored."""
    if asked != "auto":
        if asked not in DTYPES:
            raise ModelError(f"dtype {asked} is not supported; supported: {', '.join(DTYPES)}")
        return DTYPES[asked]
    if spec.dtype is not None:
        return DTYPES[spec.dtype]
    found = torch.float32 if checkpoint is None else checkpoint.stored_dtype(EMBEDDING)
    return found if found in DTYPES.values() else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
