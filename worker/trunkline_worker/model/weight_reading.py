"""Reads the tensors of a decoder's spec from a checkpoint, each into the memory where it is kept."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec, ExpertsSpec, GatedSpec, LayerSpec, LinearSpec
from trunkline_worker.model.checkpoint.checkpoint import EMBEDDING, HEAD, Checkpoint
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.kv_budget import GIB, free_bytes
from trunkline_worker.model.rotary_tables import table_bytes
from trunkline_worker.model.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertsWeights,
    GatedWeights,
    LayerWeights,
    Linear,
    StoredLinear,
    W,
    joined,
    stored_part,
    weight_bytes,
    whole_product,
)

DUMMY_SEED = 0
DUMMY_STD = 0.02
# Old exporters wrote them; they are recomputed here.
IGNORED_TENSORS = ("rotary_emb.inv_freq",)

Fill = Callable[[Tensor, str], None]  # fills a tensor of the given Hugging Face name in place
Form = Callable[[StoredLinear], W]  # turns a weight that was read into the form that is kept
# What is stored of a part of a product, by its name, rows, inner size and device: a weight that stays quantised, or
# values; None: the part is a tensor like others, for Fill. On the meta device, only headers are read.
ReadPart = Callable[[str, int, int, torch.device], QuantizedWeight | Tensor | None]


def never_quantized(name: str, rows: int, inner: int, device: torch.device) -> None:
    """The ReadPart of weights that are all stored like other tensors."""


def read_weights(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: Checkpoint | None,
    form: Form[W],
    *,
    context: int,
    read_part: ReadPart = never_quantized,
    left: Iterable[str] | None = None,
) -> DecoderWeights[W]:
    """Returns the weights of the checkpoint, or dummy weights without one. Before it allocates anything, it checks the
    files' headers against the config, and the free memory. Raises ModelError if a check fails.

    left: of a model that makes no logits: tensors that the checkpoint may have besides, its head among them. The
        embedding takes the head's place.
    """
    names: tuple[str, str | None] = EMBEDDING, None if spec.tie_word_embeddings or left is not None else HEAD
    if checkpoint is not None and left is None:
        names = checkpoint.embedding_and_head(spec.tie_word_embeddings)

    def look_at(target: Tensor, name: str) -> None:
        if checkpoint is not None:
            checkpoint.check_header(target, name)

    planned = build_weights(spec, dtype, torch.device("meta"), look_at, form, names=names, read_part=read_part)
    if device.type == "cpu":  # a GPU's allocator raises; on a host, the kernel kills the process
        num_bytes = sum(weight_bytes(planned)) + (0 if names[1] is None else planned.embedding.nbytes)
        _check_memory(num_bytes, table_bytes(spec, context), device, dtype)
    if checkpoint is None:
        return build_weights(spec, dtype, device, _dummy_fill(device), form, names=names)
    weights = build_weights(spec, dtype, device, checkpoint.read_into, form, names=names, read_part=read_part)
    checkpoint.check_all_read((*IGNORED_TENSORS, *(left or ())))
    checkpoint.check_finite(dtype)
    return weights


def _check_memory(weight_bytes: int, table_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelError if weights and rotary tables do not fit into the free memory."""
    free = free_bytes(device)
    if weight_bytes + table_bytes > free:
        raise ModelError(
            f"the weights take {weight_bytes / GIB:.2f} GiB in {str(dtype).removeprefix('torch.')}, the rotary tables "
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
    read_part: ReadPart = never_quantized,
) -> DecoderWeights[W]:
    """Allocates every tensor once, on its device, and calls `fill` on it; on each part of a fused tensor.

    names: of embedding and head; None: the head is the embedding
    """
    read = TensorReader(dtype, device, fill, read_part)

    def gated(at: str, spec: GatedSpec) -> GatedWeights[W]:
        return GatedWeights(
            norm=read.norm(at, spec.norm, hidden),
            gate_up=form(read.product(at, spec.gate_up)),
            down=form(read.product(at, spec.down)),
            post_norm=read.norm(at, spec.post_norm, hidden),
        )

    def fed_forward(at: str, spec: GatedSpec | ExpertsSpec) -> GatedWeights[W] | ExpertsWeights[W]:
        if isinstance(spec, GatedSpec):
            return gated(at, spec)
        return ExpertsWeights(
            norm=read.norm(at, spec.norm, hidden),
            router=read.unquantized(at, spec.router),
            rule=spec.rule,
            gate_up=form(whole_product(read.product(at, spec.gate_up), dtype)),
            down=form(whole_product(read.product(at, spec.down), dtype)),
            post_norm=read.norm(at, spec.post_norm, hidden),
            shared=None if spec.shared is None else gated(at, spec.shared),
            shared_gate=None if spec.shared_gate is None else read.unquantized(at, spec.shared_gate),
        )

    def layer(at: str, spec: LayerSpec) -> LayerWeights[W]:
        attention = spec.attention
        normed_heads = (1, 1) if attention.qk_norm_span == "head" else (num_heads, num_kv_heads)
        return LayerWeights(
            AttentionWeights(
                norm=read.norm(at, attention.norm, hidden),
                qkv=form(read.product(at, attention.qkv)),
                query_norm=read.norm(at, attention.query_norm, normed_heads[0] * head_dim),
                key_norm=read.norm(at, attention.key_norm, normed_heads[1] * head_dim),
                output=form(read.product(at, attention.output)),
                post_norm=read.norm(at, attention.post_norm, hidden),
            ),
            fed_forward(at, spec.feed_forward),
        )

    hidden, head_dim = spec.hidden_size, spec.head_dim
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    embedding_name, head_name = names
    embedding = read.tensor(embedding_name, spec.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=[layer(f"model.layers.{index}.", each) for index, each in enumerate(spec.layers)],
        final_norm=read.tensor("model.norm.weight", hidden).div_(spec.multipliers.logits),
        head=Linear(embedding if head_name is None else read.tensor(head_name, spec.vocab_size, hidden), None),
    )


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Allocates tensors and fills them, each part of a fused one."""

    dtype: torch.dtype
    device: torch.device
    fill: Fill
    read_part: ReadPart

    def tensor(self, name: str, *shape: int) -> Tensor:
        target = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fill(target, name)
        return target

    def norm(self, at: str, name: str | None, size: int) -> Tensor | None:
        return None if name is None else self.tensor(f"{at}{name}.weight", size)

    def product(self, at: str, linear: LinearSpec) -> StoredLinear:
        """at: what the names of its tensors are relative to"""
        names, rows, inner = *_tensors(at, linear), linear.inner
        stored = [self.read_part(name, count, inner, self.device) for name, count in zip(names, rows, strict=True)]
        plain = [each for each in stored if not isinstance(each, QuantizedWeight)]
        if len(plain) == len(stored):
            weight = self._dense(names, rows, inner, plain)
            return Linear(weight, self._bias(names, rows) if linear.bias else None)
        weights = [
            each if isinstance(each, QuantizedWeight) else self._dense([name], [count], inner, [each])
            for name, count, each in zip(names, rows, stored, strict=True)
        ]
        biases = torch.split(self._bias(names, rows), rows) if linear.bias else [None] * len(rows)
        return joined(map(stored_part, weights, biases))

    def unquantized(self, at: str, linear: LinearSpec) -> Linear:
        """The same for a product that checkpoints store like other tensors, whatever they say of products."""
        names, rows = _tensors(at, linear)
        weight = self._dense(names, rows, linear.inner, [None] * len(rows))
        return Linear(weight, self._bias(names, rows) if linear.bias else None)

    def _bias(self, names: list[str], rows: list[int]) -> Tensor:
        target = torch.empty(sum(rows), dtype=self.dtype, device=self.device)
        for part, name in zip(torch.split(target, rows), names, strict=True):
            self.fill(part, name + ".bias")
        return target

    def _dense(self, names: list[str], rows: list[int], inner: int, stored: list[Tensor | None]) -> Tensor:
        target = torch.empty(sum(rows), inner, dtype=self.dtype, device=self.device)
        for part, name, values in zip(torch.split(target, rows), names, stored, strict=True):
            if values is None:
                self.fill(part, name + ".weight")
            else:
                part.copy_(values)
        return target


def _tensors(at: str, linear: LinearSpec) -> tuple[list[str], list[int]]:
    """Returns names and rows of a product's tensors."""
    return [f"{at}{name}" for name, _ in linear.tensors], [rows for _, rows in linear.tensors]


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
