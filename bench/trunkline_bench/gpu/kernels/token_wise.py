"""Correctness of the token-wise kernels and the products on the device, against their references in float32."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels import kv_write, rms_norm, rotary, silu_and_mul, token_masks
from trunkline_kernels.gpu import logit_changes, sampling
from trunkline_kernels.gpu import rms_norm as gpu_rms_norm
from trunkline_kernels.gpu import silu_and_mul as gpu_silu_and_mul
from trunkline_kernels.gpu.device_rows import DeviceRows, gather_rows
from trunkline_kernels.gpu.fixed_matmul import fixed_linear
from trunkline_kernels.gpu.logprobs import logprobs
from trunkline_kernels.gpu.persistent_linear import (
    PersistentTiling,
    ProductRoom,
    add_persistent_linear,
    is_offered,
    persistent_gated_linear,
    persistent_linear,
)
from trunkline_kernels.gpu.quantized_linear import (
    library_fp8_linear,
    quantize_rows,
    quantized_linear,
)
from trunkline_kernels.gpu.rotary_kv import rotary_kv
from trunkline_kernels.gpu.widening import widened
from trunkline_kernels.quantized_weight import QuantizedWeight, dequantize, quantize
from trunkline_kernels.ragged_batch import KVLayer
from trunkline_worker.model.gpu_decoder import FP8_CAPABILITY, Chip
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.gpu.row_table import TableRow, sampling_columns
from trunkline_worker.runner.sampler import sample
from trunkline_worker.step.plan import Sampling, SequenceStart

EPS = 1e-6
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # relative to the largest expected value


def check(shapes: Shapes) -> Rows:
    """Largest differences, relative to the largest value. Raises AssertionError if one is too large."""
    torch.manual_seed(0)
    for kernels in (_norms, _rotary, _products, _masks, _sampling, _logprobs):
        yield from kernels(shapes)


def _compared(what: str, found: Tensor, expected: Tensor, shapes: Shapes) -> dict[str, object]:
    worst = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    assert worst < TOLERANCE[shapes.dtype], f"{what}: differs by {worst} of the largest value"
    return {"what": what, "largest_difference": worst}


def _random(shapes: Shapes, *size: int) -> Tensor:
    return torch.randn(*size, device=shapes.device).to(shapes.dtype)


def _norms(shapes: Shapes) -> Rows:
    rows, dim = (3, 64) if shapes.tiny else (513, 4096)
    x, residual, weight, gate_up = (
        _random(shapes, *size) for size in ((rows, dim), (rows, dim), (dim,), (rows, 2 * dim))
    )
    expected, _ = rms_norm.add_rms_norm(x, residual.clone(), weight, EPS)
    index = torch.randint(rows, (2 * rows,), device=shapes.device)
    assert torch.equal(gather_rows(x, index), x[index])
    yield _compared("rms_norm", gpu_rms_norm.rms_norm(x, weight, EPS), rms_norm.rms_norm(x, weight, EPS), shapes)
    some = gate_up[:, dim // 2 : dim // 2 + dim]
    expected_some = rms_norm.rms_norm(some, weight, EPS)
    in_place = gate_up.clone()[:, dim // 2 : dim // 2 + dim]
    gpu_rms_norm.rms_norm_in_place(in_place, weight, EPS)
    yield _compared("rms_norm of some columns", in_place, expected_some, shapes)
    yield _compared("add_rms_norm", gpu_rms_norm.add_rms_norm(x, residual, weight, EPS), expected, shapes)
    yield _compared("silu_and_mul", gpu_silu_and_mul.silu_and_mul(gate_up), silu_and_mul.silu_and_mul(gate_up), shapes)


def _rotary(shapes: Shapes) -> Rows:
    heads, kv_heads, head_dim = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    tokens, blocks = (7, 2) if shapes.tiny else (300, 40)
    qkv = _random(shapes, tokens, (heads + 2 * kv_heads) * head_dim)
    angles = torch.outer(torch.arange(1000.0), torch.rand(head_dim // 2)).to(shapes.device)
    positions = torch.randint(1000, (tokens,), device=shapes.device)
    slots = torch.randperm(blocks * shapes.block_size, device=shapes.device)[:tokens]
    shape = (blocks, shapes.block_size, kv_heads, head_dim)
    found, expected = (
        KVLayer(*(torch.zeros(shape, dtype=shapes.dtype, device=shapes.device) for _ in range(2))) for _ in range(2)
    )
    norm = _random(shapes, head_dim)
    q, k, v = torch.split(qkv.view(tokens, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    q, k = (rms_norm.rms_norm(x, norm, EPS) for x in (q, k))
    q, k = (rotary.apply_rotary(x, angles.cos()[positions], angles.sin()[positions]) for x in (q, k))
    kv_write.write_kv(expected, k, v, slots)
    rotated = rotary_kv(
        qkv, found, positions, slots, angles.cos(), angles.sin(), num_heads=heads, query_norm=norm, key_norm=norm,
        eps=EPS,
    )  # fmt: skip
    yield _compared("rotary_kv, queries", rotated, q, shapes)
    yield _compared("rotary_kv, keys", found.keys, expected.keys, shapes)
    yield _compared("rotary_kv, values", found.values, expected.values, shapes)
    for pairs in (head_dim * 3 // 8, 0):  # as in Phi-4-mini, and in layers without rotary embedding
        cos, sin = (table[:, :pairs].contiguous() for table in (angles.cos(), angles.sin()))
        partly = rotary_kv(qkv, found, positions, slots, cos, sin, num_heads=heads)
        whole = rotary.apply_rotary(qkv.view(tokens, -1, head_dim)[:, :heads], cos[positions], sin[positions])
        yield _compared(f"rotary_kv, {pairs} pairs", partly, whole, shapes)
    if not shapes.tiny and Chip.of(shapes.device).capability >= FP8_CAPABILITY:
        # Not in the interpreter, which rounds to 8 bits differently than devices.
        scale = torch.full((1,), 0.5, device=shapes.device)
        keys, values = (pool.to(torch.float8_e4m3fn) for pool in (found.keys, found.values))
        eight = KVLayer(keys, values, scale, scale)
        rotary_kv(
            qkv, eight, positions, slots, angles.cos(), angles.sin(), num_heads=heads, query_norm=norm, key_norm=norm,
            eps=EPS,
        )  # fmt: skip
        for name, stored, whole in (("keys", eight.keys, expected.keys), ("values", eight.values, expected.values)):
            off = (stored.float() * 0.5 - whole.float()).abs()
            worst = float((off / whole.float().abs().clamp(min=2**-6)).max())
            assert worst < 1 / 12, f"rotary_kv, fp8 {name}: off by {worst:.1%}, and 3 bits are kept"
            yield {"what": f"rotary_kv, fp8 {name}", "largest_relative_difference": worst}


def _products(shapes: Shapes) -> Rows:
    rows, columns, inner = (5, 24, 128) if shapes.tiny else (130, 6144, 4096)
    x, weight = _random(shapes, rows, inner), _random(shapes, columns, inner)
    truth = linear(x.float(), weight.float())
    yield _compared("fixed_linear", fixed_linear(x, weight), truth, shapes)
    one = fixed_linear(x[:1].contiguous(), weight)
    assert torch.equal(one, fixed_linear(x, weight)[:1]), "fixed_linear: a row's bits depend on the batch"
    for kind in ("int8", "int4"):
        narrow = quantize(weight, kind)
        expected = linear(x.float(), dequantize(narrow).float())
        yield _compared(f"{kind} weights", quantized_linear(x, narrow), expected, shapes)
        yield _compared(f"{kind} weights, widened", linear(x, widened(narrow, x.dtype)), expected, shapes)
    if shapes.tiny or Chip.of(shapes.device).capability >= FP8_CAPABILITY:
        narrow = quantize(weight, "fp8")
        rows8, scale = quantize_rows(x)
        expected = linear(rows8.float() * scale[:, None], dequantize(narrow).float())
        yield _compared("fp8 product", quantized_linear(x, narrow), expected, shapes)
        yield _compared("fp8 product, library", library_fp8_linear(x, narrow), expected, shapes)
        yield from _persistent_products(shapes, x, narrow, expected)


def _persistent_products(shapes: Shapes, x: Tensor, weight: QuantizedWeight, expected: Tensor) -> Rows:
    """Persistent products with tiles that several programs share."""
    chip = Chip.of(shapes.device)
    if not shapes.tiny and not is_offered(chip.capability, is_nvidia=torch.version.hip is None):
        return
    tiling = PersistentTiling(16, 16, 16, 4, 1, 1) if shapes.tiny else PersistentTiling(128, 128, 128, 8, 4, 1)
    room = ProductRoom.allocate([tiling], multiprocessors=chip.num_multiprocessors, device=shapes.device)
    dependent = chip.dependent_launches
    found = persistent_linear(x, weight, tiling, room, dependent=dependent)
    yield _compared("persistent_linear", found, expected, shapes)
    assert torch.equal(found, persistent_linear(x, weight, tiling, room)), (
        "persistent_linear: bits depend on which program is last"
    )
    residual = _random(shapes, *found.shape)
    sums = residual.float() + expected
    add_persistent_linear(x, weight, tiling, room, out=residual, dependent=dependent)
    yield _compared("add_persistent_linear", residual, sums, shapes)
    found = persistent_gated_linear(x, weight, tiling, room, dependent=dependent)
    yield _compared("persistent_gated_linear", found, silu_and_mul.silu_and_mul(expected), shapes)


def _masks(shapes: Shapes) -> Rows:
    """Excludes tokens by masks, and takes the time of it."""
    vocab, count = (300, 3) if shapes.tiny else (151_936, 64)
    logits = torch.randn(2 * count, vocab, device=shapes.device)
    words = torch.randint(-(1 << 31), 1 << 31, (count, -(-vocab // 32)), device=shapes.device).to(torch.int32)
    masks = token_masks.RowMasks(torch.randperm(2 * count, device=shapes.device)[:count], words)
    found, expected = logits.clone(), logits.clone()
    logit_changes.exclude(found, masks)
    token_masks.exclude(expected, masks)
    assert torch.equal(found, expected), "masks: logits differ"
    yield {
        "what": f"masks of {count} rows",
        "us": median_s(lambda: logit_changes.exclude(found, masks), shapes.device) * 1e6,
    }


def _sampling(shapes: Shapes) -> Rows:
    """Compares sampled tokens with those that the host samples from the same logits."""
    vocab, count = (300, 12) if shapes.tiny else (151_936, 200)
    logits = 3 * torch.randn(count, vocab, device=shapes.device)
    ways = (
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 200, "top_p": 0.8},
    )  # fmt: skip
    rows = DeviceRows.allocate(num_rows=count, max_tokens=4, max_blocks=1, device=shapes.device)
    host_rows = []
    for index in range(count):
        way = Sampling(max_tokens=9, seed=(index * 0x9E3779B97F4A7C15) % (1 << 64), **ways[index % len(ways)])  # type: ignore[arg-type]
        columns = sampling_columns(TableRow(index, 0, way, 2, [], 2, 0))
        rows.sampling[index] = torch.from_numpy(columns).to(shapes.device)
        host_rows.append(Row(SequenceStart(index, [1, 2], 2, [0], way)))
    where = torch.tensor([(index, 2) for index in range(count)], dtype=torch.int32, device=shapes.device)
    expected = sample(logits.cpu(), host_rows, row_by_row=False).token_ids
    found = sampling.sample(logits, where, rows).tolist()
    same = sum(one == other for one, other in zip(found, expected, strict=True)) / count
    # Rounding may decide between two nearly equal numbers at a cut-off or in a draw.
    assert same >= 0.98, f"only {same:.1%} of the sampled tokens equal the host's"
    yield {"what": "sampled tokens equal to the host's", "share": same, "of": count}


def _logprobs(shapes: Shapes) -> Rows:
    """Log-probabilities of chosen tokens and of the top tokens, and the time that they take."""
    vocab, count, top = (300, 3, 5) if shapes.tiny else (151_936, 256, 20)
    logits = 3 * torch.randn(count, vocab, device=shapes.device)
    chosen = torch.randint(vocab, (count,), device=shapes.device)
    logprob, rank, ids, values = logprobs(logits, chosen, top)
    expected = torch.log_softmax(logits, dim=-1)
    likelier = (logits > logits.gather(1, chosen[:, None])).sum(dim=-1)
    assert torch.equal(rank.long(), likelier + 1), "logprobs: ranks differ"
    assert torch.equal(logits.gather(1, ids.long()), logits.topk(top, dim=-1).values), "logprobs: top tokens differ"
    yield _compared("logprobs, chosen", logprob, expected.gather(1, chosen[:, None])[:, 0], shapes)
    yield _compared("logprobs, top", values, expected.gather(1, ids.long()), shapes)
    time_s = median_s(lambda: logprobs(logits, chosen, top), shapes.device)
    yield {"what": f"logprobs, {count} rows, top {top}", "us": time_s * 1e6}
