"""Attention on the device: right, and how close to what memory and arithmetic allow."""

import torch
from torch import Tensor
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
    """FLOP per second, and of torch's own attention on the same keys and values laid out contiguously."""
    rows: Rows = []
    for count, length in shapes.prefill:
        paged = Paged.make(shapes, [length] * count)
        prefill = Prefill(shapes, paged, length)
        flop = 4 * count * shapes.num_heads * shapes.head_dim * length * (length + 1) / 2
        ours_s = median_s(prefill, shapes.device)
        q = prefill.q.view(count, length, shapes.num_heads, shapes.head_dim).transpose(1, 2)
        k, v = (torch.stack(parts) for parts in zip(*(paged.contiguous(i) for i in range(count)), strict=True))

        def library(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        sdpa_s = median_s(library, shapes.device)
        rows.append(
            {
                "sequences": count, "length": length, "tflop_per_s": flop / ours_s / 1e12,
                "sdpa_tflop_per_s": flop / sdpa_s / 1e12, "ratio": sdpa_s / ours_s,
            }
        )  # fmt: skip
        del paged, prefill, q, k, v
    return rows
