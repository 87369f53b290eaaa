"""The whole engine on real shapes with random weights: output tokens per second, steps against their roofline."""

import statistics
import time
from collections import defaultdict

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.gpu import ceilings
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine_run import EngineUnderTest, running
from trunkline_bench.gpu.shapes import Shapes
from trunkline_bench.simulation.fitted_cost import fit

FITTED = "h200-8b-fitted.json"  # for `trunkline bench simulate --profile`


def measure(shapes: Shapes) -> Rows:
    """All requests at once, for a window of time or until they are done; then one alone. The steps' times are fitted:
    a profile for the simulator."""
    with running(shapes) as run:
        rows: Rows = [{"what": "cold start", "load_s": run.load_s, "warm_up_s": run.warm_up_s}]
        samples = run.record()
        rows += saturated(shapes, run)
        run.abandon()
        rows.append(alone(shapes, run))
        (shapes.output / FITTED).write_text(fit([sample for sample in samples if sample[1] > 0]).to_json())
        rows.append({"what": "fitted step cost", "file": FITTED, "steps": len(samples)})
    return rows


def saturated(shapes: Shapes, run: EngineUnderTest) -> Rows:
    """Every request from the start: tokens per second, alone and once every prompt is done; steps by batch."""
    device_s: defaultdict[int, list[float]] = defaultdict(list)
    kv_tokens: defaultdict[int, list[int]] = defaultdict(list)
    decode_from: tuple[float, int] | None = None
    busy_s = 0.0

    def count() -> int:
        return sum(len(stream.tokens) for stream in run.streams.values())

    def watch(step: EngineStep) -> None:
        nonlocal decode_from, busy_s
        last = run.engine.scheduler.stats.last
        busy_s += last.device_time_s
        if all(stream.tokens for stream in run.streams.values()):
            if decode_from is None:
                decode_from = time.perf_counter(), count()
            if last.prefill_tokens == 0 and last.decode_tokens:
                device_s[last.decode_tokens].append(last.device_time_s)
                kv_tokens[last.decode_tokens].append(sum(len(s.token_ids) for s in run.engine.scheduler.running))

    for handle in range(shapes.requests):
        run.submit(handle, run.prompt(handle, shapes.prompt_tokens), shapes.output_tokens)
    started_s = time.perf_counter()
    run.run(started_s + shapes.engine_window_s, watch)
    ended_s = time.perf_counter()
    rows: Rows = [
        {
            "what": f"{shapes.requests} x ({shapes.prompt_tokens} in, {shapes.output_tokens} out)",
            "model": shapes.model.name, "output_tok_per_s": count() / (ended_s - started_s),
            "window_s": ended_s - started_s, "finished": not run.engine.has_work,
            "device_idle_share": max(0.0, 1 - busy_s / (ended_s - started_s)),
        }
    ]  # fmt: skip
    if decode_from is not None and count() > decode_from[1]:
        rate = (count() - decode_from[1]) / (ended_s - decode_from[0])
        rows.append({"what": "decode alone", "output_tok_per_s": rate})
    for batch, times in sorted(device_s.items()):
        if len(times) >= 5:
            bound_s = decode_bound_s(shapes, run, batch, statistics.median(kv_tokens[batch]))
            step_s = statistics.median(times)
            rows.append(
                {"what": "decode step", "batch": batch, "median_ms": step_s * 1e3, "of_roofline": bound_s / step_s}
            )
    return rows


def alone(shapes: Shapes, run: EngineUnderTest) -> dict[str, object]:
    """One request: its tokens per second against reading the weights once for each."""
    handle = shapes.requests
    run.submit(handle, run.prompt(handle, shapes.prompt_tokens), min(shapes.output_tokens, 256))
    run.run()
    stream = run.streams[handle]
    bound_s = decode_bound_s(shapes, run, 1, shapes.prompt_tokens)
    return {
        "what": "one request", "tok_per_s": stream.tokens_per_s, "of_bandwidth_bound": stream.tokens_per_s * bound_s,
        "ttft_ms": stream.ttft_s * 1e3,
    }  # fmt: skip


def decode_bound_s(shapes: Shapes, run: EngineUnderTest, batch: int, kv_tokens: float) -> float:
    """The least time of a step that only decodes: the matrices by bandwidth or arithmetic, whichever is longer, then
    the keys and values."""
    bandwidth, flops = ceilings.bandwidth(shapes), ceilings.flops(shapes)
    parameters = run.weight_bytes / shapes.dtype.itemsize
    matrices_s = max(run.weight_bytes / bandwidth, 2 * parameters * batch / flops)
    return matrices_s + kv_tokens * run.kv_bytes / bandwidth
