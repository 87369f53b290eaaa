"""Loads a Hugging Face model directory into a decoder that is ready to run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_kernels.ragged_batch import KVPool, allocate_kv
from trunkline_worker.model.architectures.config_json import read_spec
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec, LayerSpec, LinearSpec
from trunkline_worker.model.block_format import BlockFormat
from trunkline_worker.model.checkpoint.checkpoint import EMBEDDING, HEAD, Checkpoint, digest_of, fingerprint
from trunkline_worker.model.checkpoint.generation_defaults import read_generation_defaults
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.weight_digest import WeightDigests
from trunkline_worker.model.checkpoint.weight_stream import WeightStream
from trunkline_worker.model.cpu_decoder import CpuDecoder, cpu_decoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.kv_budget import GIB, free_bytes
from trunkline_worker.model.rotary_tables import check_rotary, table_bytes
from trunkline_worker.model.weight_bytes import WeightBytes, weight_bytes
from trunkline_worker.model.weights import (
    AttentionWeights,
    DecoderWeights,
    GatedWeights,
    LayerWeights,
    Linear,
    W,
)

if TYPE_CHECKING:
    from trunkline_worker.model.gpu_decoder import GpuDecoder

# Part of the fingerprint. Raise it when a change of kernels or model code changes the bits of results.
KERNEL_BUILD = "7"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"fp8": torch.float8_e4m3fn}
DUMMY_SEED = 0
DUMMY_STD = 0.02
# Old exporters wrote them; they are recomputed here.
IGNORED_TENSORS = ("rotary_emb.inv_freq",)

Fill = Callable[[Tensor, str], None]  # fills a tensor of the given Hugging Face name in place
Form = Callable[[Linear], W]  # turns a filled weight into the form that is kept


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
) -> LoadedModel:
    """Loads config, weights and generation defaults. Raises ModelError (one line) if the model cannot be served.

    kernels: "triton", "torch" (the references), or "auto": Triton on a GPU; on a CPU, C if it supports the model
    ignore_config_keys: keys of config.json that are treated as absent
    """
    spec = read_spec(directory, ignore_config_keys)
    if context_length is not None and context_length > spec.most_context:
        raise ModelError(f"--context-length {context_length} is more than the model's {spec.most_context}")
    context = context_length or spec.context_length
    check_rotary(spec, context)
    eos, defaults = read_generation_defaults(directory, spec.vocab_size, ignore_config_keys)
    if kernels == "auto":
        kernels = "triton" if device.type == "cuda" else "c"
    for option, value, plain in (("quantization", quantization, "none"), ("kv_dtype", kv_dtype, "auto")):
        if value != plain and kernels != "triton":
            raise ModelError(f"{option}={value} needs the Triton kernels: use a GPU, or leave it out")
    if kernels == "triton":
        # Imported only here: Triton is not installed on every system, and takes a third of a second to import.
        from trunkline_worker.model import gpu_decoder, gpu_weight

        gpu_decoder.check_options(
            spec, device, deterministic=deterministic, quantization=quantization, kv_dtype=kv_dtype
        )
    with ExitStack() as stack:
        checkpoint: Checkpoint | None = None
        digests: WeightDigests | None = None
        if load_format != "dummy":
            stream = None if device.type == "cpu" else WeightStream(device)
            checkpoint = stack.enter_context(Checkpoint(directory, stream))
            digests = stack.enter_context(WeightDigests(checkpoint.files))
        kind = _dtype(dtype, spec, checkpoint)
        decoder: Decoder | CpuDecoder | GpuDecoder | None = None
        if kernels == "triton":
            # Weights are quantised one by one, so that the unquantised model need not fit into memory.
            stored = _read_weights(
                spec, kind, device, checkpoint, partial(gpu_weight.stored, quantization=quantization), context=context
            )
            read_bytes = weight_bytes(stored)
            decoder = gpu_decoder.GpuDecoder(
                spec, stored, context_length=context, deterministic=deterministic,
                kv_dtype=KV_DTYPES.get(kv_dtype, kind),
            )  # fmt: skip
        else:
            weights = _read_weights(spec, kind, device, checkpoint, _as_it_is, context=context)
            read_bytes = weight_bytes(weights)
            if kernels == "c":
                decoder = cpu_decoder(spec, weights, context_length=context, deterministic=deterministic)
            if decoder is None:
                kernels = "torch"
                decoder = Decoder(spec, weights, context_length=context, deterministic=deterministic)
        weight_digests = [] if digests is None else digests.digests()
    facts = (
        _name(kind), KERNEL_BUILD, device.type, kernels, quantization, kv_dtype,
        "deterministic" if deterministic else "", load_format, str(DUMMY_SEED) if load_format == "dummy" else "",
        *(rope.depends_on(context) for rope in spec.ropes), *sorted(set(ignore_config_keys)),
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
        notes=(*_context_note(spec, context), *_sampling_note(defaults), *_tile_note(decoder)),
    )


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


def _dtype(asked: str, spec: DecoderSpec, checkpoint: Checkpoint | None) -> torch.dtype:
    """Returns the requested dtype, else the config's, else the dtype in which the embedding is stored."""
    if asked != "auto":
        if asked not in DTYPES:
            raise ModelError(f"dtype {asked} is not supported; supported: {', '.join(DTYPES)}")
        return DTYPES[asked]
    if spec.dtype is not None:
        return DTYPES[spec.dtype]
    stored = torch.float32 if checkpoint is None else checkpoint.stored_dtype(EMBEDDING)
    return stored if stored in DTYPES.values() else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_weights(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: Checkpoint | None,
    form: Form[W],
    *,
    context: int,
) -> DecoderWeights[W]:
    """Returns the weights of the checkpoint, or dummy weights without one. Before it allocates anything, it checks the
    files' headers against the config, and the free memory. Raises ModelError if a check fails."""
    names: tuple[str, str | None] = EMBEDDING, None if spec.tie_word_embeddings else HEAD
    if checkpoint is not None:
        names = checkpoint.embedding_and_head(spec.tie_word_embeddings)
    num_values = 0

    def look_at(target: Tensor, name: str) -> None:
        nonlocal num_values
        num_values += target.numel()
        if checkpoint is not None:
            checkpoint.check_header(target, name)

    build_weights(spec, dtype, torch.device("meta"), look_at, _as_it_is, names=names)
    if device.type == "cpu":  # a GPU's allocator raises; on a host, the kernel kills the process
        _check_memory(num_values * dtype.itemsize, table_bytes(spec, context), device, dtype)
    if checkpoint is None:
        return build_weights(spec, dtype, device, _dummy_fill(device), form, names=names)
    checkpoint_weights = build_weights(spec, dtype, device, checkpoint.read_into, form, names=names)
    checkpoint.check_all_read(IGNORED_TENSORS)
    checkpoint.check_finite(dtype)
    return checkpoint_weights


def _check_memory(weight_bytes: int, table_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelError if weights and rotary tables do not fit into the free memory."""
    free = free_bytes(device)
    if weight_bytes + table_bytes > free:
        raise ModelError(
            f"the weights take {weight_bytes / GIB:.2f} GiB in {_name(dtype)}, the rotary tables "
            f"{table_bytes / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free: lower --context-length, or use a smaller "
            "--dtype"
        )


def build_weights(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    fill: Fill,
    form: Form[W],
    *,
    names: tuple[str, str | None],
) -> DecoderWeights[W]:
    """Allocates every tensor once, on its device, and calls `fill` on it; on each part of a fused tensor.

    names: of embedding and head; None: the head is the embedding
    """
    embedding_name, head_name = names

    def tensor(name: str, *shape: int) -> Tensor:
        target = torch.empty(shape, dtype=dtype, device=device)
        fill(target, name)
        return target

    def fused(names: list[str], rows: list[int], *inner: int) -> Tensor:
        target = torch.empty(sum(rows), *inner, dtype=dtype, device=device)
        for part, name in zip(torch.split(target, rows), names, strict=True):
            fill(part, name)
        return target

    def layer(at: str, spec: LayerSpec) -> LayerWeights[W]:
        def norm(name: str | None, size: int = hidden) -> Tensor | None:
            return None if name is None else tensor(f"{at}{name}.weight", size)

        def product(linear: LinearSpec) -> W:
            names = [f"{at}{name}" for name, _ in linear.parts]
            weight = fused([name + ".weight" for name in names], linear.rows, linear.inner)
            bias = fused([name + ".bias" for name in names], linear.rows) if linear.bias else None
            return form(Linear(weight, bias))

        attention, feed_forward = spec.attention, spec.feed_forward
        return LayerWeights(
            AttentionWeights(
                norm=norm(attention.norm),
                qkv=product(attention.qkv),
                query_norm=norm(attention.query_norm, head_dim),
                key_norm=norm(attention.key_norm, head_dim),
                output=product(attention.output),
                post_norm=norm(attention.post_norm),
            ),
            GatedWeights(
                norm=norm(feed_forward.norm),
                gate_up=product(feed_forward.gate_up),
                down=product(feed_forward.down),
                post_norm=norm(feed_forward.post_norm),
            ),
        )

    hidden, head_dim = spec.hidden_size, spec.head_dim
    embedding = tensor(embedding_name, spec.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=[layer(f"model.layers.{index}.", each) for index, each in enumerate(spec.layers)],
        final_norm=tensor("model.norm.weight", hidden),
        head=Linear(embedding if head_name is None else tensor(head_name, spec.vocab_size, hidden), None),
    )


def _as_it_is(product: Linear) -> Linear:
    return product


def _dummy_fill(device: torch.device) -> Fill:
    """Returns a Fill of dummy weights: small seeded random matrices, norms of one, biases of zero."""
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)

    def fill(target: Tensor, name: str) -> None:
        if name.endswith("bias"):
            target.zero_()
        elif name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(std=DUMMY_STD, generator=generator)

    return fill
