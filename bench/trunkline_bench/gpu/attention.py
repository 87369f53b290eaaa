"""Attention on the device: right, and how close to what memory and arithmetic allow."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from trunkline_bench.gpu import ceilings
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.paged import Decode, Paged, Prefill
from trunkline_bench.gpu.shapes import Shapes, median_s


def truth(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Of the last tokens of a context, in float32.  q: [new, heads, dim], keys and values: [kv_heads, context, dim]"""
    new, heads, _ = q.shape
    kv_heads, context, _ = keys.shape
    k, v = (x.float().repeat_interleave(heads // kv_heads, dim=0) for x in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", q.float(), k) * q.shape[2] ** -0.5
    positions = torch.arange(context, device=q.device)
    hidden = positions[None] > positions[context - new :, None]
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def check(shapes: Shapes) -> Rows:
    """Largest differences from the truth; raises AssertionError where one is too large."""
    contexts = [1, 15, 33, 130] if shapes.tiny else [1, 15, 16, 17, 255, 256, 257, 1000, 5000, 20_000]
    paged = Paged.make(shapes, contexts)
    decode = Decode(shapes, paged)
    found = decode().float()
    expected = torch.cat([truth(decode.q[i : i + 1], *paged.contiguous(i)) for i in range(len(contexts))])
    rows: Rows = [_compared("decode attention", found, expected, shapes)]
    count, common, own = (5, 64, 9) if shapes.tiny else (40, 2048, 77)
    paged = Paged.make(shapes, [common + own + i for i in range(count)], shared=common)
    decode = Decode(shapes, paged, shared=common)
    found = decode().float()
    expected = torch.cat([truth(decode.q[i : i + 1], *paged.contiguous(i)) for i in range(count)])
    rows.append(_compared("decode attention, shared prefix", found, expected, shapes))
    new = 16 if shapes.tiny else 300
    paged = Paged.make(shapes, [new, new + 1, 3 * new, 3 * new + 7])
    for deterministic in (False, True):
        prefill = Prefill(shapes, paged, new, deterministic=deterministic)
        found = prefill().float()
        parts = [truth(prefill.q[i * new : (i + 1) * new], *paged.contiguous(i)) for i in range(4)]
        name = "prefill attention" + (", deterministic" if deterministic else "")
        rows.append(_compared(name, found, torch.cat(parts), shapes))
    return rows


def _compared(name: str, found: Tensor, expected: Tensor, shapes: Shapes) -> dict[str, object]:
    worst = float((found - expected).abs().max())
    assert worst < (1e-4 if shapes.dtype == torch.float32 else 0.02), f"{name}: differs by {worst}"
    return {"what": name, "largest_difference": worst}


def decode_speed(shapes: Shapes) -> Rows:
    """Bytes per second over batch and context, and as a share of what a copy reaches."""
    rows: Rows = []
    copy = ceilings.bandwidth(shapes)
    for context in shapes.decode_contexts:
        for batch in shapes.decode_batches:
            token_bytes = 2 * shapes.num_kv_heads * shapes.head_dim * shapes.dtype.itemsize
            if batch * context * token_bytes > shapes.most_kv_bytes:
                continue
            paged = Paged.make(shapes, [context] * batch)
            time_s = median_s(Decode(shapes, paged), shapes.device)
            rate = paged.read_bytes() / time_s
            rows.append(
                {
                    "batch": batch, "context": context, "us": time_s * 1e6, "gb_per_s": rate / 1e9,
                    "of_copy": rate / copy,
                }
            )  # fmt: skip
            del paged
    return [*rows, *_shared_prefix_speed(shapes)]


def _shared_prefix_speed(shapes: Shapes) -> Rows:
    """Decodes with a long common prefix: as if each had its own, and read once. The rate counts every context."""
    count, common, own = shapes.shared_prefix
    paged = Paged.make(shapes, [common + own] * count, shared=common)
    rows: Rows = []
    for shared in (0, common):
        time_s = median_s(Decode(shapes, paged, shared=shared), shapes.device)
        rows.append(
            {
                "batch": count, "context": common + own, "shared": common, "read": "once" if shared else "for each",
                "us": time_s * 1e6, "effective_gb_per_s": paged.read_bytes() / time_s / 1e9,
            }
        )  # fmt: skip
    return rows


def prefill_speed(shapes: Shapes) -> Rows:
    """FLOP per second, and of the attentions that torch brings, on the same keys and values laid out contiguously."""
    rows: Rows = []
    for count, length in shapes.prefill:
        paged = Paged.make(shapes, [length] * count)
        prefill = Prefill(shapes, paged, length)
        flop = 4 * count * shapes.num_heads * shapes.head_dim * length * (length + 1) / 2
        ours_s = median_s(prefill, shapes.device)
        q = prefill.q.view(count, length, shapes.num_heads, shapes.head_dim).transpose(1, 2)
        k, v = (torch.stack(parts) for parts in zip(*(paged.contiguous(i) for i in range(count)), strict=True))

        rates = {name: flop / median_s(partial(call, q, k, v), shapes.device) for name, call in libraries(shapes)}
        best = max(rates, key=rates.__getitem__)
        rows.append(
            {
                "sequences": count, "length": length, "tflop_per_s": flop / ours_s / 1e12,
                **{f"{name}_tflop_per_s": rate / 1e12 for name, rate in rates.items()},
                "of_best": flop / ours_s / rates[best], "best": best,
            }
        )  # fmt: skip
        del paged, prefill, q, k, v
    return rows


Attention = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # of q [n, heads, length, dim], k and v [n, kv_heads, length, dim]


@functools.cache
def libraries(shapes: Shapes) -> tuple[tuple[str, Attention], ...]:
    """Causal attention of torch's backends, those that work on this device, by name."""

    def sdpa(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if shapes.tiny:
        return (("sdpa", partial(sdpa, None)),)
    ways: dict[str, Attention] = {
        "flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "flex": flex_causal(),
    }
    probe = [
        torch.randn(1, heads, 256, shapes.head_dim, device=shapes.device, dtype=shapes.dtype)
        for heads in (shapes.num_heads, shapes.num_kv_heads, shapes.num_kv_heads)
    ]
    found: list[tuple[str, Attention]] = []
    for name, way in ways.items():
        try:
            way(*probe)
        except Exception as error:  # it is not there on this machine; the others are still to be measured
            print(f"  torch's {name} attention does not work here: {str(error).splitlines()[0]}", flush=True)
        else:
            found.append((name, way))
    return tuple(found)


def flex_causal() -> Attention:
    """FlexAttention, compiled; its mask is made once for each length."""
    compiled = torch.compile(flex_attention)

    @functools.cache
    def mask(length: int, device: torch.device) -> BlockMask:
        return create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device=str(device))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=mask(q.shape[2], q.device), enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    return attend
