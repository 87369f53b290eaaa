"""The bytes and FLOP of each recorded launch. Each tensor is read or written once, unless a kernel reads by an index;
then the contexts determine how much of it is read.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from trunkline_bench.kernels.device import Device, programs_per_multiprocessor
from trunkline_bench.kernels.launches import CHIPS, Launch, Resources, resources
from trunkline_bench.kernels.recorded_step import Operation, RecordedStep
from trunkline_bench.kernels.work import Work, product
from trunkline_kernels.gpu.decode_tiling import SHORTEST_PIECE
from trunkline_worker.step.model_work import kv_token_bytes, num_pairs, pair_flops

CHIP = CHIPS["sm_90"]
WARPS = 4  # Triton's default
ELEMENTS = 1 << 16  # of one program of torch's element-wise kernels: 128 threads, 4 at a time, and a few rounds

_RESOURCES: dict[str, Resources] = {}  # of compiled launches, by key: each takes a second to compile

# Fields of Work in which a launch differs from the general case.
Fields = dict[str, float]
Special = Callable[[Launch, RecordedStep, Device, int], Fields]


def works(step: RecordedStep, device: Device) -> list[Work]:
    """The work of each launch of a step, in order."""
    found: dict[str, Work] = {}
    works: list[Work] = []
    for launch in step.launches:
        key = _key(launch)
        if key not in found and isinstance(launch, Operation):
            found[key] = _of_torch(launch, device)
        elif key not in found and isinstance(launch, Launch):
            if key not in _RESOURCES:
                _RESOURCES[key] = resources(launch, CHIP)
            found[key] = _of_triton(launch, step, device, _RESOURCES[key])
        works.append(found[key])
    # A library kernel does not let the next one start early, and does not start early itself.
    dependent = [isinstance(launch, Launch) and "launch_pdl" in launch.options for launch in step.launches]
    return [
        replace(work, early=is_dependent and after_one)
        for work, is_dependent, after_one in zip(works, dependent, [False, *dependent], strict=False)
    ]


def _key(launch: Launch | Operation) -> str:
    """A key that is equal for launches with equal work."""
    if isinstance(launch, Operation):
        return f"{launch.name} {launch.bytes} {launch.product}"
    shown = [
        f"{name}={tuple(value.shape) if isinstance(value, Tensor) else value}"
        for name, value in launch.arguments.items()
    ]
    return f"{launch.kernel.__name__} {launch.programs} {' '.join(shown)}"


def _of_torch(operation: Operation, device: Device) -> Work:
    if operation.product:
        rows, columns, inner = operation.product
        name = f"product {rows} x {columns} x {inner}"
        return product(name, rows, columns, inner, operation.itemsize, operation.out_itemsize, device)
    programs = max(1, operation.bytes // ELEMENTS)
    slots = device.multiprocessors * 16
    return Work(operation.name, programs, slots, operation.bytes, least_s=device.least_s)


def _of_triton(launch: Launch, step: RecordedStep, device: Device, needs: Resources) -> Work:
    name = launch.kernel.__name__
    warps = launch.options.get("num_warps", WARPS)
    slots = device.multiprocessors * programs_per_multiprocessor(
        device, warps=warps, registers=needs.registers, shared=needs.shared
    )
    fields: dict[str, float] = {
        "programs": launch.programs,
        "bytes": sum(map(_size, launch.arguments.values())),
        "least_s": device.least_s,
    }
    if name in SPECIAL:
        fields |= SPECIAL[name](launch, step, device, slots)
    return Work(name.removeprefix("_"), slots=slots, **fields)  # type: ignore[arg-type]


def _size(value: object) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _gather(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    return {"bytes": 2 * _size(launch.arguments["out"])}


def _inputs(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    return {"bytes": 40.0 * sum(step.query_lens), "least_s": 2 * device.least_s}


def _rotary(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    arguments = launch.arguments
    return {"bytes": 2 * _size(arguments["qkv"]) + 4 * step.spec.head_dim * sum(step.query_lens)}


def _norm(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    crossings = 4 if launch.arguments["ADD"] else 2
    return {"bytes": crossings * _size(launch.arguments["x"])}


def _prompts(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    spec = step.spec
    pairs = sum(num_pairs(context - new, new) for new, context in zip(step.query_lens, step.context_lens, strict=True))
    kv = sum(step.context_lens) * _token_bytes(launch, step)
    return {
        "bytes": 2 * _size(launch.arguments["q"]) + kv,
        "bytes_share": device.paged_share,
        "flops": pair_flops(spec.num_heads, spec.head_dim) * pairs,
        "flops_per_s": device.peak_flops * device.attention_share,
    }


def _decodes(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    """Decode attention, divided as in decode_plan: a program for each range of tiles and each KV head."""
    arguments, spec = launch.arguments, step.spec
    tiles, ranges = _ranges(launch, step)
    programs = ranges * spec.num_kv_heads
    begun = len(step.context_lens) / ranges + 1  # sequences of a range: the loads start anew for each
    return {
        "programs": programs,
        "idle_programs": launch.programs - programs,
        "bytes": sum(step.context_lens) * _token_bytes(launch, step)
        + 2 * _size(arguments["q"])
        + _cut_bytes(step, ranges),
        "bytes_share": device.paged_share,
        "flops": pair_flops(spec.num_heads, spec.head_dim) * sum(step.context_lens),
        "flops_per_s": device.peak_flops * device.attention_share,
        "least_s": begun * device.least_s + math.ceil(tiles / ranges) * device.attention_tile_s,
        "tail_s": device.meet_s if ranges > 1 else 0.0,
    }


def _ranges(attention: Launch, step: RecordedStep) -> tuple[int, int]:
    """Returns the number of tiles, and the number of ranges that they are divided into."""
    keys = attention.arguments["TILE_KEYS"]
    tiles = sum(-(-context // keys) for context in step.context_lens)
    return tiles, min(max(tiles // max(1, SHORTEST_PIECE // keys), 1), len(attention.arguments["ranges"]))


def _cut_bytes(step: RecordedStep, ranges: int) -> float:
    """Bytes of partial results at the ends of ranges, which are written and read again."""
    return 2 * 2 * (ranges - 1) * step.spec.num_heads * (step.spec.head_dim + 2) * 4.0


def _token_bytes(launch: Launch, step: RecordedStep) -> int:
    """Bytes of one token's keys and values in one layer."""
    keys: Tensor = launch.arguments["keys"]
    return kv_token_bytes(step.spec.num_kv_heads, step.spec.head_dim, keys.dtype.itemsize)


def _peaks(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    arguments = launch.arguments
    return {"bytes": _size(arguments["logits"]) + _size(arguments["peaks"]) + _size(arguments["masses"])}


def _greedy(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    """Greedy sampling reads the peaks of a row, then the tile with the highest one."""
    arguments = launch.arguments
    tile = len(arguments["chosen"]) * arguments["TILE"] * 4.0
    return {"bytes": _size(arguments["peaks"]) + tile, "least_s": 2 * device.least_s}


SPECIAL: dict[str, Special] = {
    "_gather_rows": _gather,
    "_step_inputs": _inputs,
    "_rotary_kv": _rotary,
    "_rms_norm": _norm,
    "_ragged_attention": _prompts,
    "_attend_ranges": _decodes,
    "_tile_peaks": _peaks,
    "_choose": _greedy,
}
