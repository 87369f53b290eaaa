"""How long the engine expects its steps to take, and how long they take.

usage: python -m trunkline_bench.engine.step_times [--model DIR] [--quantization int8]

In each round 1 to 128 requests decode at once, in random order; few requests decode more tokens, so that each number of
them takes about as long. The cost model learns all the time. Each step's expected time is asked for when it is
launched, and compared with the time that it takes: the error is the median over the steps of all rounds but the first
two, so a machine whose speed changes within minutes has little part in it. Prompts have one token, so that all requests
decode from their first step on.
"""

import argparse
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

import torch

from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_bench.engine.random_model import RANDOM_EXPERTS, write_random_model
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.engine.engine import Engine
from trunkline_worker.model.loading import load_model
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Masks, StepPlan, StepResult

RESULTS = Path(__file__).parents[2] / "results"
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
LEAST_OUTPUT, OUTPUT_TOKENS = 16, 128  # of a request, and added to it for all requests at once
FIRST_ROUNDS = 2  # only learned from
VOCAB = 8192


class TimedExecutor:
    """An executor that notes expected and measured seconds of steps that only decode, by their number of rows."""

    def __init__(self, engine: Engine) -> None:
        self._executor, self._scheduler = engine.executor, engine.scheduler
        self.run_ahead = self._executor.run_ahead
        self._launched: list[tuple[StepPlan, float]] = []
        self.times_s: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def launch(self, plan: StepPlan) -> None:
        self._launched.append((plan, self._scheduler.expected_s(plan)))
        self._executor.launch(plan)

    def sample(self, masks: Masks) -> None:
        self._executor.sample(masks)

    def is_done(self) -> bool:
        return self._executor.is_done()

    def collect(self) -> StepResult:
        result = self._executor.collect()
        plan, expected_s = self._launched.pop(0)
        if plan.num_decodes == len(plan.steps) in ROWS:
            self.times_s[len(plan.steps)].append((expected_s, result.device_time_s))
        return result


def decode(engine: Engine, rows: int, first_handle: int) -> None:
    """Decodes this many requests at once."""
    sampling = SamplingParams(temperature=0, max_tokens=LEAST_OUTPUT + OUTPUT_TOKENS // rows, ignore_eos=True, seed=0)
    submits = [
        Submit(handle=first_handle + row, prompt_token_ids=[random.randrange(VOCAB)], sampling=sampling)
        for row in range(rows)
    ]
    engine.accept(EngineRequest(submits=submits))
    while engine.has_work:
        engine.step()


def measure(model: Path, quantization: str, rounds: int) -> dict[int, list[tuple[float, float]]]:
    settings = EngineSettings(model=str(model), device="cpu", quantization=quantization)
    device = torch.device("cpu")
    engine, _ = build_engine(settings, load_model(model, device=device, quantization=quantization), device)
    timed = engine.executor = TimedExecutor(engine)
    handle = 1
    for number in range(FIRST_ROUNDS + rounds):
        if number == FIRST_ROUNDS:
            timed.times_s.clear()
        for rows in random.sample(ROWS, len(ROWS)):
            decode(engine, rows, handle)
            handle += rows
    return timed.times_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a checkpoint; default: a random Qwen3-MoE")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder)
        if arguments.model is None:
            write_random_model(model, RANDOM_EXPERTS)
        times_s = measure(model, arguments.quantization, arguments.rounds)
    rows = {}
    for count in ROWS:
        expected_ms, measured_ms = (1e3 * median(column) for column in zip(*times_s[count], strict=True))
        errors = [expected_s / measured_s - 1 for expected_s, measured_s in times_s[count]]
        low, *_, high = quantiles(errors, n=10)
        rows[f"{count}"] = [
            f"{expected_ms:.2f}", f"{measured_ms:.2f}", f"{median(errors):+.1%}", f"{low:+.0%} to {high:+.0%}"
        ]  # fmt: skip
    name = arguments.model.name if arguments.model else "random Qwen3-MoE, 64 experts of which a token uses 8"
    command = "python -m trunkline_bench.engine.step_times" + f" --rounds {arguments.rounds}"
    command += " --model …" * (arguments.model is not None)
    command += f" --quantization {arguments.quantization}" * (arguments.quantization != "none")
    found = facts(command, "no GPU", ("trunkline", "torch"))
    text = (
        "# Expected and measured times of steps\n\n"
        + listed(found)
        + f"- model: {name}\n- steps of requests that decode; medians over all steps of {arguments.rounds} rounds\n\n"
        + table(rows, ["expected, ms", "measured, ms", "error", "8 of 10 steps"])
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    of_model = f"{arguments.model.name.lower()}-" if arguments.model else ""
    (arguments.output / f"step-times-{of_model}{arguments.quantization}-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
