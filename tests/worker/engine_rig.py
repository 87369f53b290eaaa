"""The real engine — scheduler, blocks, model, sampler — driven in process through its protobuf messages."""

import select
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineRequest, EngineStep
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams
from trunkline.v1.worker_pb2 import Resume, Submit
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.engine.engine import Engine
from trunkline_worker.model.loading import load_model
from trunkline_worker.runner.step_thread import ThreadedExecutor
from trunkline_worker.settings import EngineSettings

POLL_S = 0.001
DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "tiny-tales"


def make_engine(model: Path = DEMO_MODEL, **options: object) -> Engine:
    """An engine on the CPU in float32; options are EngineSettings' fields."""
    settings = EngineSettings(model=str(model), **{"dtype": "float32", "device": "cpu", **options})  # type: ignore[arg-type]
    device = torch.device("cpu")
    loaded = load_model(
        model,
        dtype=settings.dtype,
        device=device,
        load_format=settings.load_format,
        kernels=settings.kernels,
        quantization=settings.quantization,
        kv_dtype=settings.kv_dtype,
        deterministic=settings.deterministic,
        context_length=settings.context_length,
        ignore_config_keys=settings.ignore_config_keys,
    )
    return build_engine(settings, loaded, device)[0]


def make_submit(
    handle: int, prompt: Iterable[int], *, output: Iterable[int] = (), choice: int = 0, **sampling: object
) -> Submit:
    """A submit as a front would send it."""
    submit = Submit(handle=handle, choice=choice, prompt_token_ids=list(prompt))
    submit.sampling.CopyFrom(SamplingParams(**{"seed": 1, "temperature": 0.0, **sampling}))  # type: ignore[arg-type]
    output = list(output)
    if output:
        submit.resume.CopyFrom(Resume(output_token_ids=output))
    return submit


class Collected:
    """What came out of the engine, by handle."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.outputs: dict[int, list[EngineOutput]] = {}
        self.finished: dict[int, FinishReason.ValueType] = {}
        self.cached: dict[int, int] = {}

    def add_step(self, step: EngineStep) -> None:
        for output in step.outputs:
            self.add(output)
        for handle, token_id in zip(step.token_handles, step.token_ids, strict=True):
            self.add(EngineOutput(handle=handle, token_ids=[token_id]))

    def add(self, output: EngineOutput) -> None:
        assert not output.HasField("error"), output.error
        self.outputs.setdefault(output.handle, []).append(output)
        self.tokens.setdefault(output.handle, []).extend(output.token_ids)
        if output.HasField("prompt"):
            self.cached[output.handle] = output.prompt.cached_tokens
        if output.finish_reason:
            self.finished[output.handle] = output.finish_reason


def drive(
    engine: Engine, submits: Iterable[Submit], *, each_step: Callable[[int, Collected], None] | None = None
) -> Collected:
    """Submits everything at once and steps until nothing is left; then no block may be live."""
    engine.accept(EngineRequest(submits=list(submits)))
    collected = Collected()
    steps = 0
    while engine.has_work:
        step = engine.step()
        if step is None:
            waits = engine.has_work and engine.is_waiting
            if waits and engine.is_computing and isinstance(engine.executor, ThreadedExecutor):
                select.select([engine.executor], [], [], POLL_S)  # a grammar process may have news meanwhile
                continue
            assert not waits or engine.wakes_s() is not None, "there is work, but no step"
            continue
        collected.add_step(step)
        steps += 1
        if each_step is not None:
            each_step(steps, collected)
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_live == 0
    return collected
