"""Compares the simulator with the engine. The engine replays a trace on this machine's CPU in real time; the simulator,
calibrated on steps of that engine, replays the same trace in virtual time. The calibration is written beside the
result, for `trunkline bench simulate --profile FILE`.

Calibration uses steps of the minutes before and after the replay, since a shared machine's speed drifts by some
percent. The default load is half the capacity: near capacity, 1 % of a step's time changes waiting times by 10 %.

usage: make bench-calibration ARGS='--minutes 5 --load 0.5'
"""

import argparse
import gc
import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_bench.engine.random_model import write_random_model
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.reports.statistics import percentile
from trunkline_bench.simulation import report
from trunkline_bench.simulation.costs.fitted_cost import FittedCost, fit
from trunkline_bench.simulation.costs.recording import RecordingExecutor
from trunkline_bench.simulation.places import AZURE, RESULTS
from trunkline_bench.simulation.traces.trace_request import TraceRequest, random_prompt
from trunkline_bench.simulation.traces.workload import at_once, at_rate, read_trace
from trunkline_bench.simulation.worker.replay import Replayed, replay
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.settings_description import scheduler_limits
from trunkline_worker.model.loading import load_model
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.settings import EngineSettings

LENGTH_SCALE = 0.25  # of the trace's lengths, for a small model on a CPU
CONTEXT = 2048
VOCAB = 32_000
KV_BLOCKS = 4096
BLOCK_SIZE = 16
CALIBRATION_REQUESTS = 400


def scaled(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The trace's requests with shorter prompts and outputs, for a small model on a CPU."""
    made = []
    for index, request in enumerate(requests):
        prompt = max(1, min(round(request.prompt_tokens * LENGTH_SCALE), CONTEXT // 2))
        output = max(1, min(round(request.output_tokens * LENGTH_SCALE), CONTEXT // 2))
        made.append(
            replace(
                request,
                prompt_tokens=prompt,
                output_tokens=output,
                prompt=partial(random_prompt, index, prompt, VOCAB),
            )
        )
    return made


def replay_really(engine: Engine, requests: list[TraceRequest]) -> tuple[list[float], float, int]:
    """Runs the requests on the engine in real time. Returns (times to first token, duration, output tokens)."""
    waiting: dict[int, float] = {}
    first: list[float] = []
    started_s, upcoming, generated = time.perf_counter(), 0, 0
    while upcoming < len(requests) or engine.has_work:
        now_s = time.perf_counter() - started_s
        while upcoming < len(requests) and requests[upcoming].arrival_s <= now_s:
            request = requests[upcoming]
            sampling = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True, seed=0)
            submit = Submit(handle=upcoming, prompt_token_ids=request.prompt(), sampling=sampling)
            engine.accept(EngineRequest(submits=[submit]))
            waiting[upcoming] = request.arrival_s
            upcoming += 1
        if not engine.has_work:
            time.sleep(max(0.0, requests[upcoming].arrival_s - (time.perf_counter() - started_s)))
            continue
        step = engine.step()
        if step is None:
            continue
        generated += len(step.token_ids)
        done_s = time.perf_counter() - started_s
        for output in step.outputs:
            assert not output.HasField("error"), output.error
            generated += len(output.token_ids)
            if output.HasField("prompt"):
                first.append(done_s - waiting.pop(output.handle))
    return first, time.perf_counter() - started_s, generated


def make_engine(model_dir: Path, settings: EngineSettings) -> tuple[Engine, RecordingExecutor]:
    device = torch.device("cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    engine, _ = build_engine(settings, load_model(model_dir, device=device, context_length=CONTEXT), device)
    engine.executor = recorder = RecordingExecutor(engine.executor)
    return engine, recorder


def virtual(requests: list[TraceRequest], cost: FittedCost, limits: SchedulerLimits, host_s: float) -> Replayed:
    spec = WorkerSpec(cost, KV_BLOCKS, BLOCK_SIZE, limits, context_length=CONTEXT, run_ahead=0, host_s=host_s)
    return replay(requests, spec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--load", type=float, default=0.5, help="share of the engine's capacity")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    flags = ["--minutes", f"{arguments.minutes:g}", "--load", f"{arguments.load:g}"]
    found = facts(make_command("bench-calibration", flags), "the engine's", ("trunkline", "numpy", "torch"))
    trace = scaled(read_trace(AZURE))
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(scratch) / "random-22m"
        write_random_model(model_dir)
        settings = EngineSettings(
            model=str(model_dir), device="cpu", max_step_tokens=1024, kv_blocks=KV_BLOCKS, block_size=BLOCK_SIZE
        )
        engine, recorder = make_engine(model_dir, settings)
        gc.freeze()
        warm_up = trace[:8]
        replay_really(engine, at_once(warm_up))
        recorder.samples.clear()
        # Steps of all sizes: all requests at once, then at a rate.
        _, saturated_s, _ = replay_really(engine, at_once(trace[8:CALIBRATION_REQUESTS]))
        capacity = (CALIBRATION_REQUESTS - 8) / saturated_s
        rate = capacity * arguments.load
        a_minute = int(60 * rate)
        samples = recorder.samples
        replay_really(engine, at_rate(trace[CALIBRATION_REQUESTS : CALIBRATION_REQUESTS + a_minute], rate))
        before = len(samples)
        requests = at_rate(trace[2000 : 2000 + int(rate * arguments.minutes * 60)], rate)
        first, duration_s, generated = replay_really(engine, requests)
        after = len(samples)
        replay_really(engine, at_rate(trace[-a_minute:], rate))
        del samples[before:after]  # the steps to be predicted
        cost, num_samples = fit(samples), len(samples)
        stats = engine.scheduler.stats
        host_s = stats.total.host_time_s / stats.steps
        simulated = virtual(requests, cost, scheduler_limits(settings), host_s)
    rows = {}
    real = [generated / duration_s, *(percentile(first, share) * 1e3 for share in (0.5, 0.99))]
    predictions = [
        report.output_rate(simulated),
        *(percentile(report.ttfts(simulated), share) * 1e3 for share in (0.5, 0.99)),
    ]
    names = ("output tok/s", "TTFT p50, ms", "TTFT p99, ms")
    for name, measured, predicted in zip(names, real, predictions, strict=True):
        rows[name] = [f"{measured:,.1f}", f"{predicted:,.1f}", f"{predicted / measured - 1:+.1%}"]
    text = (
        "# The simulator against the engine on this machine's CPU\n\n"
        + listed(found)
        + f"- workload: {len(requests):,} requests of {AZURE.name}, lengths x {LENGTH_SCALE}, {rate:.2f} requests/s "
        f"({arguments.load:.0%} of capacity), {duration_s:.0f} s; 22 M random Llama, float32\n"
        f"- calibrated on {num_samples:,} steps before and after it\n\n"
        + table(rows, ("measured", "simulated", "difference"))
    )
    write(arguments.output, text, replace(cost, kv_tokens=KV_BLOCKS * BLOCK_SIZE).with_host_s(host_s))
    print(text)


def write(folder: Path, text: str, cost: FittedCost) -> None:
    """Writes the report, and the cost of this engine's steps, including host time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calibration.md").write_text(text)
    (folder / "calibration.json").write_text(cost.to_json())


if __name__ == "__main__":
    main()
