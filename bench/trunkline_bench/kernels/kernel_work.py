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
from trunkline_bench.kernels.work import PRODUCT_TILES, Work, product
from trunkline_kernels.gpu.decode_tiling import SHORTEST_PIECE
from trunkline_worker.step.model_work import kv_token_bytes, num_pairs, pair_flops

CHIP = CHIPS["sm_90"]
WARPS = 4  # Triton's default
ELEMENTS = 1 << 16  # of one program of torch's element-wise kernels: 128 threads, 4 at a time, and a few rounds

SMALL_TILE = 0.25  # speed of tiles that PRODUCT_TILES does not have, relative to the best one: a guess

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
    return Work(_title(launch), slots=slots, **fields)  # type: ignore[arg-type]


def _title(launch: Launch) -> str:
    arguments = launch.arguments
    name: str = launch.kernel.__name__.removeprefix("_")
    if name == "expert_product":
        pairs = arguments["num_rows"] * arguments["PAIRS_PER_ROW"]
        return f"{name} {pairs} x {(2 if arguments['GATED'] else 1) * arguments['COLUMNS']} x {arguments['INNER']}"
    if name != "persistent_matmul":
        return name
    return f"{name} {arguments['num_rows']} x {len(arguments['weight_rows'])} x {arguments['inner']}"


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
        "bytes_share": _paged_share(launch, device),
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
        "bytes_share": _paged_share(launch, device),
        "flops": pair_flops(spec.num_heads, spec.head_dim) * sum(step.context_lens),
        "flops_per_s": device.peak_flops * device.attention_share,
        "least_s": begun * device.least_s + math.ceil(tiles / ranges) * device.attention_tile_s,
        "tail_s": device.meet_s if ranges > 1 else 0.0,
    }


def _paged_share(attention: Launch, device: Device) -> float:
    is_narrow = attention.arguments["keys"].dtype.itemsize == 1
    return device.narrow_paged_bytes_per_s / device.bytes_per_s if is_narrow else device.paged_share


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


def _persistent(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    """A product of the persistent kernel with a weight in blocks."""
    arguments = launch.arguments
    rows, columns, inner = (arguments[name] for name in ("num_rows", "num_columns", "inner"))
    tile_rows, tile_columns = arguments["TILE_ROWS"], arguments["TILE_COLUMNS"] * (2 if arguments["GATED"] else 1)
    tiles = -(-rows // tile_rows) * -(-columns // arguments["TILE_COLUMNS"])
    steps = -(-inner // arguments["TILE_INNER"])
    waves, sharing = arguments["waves"], arguments["sharing"]
    cut = tiles - waves * launch.programs
    # Steps of the program with the most work, while all others on its multiprocessor compute too.
    most_steps = waves * steps + (-(-cut * steps // sharing) if cut else 0)
    at_once = min(slots, launch.programs) / device.multiprocessors
    nearness = PRODUCT_TILES[tile_rows, tile_columns] / PRODUCT_TILES[128, 128]
    of_program = device.peak_fp8_flops / device.multiprocessors * device.block_share * nearness / max(1.0, at_once)
    # Results of tiles that several programs share are written and read again in float32.
    shares = 8.0 * (sharing + cut - 1) * min(rows, tile_rows) * tile_columns if sharing > cut else 0.0
    weight = arguments["weight_rows"]
    out_bytes = _size(arguments["out"]) * (2 if arguments["ADDED"] else 1)
    return {
        "bytes": rows * inner + _size(weight) + _size(arguments["column_factors"]) + out_bytes + shares,
        "flops": 2.0 * rows * weight.numel(),
        "flops_per_s": device.peak_fp8_flops,
        "least_s": most_steps * 2.0 * tile_rows * tile_columns * arguments["TILE_INNER"] / of_program,
        "tail_s": device.meet_s if sharing > cut else 0.0,
        "is_fp8": True,
    }


def _arrange(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    """Each program reads the experts of all pairs twice, block by block."""
    arguments = launch.arguments
    blocks = -(-arguments["num_pairs"] // arguments["BLOCK"])
    return {"bytes": 2 * _size(arguments["experts"]), "least_s": (1 + blocks) * device.least_s}


def _experts(launch: Launch, step: RecordedStep, device: Device, slots: int) -> Fields:
    """Products of the experts that the step's tokens use, if each token chooses evenly."""
    arguments, rule = launch.arguments, step.spec.routing
    assert rule is not None, "no other model has this kernel"
    columns, inner, tile_rows = (arguments[name] for name in ("COLUMNS", "INNER", "TILE_ROWS"))
    pairs = arguments["num_rows"] * arguments["PAIRS_PER_ROW"]
    used = rule.num_experts * rule.used_share(pairs / rule.top_k)
    tiles = used * max(1.0, pairs / used / tile_rows + 0.5)  # the last one of an expert is half full
    programs = math.ceil(tiles * -(-columns // arguments["TILE_COLUMNS"]))
    tile_columns, lines = ((2 if arguments["GATED"] else 1) * each for each in (arguments["TILE_COLUMNS"], columns))
    peak, share = device.peak_flops, device.product_share
    if arguments["NARROW"]:
        peak, share = device.peak_fp8_flops, device.block_share if arguments["BLOCK"] else device.fp8_share
    flops_per_s = peak * share * PRODUCT_TILES.get((tile_rows, tile_columns), SMALL_TILE)
    tile_flops = 2.0 * tile_rows * tile_columns * inner
    quantized = arguments["SCALED"] or arguments["FOUR_BITS"] or arguments["BLOCK"]
    weights = _size(arguments["weight"]) + (_size(arguments["scale"]) if quantized else 0)
    return {
        "programs": programs,
        "idle_programs": max(0, launch.programs - programs),
        "bytes": used / rule.num_experts * weights + _size(arguments["x"]) + _size(arguments["out"]),
        "flops": 2.0 * tiles * tile_rows * lines * inner,
        "flops_per_s": flops_per_s,
        "least_s": device.least_s + tile_flops / (flops_per_s / device.multiprocessors),
        "is_fp8": arguments["NARROW"],
    }


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
    "_persistent_matmul": _persistent,
    "_arrange_tiles": _arrange,
    "_expert_product": _experts,
    "_ragged_attention": _prompts,
    "_attend_ranges": _decodes,
    "_tile_peaks": _peaks,
    "_choose": _greedy,
}
