"""The launches of one engine step, recorded from the real decoder and sampling on meta tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trunkline_bench.gpu.kernels.tuned_table import using_table
from trunkline_bench.kernels.launches import META, Launch, recorded
from trunkline_kernels.gpu import sampling, tuned_tilings
from trunkline_kernels.gpu.device_batch import DeviceBatch
from trunkline_kernels.gpu.tuned_tilings import LARGEST, ProductKey, name_of
from trunkline_kernels.quantized_weight import FP8, quantize_blocks
from trunkline_kernels.ragged_batch import allocate_kv
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.checkpoint.checkpoint import EMBEDDING
from trunkline_worker.model.gpu_decoder import Chip, GpuDecoder
from trunkline_worker.model.gpu_weight import timed_products
from trunkline_worker.model.weight_reading import build_weights
from trunkline_worker.model.weights import Linear, QuantizedLinear, StoredLinear, stored
from trunkline_worker.runner.gpu.row_table import RowTable
from trunkline_worker.runner.gpu.step_inputs import StepInputs, StepShape

BLOCK_SIZE = 16
POOL_BLOCKS = 64  # of the recorded pool; reads of it are counted by contexts, not by its size
# Operations of torch that launch no kernel.
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


DTYPE = torch.bfloat16


def _in_blocks(product: StoredLinear) -> StoredLinear:
    assert isinstance(product, Linear), "the weights of a benchmark are made plain"
    return QuantizedLinear(quantize_blocks(product.weight), product.bias)


PLAIN = "bfloat16"
FORMS: dict[str, Callable[[StoredLinear], StoredLinear]] = {
    PLAIN: partial(stored, quantization="none"), "fp8": partial(stored, quantization="fp8"), "fp8-blocks": _in_blocks,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel launched by torch."""

    name: str
    bytes: int  # of its tensors, each once
    product: tuple[int, int, int] | None  # rows, columns, inner
    itemsize: int  # of its first tensor
    out_itemsize: int  # of the result; doubled if the product is added to it, because it is then read too


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The launches of a step, in order, and what its memory traffic depends on."""

    launches: list[Launch | Operation]
    graphed: int  # number of first launches that belong to the captured graph
    spec: DecoderSpec
    query_lens: list[int]
    context_lens: list[int]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the kernels that torch would launch."""

    def __init__(self, launches: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in WITHOUT_KERNEL and isinstance(out, Tensor):
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            in_place = any(out is tensor for tensor in tensors)
            moved = sum(tensor.nbytes for tensor in tensors if name != "zero_") + out.nbytes
            moved -= out.nbytes if in_place and name != "zero_" else 0
            is_product = name in ("mm", "addmm", "addmm_")
            factors = tensors[-2:] if is_product else tensors[:2] if name == "_scaled_mm" else None
            shape = (factors[0].shape[0], factors[1].shape[1], factors[1].shape[0]) if factors else None
            if name.startswith("new_"):
                moved = out.nbytes
            itemsize = (tensors or [out])[0].dtype.itemsize
            # A product that is added to a tensor also reads it.
            out_itemsize = out.dtype.itemsize * (2 if name == "addmm_" else 1)
            self._launches.append(Operation(name, moved, shape, itemsize, out_itemsize))
        return out


@contextmanager
def _recording() -> Iterator[list[Any]]:
    """Records kernels of Triton and of torch in one list."""
    launches: list[Any]
    with recorded() as launches, Operations(launches):
        yield launches


def decode_step(
    spec: DecoderSpec, chip: Chip, *, batch: int, context: int, weights: str = PLAIN, kv_dtype: torch.dtype = DTYPE
) -> RecordedStep:
    """A step in which `batch` sequences with contexts of this length decode, with greedy sampling.

    weights: one of FORMS
    """
    decoder = _decoder(spec, chip, weights, kv_dtype)
    return _recorded(decoder, kv_dtype, StepShape(batch, batch, batch, 0, 0, 0), [1] * batch, [context] * batch)


def prompt_step(
    spec: DecoderSpec, chip: Chip, *, tokens: int, prompt: int, weights: str = PLAIN, kv_dtype: torch.dtype = DTYPE
) -> RecordedStep:
    """A step that computes whole prompts of `prompt` tokens, `tokens` in total."""
    decoder = _decoder(spec, chip, weights, kv_dtype)
    lens = np.full(tokens // prompt, prompt, np.int32)
    tiles = decoder.tiles(lens, lens).tiles
    shape = StepShape(int(lens.sum()), len(lens), 0, len(tiles), 0, 0)
    return _recorded(decoder, kv_dtype, shape, lens.tolist(), lens.tolist())


def _recorded(
    decoder: GpuDecoder, kv_dtype: torch.dtype, shape: StepShape, query_lens: list[int], context_lens: list[int]
) -> RecordedStep:
    spec = decoder.spec
    table = RowTable(num_rows=shape.num_seqs, max_tokens=4096, max_blocks=4096 // BLOCK_SIZE, device=META)
    inputs = StepInputs(
        decoder, table, block_size=BLOCK_SIZE, max_tokens=shape.num_tokens, max_seqs=shape.num_seqs, max_pieces=0,
        max_prefix_tiles=1,
    )  # fmt: skip
    inputs.reserve(shape)
    batch: DeviceBatch = inputs.batch(shape)
    kv = allocate_kv(
        num_layers=spec.num_layers, num_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, dtype=kv_dtype, device=META,
    ).layers  # fmt: skip
    last = torch.empty(shape.num_seqs, dtype=torch.int32, device=META)
    samples = torch.empty(shape.num_seqs, 2, dtype=torch.int32, device=META)
    with torch.no_grad(), _recording() as launches:
        inputs.build(batch, max(query_lens))
        # A decode step samples from all tokens; otherwise the last layer only computes the tokens to sample from.
        hidden = decoder.forward(batch, kv, None if shape.num_decodes else last)
        graphed = len(launches)
        logits = decoder.logits(hidden)
        sampling.sample(logits, samples, table.device_rows, draws=False)
    return RecordedStep(launches, graphed, spec, query_lens, context_lens)


def _decoder(spec: DecoderSpec, chip: Chip, weights: str, kv_dtype: torch.dtype) -> GpuDecoder:
    built = build_weights(spec, DTYPE, META, lambda target, name: None, FORMS[weights], names=(EMBEDDING, None))
    with TemporaryDirectory() as folder, using_table(Path(folder) / "tuned.json"):
        for kernel, columns, inner in timed_products(spec.layers[0]):
            # From 512 rows on, the library's products with scales of rows and columns were the fastest on an H100.
            key = ProductKey(kernel, chip.name, LARGEST, columns, inner, name_of(FP8))
            tuned_tilings.write(Path(folder) / "tuned.json", {key: ({}, {})})
        return GpuDecoder(spec, built, context_length=4096, deterministic=False, kv_dtype=kv_dtype, chip=chip)
