"""`make bench-host`: host time of a step without device time: scheduling, committing, building messages.

The engine is the real one; the executor answers at once.
"""

import argparse
import gc
import statistics
import time
from collections import deque
from pathlib import Path

from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.step.plan import Masks, StepPlan, StepResult

REPOSITORY = Path(__file__).parents[3]
CONTEXT = 8192
PROMPT, OUTPUT = 512, 1024
BLOCK_SIZE = 16


class InstantExecutor:
    """An executor that samples token 7 for every sequence, in no time."""

    def __init__(self, run_ahead: int) -> None:
        self.run_ahead = run_ahead
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def sample(self, masks: Masks) -> None:
        """No plan needs the host."""

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        return StepResult(plan.step_id, [7 if step.samples else None for step in plan.steps])


def steps_per_s(running: int, waiting: int, run_ahead: int) -> float:
    """Steps per second with this many running and waiting requests."""
    limits = SchedulerLimits(max_running_requests=running, itl_target_s=0.1, interactive_reserve=0.05)
    num_blocks = (running + 8) * (PROMPT + OUTPUT) // BLOCK_SIZE * 2
    scheduler = Scheduler(limits, KVBlocks(num_blocks, PrefixTree("host", BLOCK_SIZE)), EngineStats(0.0))
    executor = InstantExecutor(run_ahead)
    engine = Engine(scheduler, executor, ModelLimits(CONTEXT, frozenset([2])), time.perf_counter)
    sampling = SamplingParams(max_tokens=OUTPUT, seed=0)
    submits = [
        Submit(handle=n, prompt_token_ids=[n % 30_000] * PROMPT, sampling=sampling, lane=1)  # type: ignore[arg-type]
        for n in range(running + waiting)
    ]
    engine.accept(EngineRequest(submits=submits))
    while len(scheduler.running) < running or any(s.num_unscheduled > 1 for s in scheduler.running):
        engine.step()
    gc.freeze()
    started_s, steps = time.perf_counter(), 0
    while steps < OUTPUT // 2:
        steps += engine.step() is not None
    return steps / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    flags = ["--repeats", str(arguments.repeats)]
    found = facts(make_command("bench-host", flags), "one thread", ("trunkline", "protobuf"))
    lines = [
        "# Host time of a step without device time\n",
        listed(found) + f"- {OUTPUT // 2} decode steps; medians of {arguments.repeats}\n",
        "| running | waiting | run-ahead | steps/s | host time of a step |",
        "|---|---|---|---|---|",
    ]
    for running, waiting in ((1, 0), (64, 0), (64, 500), (256, 0), (256, 500)):
        for run_ahead in (0, 1):
            rate = statistics.median(steps_per_s(running, waiting, run_ahead) for _ in range(arguments.repeats))
            lines.append(f"| {running} | {waiting} | {run_ahead} | {rate:,.0f} | {1e6 / rate:,.0f} µs |")
    text = "\n".join(lines) + "\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"host-time-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
