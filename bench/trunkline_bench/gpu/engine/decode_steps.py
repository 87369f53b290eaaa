"""Decode-only steps of the whole engine relative to their roofline, and one request alone."""

import statistics
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.gpu import ceilings
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.engine_run import EngineUnderTest, running
from trunkline_bench.gpu.shapes import Shapes


def measure(shapes: Shapes) -> Rows:
    """One request alone, then decode steps by batch, the largest and most important first."""
    with running(shapes) as run:
        yield _alone(shapes, run)
        for batch in sorted(shapes.step_batches, reverse=True):
            watched = _decoded(shapes, run, batch)
            step_s = statistics.median(watched.device_s)
            bound_s = decode_bound_s(shapes, run, batch, statistics.median(watched.kv_tokens))
            yield {"what": "decode step", "batch": batch, "median_ms": step_s * 1e3, "of_roofline": bound_s / step_s}


def idle_share(shapes: Shapes) -> Rows:
    """The share of time in which the device idles in steps of the largest batch, from its profiler."""
    with running(shapes) as run:
        batch = max(shapes.step_batches)
        on_device = shapes.device.type == "cuda"
        profiler = profile(activities=[ProfilerActivity.CUDA]) if on_device else None
        watched = _decoded(shapes, run, batch, nullcontext() if profiler is None else profiler)
        row: dict[str, object] = {"what": "profiled decode steps", "batch": batch, "steps": len(watched.device_s)}
        if profiler is not None:
            row["device_idle_share"] = _idle_share(profiler)
        yield row


class DecodeSteps:
    """Collects the steps in which exactly `batch` sequences decode and no prompt is computed."""

    def __init__(self, run: EngineUnderTest, batch: int) -> None:
        self._run = run
        self._batch = batch
        self.device_s: list[float] = []
        self.kv_tokens: list[int] = []

    def take(self, step: EngineStep) -> None:
        """Records a finished step if it only decoded."""
        scheduler = self._run.engine.scheduler
        last = scheduler.stats.last
        if last.decode_tokens == self._batch and not last.prefill_tokens:
            self.device_s.append(last.device_time_s)
            self.kv_tokens.append(sum(len(sequence.token_ids) for sequence in scheduler.running))


def _decoded(
    shapes: Shapes, run: EngineUnderTest, batch: int, around: AbstractContextManager[object] | None = None
) -> DecodeSteps:
    """Runs `batch` requests until enough steps have only decoded, the second half of them within `around`.

    Then drops the requests."""
    handle = max(run.streams, default=-1) + 1
    steps = 4 if shapes.tiny else 40
    for at in range(batch):
        run.submit(handle + at, run.prompt(handle + at, shapes.prompt_tokens), steps + batch)
    watched = DecodeSteps(run, batch)
    run.run(stop=lambda: len(watched.device_s) >= steps // 2, each_step=watched.take)
    with around or nullcontext():
        run.run(stop=lambda: len(watched.device_s) >= steps, each_step=watched.take)
    run.abandon()
    return watched


def _idle_share(profiler: profile) -> float | None:
    """The share of the time between the first and the last kernel in which no kernel and no copy ran.

    Returns None if the profiler recorded nothing of the device, for example if it may not read the counters."""
    events: list[Any] = profiler.events()  # type: ignore[no-untyped-call]
    spans: list[tuple[float, float]] = sorted(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type == DeviceType.CUDA
    )
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


def _alone(shapes: Shapes, run: EngineUnderTest) -> dict[str, object]:
    """A row for one request: its tokens per second, and their ratio to the memory-bandwidth bound."""
    run.submit(0, run.prompt(0, shapes.prompt_tokens), min(shapes.output_tokens, 256))
    run.run()
    stream = run.streams[0]
    bound_s = decode_bound_s(shapes, run, 1, shapes.prompt_tokens)
    return {
        "what": "one request", "tok_per_s": stream.tokens_per_s, "of_bandwidth_bound": stream.tokens_per_s * bound_s,
        "ttft_ms": stream.ttft_s * 1e3,
    }  # fmt: skip


def decode_bound_s(shapes: Shapes, run: EngineUnderTest, batch: int, kv_tokens: float) -> float:
    """Lower bound in seconds of a decode-only step: matrices by bandwidth or arithmetic, whichever takes longer, plus
    keys and values by bandwidth."""
    bandwidth, flops = ceilings.bandwidth(shapes), ceilings.flops(shapes)
    work = run.work
    matrices_s = max(
        (work.read_bytes(batch) + work.head_bytes) / bandwidth,
        (work.layer_flops(batch) + work.head_flops(batch)) / flops,
    )
    return matrices_s + kv_tokens * run.kv_bytes / bandwidth
