"""Runs engines over requests, and records exactly what clients could see of the outputs.

same_outputs.py runs this file with the packages of two checkouts. So it imports nothing from bench, and uses only what
both have: settings and a folder of a checkpoint make an engine, `Submit` goes in, `EngineStep` comes out. It reads a
Run, as JSON, from each line of standard input, and writes a Recorded to a line of standard output.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import trunkline_worker
from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineRequest, EngineStep
from trunkline.v1.generation_pb2 import SamplingParams, TokenLogprobs
from trunkline.v1.worker_pb2 import Resume, Submit
from trunkline_worker.engine.engine import Engine
from trunkline_worker.model.loading import load_model
from trunkline_worker.settings import EngineSettings

try:
    from trunkline_worker.engine.assembly import build_engine
except ModuleNotFoundError:  # before commit 713a2c1c
    from trunkline_worker.engine.engine_process import build_engine  # type: ignore[attr-defined,no-redef]


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A choice, and when it is submitted and ended."""

    handle: int
    prompt: list[int]
    sampling: dict[str, Any]  # fields of SamplingParams; logit_bias: pairs
    output: list[int] = field(default_factory=list)  # generated elsewhere
    choice: int = 0
    lane: int = 2
    salt: str = ""
    after: int = 0  # reports of the engine before it is submitted
    ends_after: int | None = None  # output tokens after which it is ended from outside
    is_aborted: bool = False  # then: aborted, rather than ended by a stop string


@dataclass(frozen=True, slots=True)
class Run:
    """One engine over its requests.  settings: fields of EngineSettings"""

    name: str
    settings: dict[str, Any]
    requests: list[TimedRequest]


@dataclass(slots=True)
class Output:
    """What the client of one choice gets. A log-probability is (token, value, rank, [(token, value, rank)])."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    cached: int | None = None
    finish: int = 0
    stop_token: int | None = None
    error: int | None = None  # its code


@dataclass(slots=True)
class Recorded:
    """The outputs of a run, by handle."""

    name: str
    outputs: dict[str, Output] = field(default_factory=dict)
    preemptions: int = 0
    failure: str = ""  # why the engine could not run


def engine_of(settings: EngineSettings) -> Engine:
    """An engine on the CPU, without rehearsal."""
    device = torch.device("cpu")
    model = load_model(
        Path(settings.model),
        dtype=settings.dtype,
        device=device,
        kernels=settings.kernels,
        deterministic=settings.deterministic,
        context_length=settings.context_length,
    )
    return build_engine(settings, model, device)[0]


def record(run: Run) -> Recorded:
    """The outputs of a run. Requests are submitted and ended after certain reports, so times change nothing."""
    recorded = Recorded(run.name, {str(request.handle): Output() for request in run.requests})
    try:
        engine = engine_of(EngineSettings(**run.settings))
        _drive(engine, run, recorded)
        engine.scheduler.check_integrity()
    except Exception as error:
        recorded.failure = f"{type(error).__name__}: {error}"
    return recorded


def _drive(engine: Engine, run: Run, recorded: Recorded) -> None:
    upcoming = sorted(run.requests, key=lambda request: (request.after, request.handle))
    ends = {request.handle: request for request in run.requests if request.ends_after is not None}
    reports = 0
    while upcoming or engine.has_work:
        reports = reports if engine.has_work else max(reports, upcoming[0].after)
        due = [request for request in upcoming if request.after <= reports]
        upcoming = upcoming[len(due) :]
        if due:
            engine.accept(EngineRequest(submits=map(_submit, due)))
        step = engine.step()
        if step is None:
            assert not engine.is_waiting or engine.wakes_s() is not None, "there is work, but no step"
            continue
        reports += 1
        recorded.preemptions += len(step.preempted_handles)
        handles = set(_take(step, recorded.outputs))
        reached = [ends.pop(handle) for handle in sorted(handles & ends.keys()) if _is_over(ends[handle], recorded)]
        if reached:
            aborts = [request.handle for request in reached if request.is_aborted]
            stops = [request.handle for request in reached if not request.is_aborted]
            engine.accept(EngineRequest(abort_handles=aborts, finished_handles=stops))


def _is_over(request: TimedRequest, recorded: Recorded) -> bool:
    return len(recorded.outputs[str(request.handle)].tokens) >= (request.ends_after or 0)


def _submit(request: TimedRequest) -> Submit:
    sampling = {**request.sampling, "logit_bias": dict(request.sampling.get("logit_bias", ()))}
    return Submit(
        handle=request.handle,
        choice=request.choice,
        prompt_token_ids=request.prompt,
        sampling=SamplingParams(**sampling),
        resume=Resume(output_token_ids=request.output) if request.output else None,
        cache_salt=request.salt.encode(),
        lane=request.lane,  # type: ignore[arg-type]
    )


def _take(step: EngineStep, outputs: dict[str, Output]) -> Iterable[int]:
    """Adds what a step brought, and yields the handles."""
    for handle, token_id in zip(step.token_handles, step.token_ids, strict=True):
        outputs[str(handle)].tokens.append(token_id)
        yield handle
    for output in step.outputs:
        _add(outputs[str(output.handle)], output)
        yield output.handle


def _add(taken: Output, output: EngineOutput) -> None:
    taken.tokens += output.token_ids
    taken.logprobs += map(_logprobs, output.logprobs)
    if output.HasField("prompt"):
        taken.cached = output.prompt.cached_tokens
        taken.prompt_logprobs += map(_logprobs, output.prompt.logprobs)
    if output.HasField("stop_token_id"):
        taken.stop_token = output.stop_token_id
    if output.HasField("error"):
        taken.error = output.error.code
    taken.finish = output.finish_reason or taken.finish


def _logprobs(entry: TokenLogprobs) -> Any:
    chosen = entry.chosen
    return chosen.token_id, chosen.logprob, chosen.rank, [(one.token_id, one.logprob, one.rank) for one in entry.top]


def main() -> None:
    checkout = Path(sys.argv[1])
    assert Path(trunkline_worker.__file__).is_relative_to(checkout), f"the packages are not those of {checkout}"
    torch.set_num_threads(1)
    for line in sys.stdin:
        found = json.loads(line)
        started_s = time.perf_counter()
        recorded = record(Run(found["name"], found["settings"], [TimedRequest(**one) for one in found["requests"]]))
        print(json.dumps({**asdict(recorded), "seconds": time.perf_counter() - started_s}), flush=True)


if __name__ == "__main__":
    main()
