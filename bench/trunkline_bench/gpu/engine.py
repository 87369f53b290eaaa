"""The whole engine on real shapes with random weights: output tokens per second, steps against their roofline."""

import statistics
import time
from contextlib import nullcontext
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

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
        rows: Rows = [{"what": "start, kernels compiled before", "load_s": run.load_s, "warm_up_s": run.warm_up_s}]
        samples = run.record()
        rows += saturated(shapes, run)
        run.abandon()
        rows += decode_steps(shapes, run)
        rows.append(alone(shapes, run))
        (shapes.output / FITTED).write_text(fit([sample for sample in samples if sample[1] > 0]).to_json())
        rows.append({"what": "fitted step cost", "file": FITTED, "steps": len(samples)})
    return rows


def saturated(shapes: Shapes, run: EngineUnderTest) -> Rows:
    """Every request from the start: tokens per second, prompts included, and once every prompt is done."""
    decode_from: tuple[float, int] | None = None

    def count() -> int:
        return sum(len(stream.tokens) for stream in run.streams.values())

    def watch(step: EngineStep) -> None:
        nonlocal decode_from
        if decode_from is None and all(stream.tokens for stream in run.streams.values()):
            decode_from = time.perf_counter(), count()

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
        }
    ]  # fmt: skip
    if decode_from is not None and count() > decode_from[1]:
        rate = (count() - decode_from[1]) / (ended_s - decode_from[0])
        rows.append({"what": "decode alone", "output_tok_per_s": rate})
    return rows


def decode_steps(shapes: Shapes, run: EngineUnderTest) -> Rows:
    """Steps that only decode, by batch, against their roofline; of the largest, how long the device idles."""
    rows: Rows = []
    handle = max(run.streams) + 1
    steps = 4 if shapes.tiny else 40  # of each batch
    for batch in shapes.step_batches:
        for _ in range(batch):
            run.submit(handle, run.prompt(handle, shapes.prompt_tokens), steps + batch)
            handle += 1
        watched = DecodeSteps(run, batch)
        profiled = batch == max(shapes.step_batches) and shapes.device.type == "cuda"
        run.run(stop=lambda: len(watched.device_s) >= steps // 2, each_step=watched.take)  # noqa: B023 - called here
        with profile(activities=[ProfilerActivity.CUDA]) if profiled else nullcontext() as profiler:
            run.run(stop=lambda: len(watched.device_s) >= steps, each_step=watched.take)  # noqa: B023
        run.abandon()
        step_s = statistics.median(watched.device_s)
        bound_s = decode_bound_s(shapes, run, batch, statistics.median(watched.kv_tokens))
        row: dict[str, object] = {
            "what": "decode step", "batch": batch, "median_ms": step_s * 1e3, "of_roofline": bound_s / step_s
        }  # fmt: skip
        if profiler is not None:
            row["device_idle_share"] = idle_share(profiler)
        rows.append(row)
    return rows


class DecodeSteps:
    """Steps in which just so many sequences decode, and nothing else happens."""

    def __init__(self, run: EngineUnderTest, batch: int) -> None:
        self._run = run
        self._batch = batch
        self.device_s: list[float] = []
        self.kv_tokens: list[int] = []

    def take(self, step: EngineStep) -> None:
        scheduler = self._run.engine.scheduler
        last = scheduler.stats.last
        if last.decode_tokens == self._batch and not last.prefill_tokens:
            self.device_s.append(last.device_time_s)
            self.kv_tokens.append(sum(len(sequence.token_ids) for sequence in scheduler.running))


def idle_share(profiler: profile) -> float:
    """Of the time from the first kernel to the last one, what no kernel and no copy filled."""
    events: list[Any] = profiler.events()  # type: ignore[no-untyped-call]
    spans: list[tuple[float, float]] = sorted(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type == DeviceType.CUDA
    )
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


def alone(shapes: Shapes, run: EngineUnderTest) -> dict[str, object]:
    """One request: its tokens per second against reading the weights once for each."""
    handle = max(run.streams) + 1
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
