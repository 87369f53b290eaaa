"""Attention on the device: correctness, and speed relative to what memory and arithmetic allow."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trunkline_bench.gpu import ceilings
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.kernels.paged import Decode, FreshPrefill, Paged, Prefill
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels.gpu.prompt_attention import key_of, library_takes
from trunkline_kernels.gpu.tuned_tilings import TilingKey
from trunkline_kernels.quantized_weight import FP8
from trunkline_worker.model.gpu_decoder import FP8_CAPABILITY, Chip

RELATIVE = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}


def truth(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Reference attention of the last tokens of a context, [new, heads, dim] in float32.

    q: [new, heads, dim], keys and values: [kv_heads, context, dim]"""
    new, heads, _ = q.shape
    kv_heads, context, _ = keys.shape
    k, v = (x.float().repeat_interleave(heads // kv_heads, dim=0) for x in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", q.float(), k) * q.shape[2] ** -0.5
    positions = torch.arange(context, device=q.device)
    hidden = positions[None] > positions[context - new :, None]
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def check(shapes: Shapes) -> Rows:
    """Largest differences from the reference, in the stages' dtype and in float32.

    Raises AssertionError if one is too large."""
    for dtype in dict.fromkeys((shapes.dtype, torch.float32)):
        yield from _check(replace(shapes, dtype=dtype))


def smoke(shapes: Shapes, contexts: Sequence[int]) -> Rows:
    """Compares decode and ragged attention with the reference, also for 8-bit keys. Raises AssertionError."""
    has_fp8 = shapes.tiny or Chip.of(shapes.device).capability >= FP8_CAPABILITY
    for kv_dtype in (shapes.dtype, FP8) if has_fp8 else (shapes.dtype,):
        of = ", fp8 KV" if kv_dtype == FP8 else ""
        paged = Paged.make(shapes, list(contexts), kv_dtype)
        decode, prefill = Decode(shapes, paged), Prefill(shapes, paged, 1)
        yield _compared(f"decode{of}", decode(), _truths(decode.q, paged, 1), shapes)
        yield _compared(f"ragged{of}", prefill(), _truths(prefill.q, paged, 1), shapes)


def _check(shapes: Shapes) -> Rows:
    contexts = [1, 15, 33, 130] if shapes.tiny else [1, 15, 16, 17, 255, 256, 257, 1000, 5000, 20_000]
    paged = Paged.make(shapes, contexts)
    decode = Decode(shapes, paged)
    yield _compared("decode", decode(), _truths(decode.q, paged, 1), shapes)
    whole = Paged.make(shapes, contexts, num_layers=3)
    decode = Decode(shapes, whole)
    yield _compared("decode, one of three layers", decode(), _truths(decode.q, whole, 1), shapes)
    # One new token each, through the kernel that splits contexts at fixed positions.
    cut = Prefill(shapes, paged, 1, deterministic=True)
    yield _compared("decode, deterministic", cut(), _truths(cut.q, paged, 1), shapes)
    count, common, own = (5, 64, 9) if shapes.tiny else (40, 2048, 77)
    paged = Paged.make(shapes, [common + own + i for i in range(count)], shared=common)
    decode = Decode(shapes, paged, shared=common)
    yield _compared("decode, shared prefix", decode(), _truths(decode.q, paged, 1), shapes)
    new = 16 if shapes.tiny else 300
    paged = Paged.make(shapes, [new, new + 1, 3 * new, 3 * new + 7, *([] if shapes.tiny else [5000])])
    for deterministic in (False, True):
        prefill = Prefill(shapes, paged, new, deterministic=deterministic)
        name = "prefill" + (", deterministic" if deterministic else "")
        yield _compared(name, prefill(), _truths(prefill.q, paged, new), shapes)
    if library_takes(choice_key(shapes), shapes.device):
        fresh = FreshPrefill(shapes, 3, new)
        ends = range(new, 3 * new + 1, new)
        prompts = [[x[end - new : end] for x in (fresh.q, fresh.keys, fresh.values)] for end in ends]
        expected = torch.cat([truth(q, k.transpose(0, 1), v.transpose(0, 1)) for q, k, v in prompts])
        yield _compared("prompt", fresh(), expected, shapes)


def choice_key(shapes: Shapes) -> TilingKey:
    """The key under which the table of tilings stores the choice between our kernel and the library."""
    return key_of(
        device=Chip.of(shapes.device).name, head_dim=shapes.head_dim, group=shapes.num_heads // shapes.num_kv_heads,
        dtype=shapes.dtype, kv_dtype=shapes.dtype,
    )  # fmt: skip


def _truths(q: Tensor, paged: Paged, new: int) -> Tensor:
    count = len(paged.context_lens)
    return torch.cat([truth(q[i * new : (i + 1) * new], *paged.contiguous(i)) for i in range(count)])


def _compared(name: str, found: Tensor, expected: Tensor, shapes: Shapes) -> dict[str, object]:
    """Differences are relative to the norm of each head's output, since outputs of long contexts are small."""
    worst = float(((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    assert worst < RELATIVE[shapes.dtype], f"{name} attention: differs by {worst:.2%} from the reference"
    return {"what": f"{name} attention", "dtype": str(shapes.dtype).removeprefix("torch."), "largest_difference": worst}


def decode_speed(shapes: Shapes) -> Rows:
    """Bytes per second by batch and context, absolute and as a share of a copy's."""
    copy = ceilings.bandwidth(shapes)
    yield {"what": "copy", "gb_per_s": copy / 1e9}
    for context in shapes.decode_contexts:
        for batch in shapes.decode_batches:
            token_bytes = 2 * shapes.num_kv_heads * shapes.head_dim * shapes.dtype.itemsize
            if batch * context * token_bytes > shapes.most_kv_bytes:
                continue
            paged = Paged.make(shapes, [context] * batch)
            time_s = median_s(Decode(shapes, paged), shapes.device)
            rate = paged.read_bytes() / time_s
            yield {
                "batch": batch, "context": context, "us": time_s * 1e6, "gb_per_s": rate / 1e9, "of_copy": rate / copy,
            }  # fmt: skip
            del paged
    yield from layouts_speed(shapes, copy)
    yield from _shared_prefix_speed(shapes)


def layouts_speed(shapes: Shapes, copy: float) -> Rows:
    """Decode attention in a pool of one layer, and in one of many, whose blocks are contiguous over all layers.

    copy: a copy's bytes per second"""
    token_bytes = 2 * shapes.num_kv_heads * shapes.head_dim * shapes.dtype.itemsize
    for batch, context in shapes.sweep_decodes:
        fit = shapes.most_kv_bytes // (batch * (context + shapes.block_size) * token_bytes)
        plain_s = 0.0
        for layers in (1, min(shapes.num_layers, fit)):
            paged = Paged.make(shapes, [context] * batch, num_layers=layers)
            time_s = median_s(Decode(shapes, paged), shapes.device)
            rate = paged.read_bytes() / time_s
            plain_s = plain_s or time_s
            yield {
                "what": "KV layout", "batch": batch, "context": context,
                "layers": layers, "us": time_s * 1e6, "gb_per_s": rate / 1e9, "of_copy": rate / copy,
                "of_one_layer": plain_s / time_s,
            }  # fmt: skip
            del paged


def _shared_prefix_speed(shapes: Shapes) -> Rows:
    """Decodes with a long common prefix: in blocks of each sequence's own, and in shared blocks that are read once.

    The rate counts the whole context of every sequence."""
    count, common, own = shapes.shared_prefix
    for shared in (0, common):
        paged = Paged.make(shapes, [common + own] * count, shared=shared)
        time_s = median_s(Decode(shapes, paged, shared=shared), shapes.device)
        yield {
            "batch": count, "context": common + own, "shared": common, "read": "once" if shared else "for each",
            "us": time_s * 1e6, "effective_gb_per_s": paged.read_bytes() / time_s / 1e9,
        }  # fmt: skip


def prompt_flops(shapes: Shapes, count: int, length: int) -> float:
    """FLOP of causal attention over `count` prompts of this length."""
    return 4 * count * shapes.num_heads * shapes.head_dim * length * (length + 1) / 2


def prefill_speed(shapes: Shapes) -> Rows:
    """FLOP per second of our kernel, and of torch's attention backends on the same keys and values, contiguous."""
    for count, length in shapes.prefill:
        paged = Paged.make(shapes, [length] * count)
        prefill = Prefill(shapes, paged, length)
        flop = prompt_flops(shapes, count, length)
        ours_s = median_s(prefill, shapes.device)
        q = prefill.q.view(count, length, shapes.num_heads, shapes.head_dim).transpose(1, 2)
        k, v = (torch.stack(parts) for parts in zip(*(paged.contiguous(i) for i in range(count)), strict=True))

        rates = {name: flop / median_s(partial(call, q, k, v), shapes.device) for name, call in libraries(shapes)}
        best = max(rates, key=rates.__getitem__)
        library_s = library_speed(shapes, count, length)
        yield {
            "sequences": count, "length": length, "tflop_per_s": flop / ours_s / 1e12,
            "prompt_attention_tflop_per_s": library_s and flop / library_s / 1e12,
            **{f"{name}_tflop_per_s": rate / 1e12 for name, rate in rates.items()},
            "of_best": flop / ours_s / rates[best], "best": best,
        }  # fmt: skip
        del paged, prefill, q, k, v


def library_speed(shapes: Shapes, count: int, length: int) -> float | None:
    """Seconds of torch's attention over `count` prompts, called as the engine does.

    Returns None if this version of torch has no such attention, or not on this device."""
    try:
        return median_s(FreshPrefill(shapes, count, length), shapes.device)
    except (ImportError, RuntimeError) as error:
        print(f"  torch's variable-length attention does not work here: {error}", flush=True)
        return None


Attention = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # of q [n, heads, length, dim], k and v [n, kv_heads, length, dim]


@functools.cache
def libraries(shapes: Shapes) -> tuple[tuple[str, Attention], ...]:
    """Causal attention of the torch backends that work on this device, by name."""

    def sdpa(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if shapes.tiny:
        return (("sdpa", partial(sdpa, None)),)
    ways: dict[str, Attention] = {
        "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    probe = [
        torch.randn(1, heads, 256, shapes.head_dim, device=shapes.device, dtype=shapes.dtype)
        for heads in (shapes.num_heads, shapes.num_kv_heads, shapes.num_kv_heads)
    ]
    found: list[tuple[str, Attention]] = []
    for name, way in ways.items():
        try:
            way(*probe)
        except Exception as error:  # not available here; the others are still measured
            print(f"  torch's {name} attention does not work here: {str(error).partition(chr(10))[0]}", flush=True)
        else:
            found.append((name, way))
    return tuple(found)
