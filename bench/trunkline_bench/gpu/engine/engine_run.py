"""The whole engine in this process: stages submit requests, and the time of each token is recorded."""

import gc
import math
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trunkline.engine.v1.engine_pb2 import EngineRequest, EngineStep
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_bench.gpu.shapes import Shapes
from trunkline_bench.simulation.costs.fitted_cost import Sample
from trunkline_bench.simulation.costs.recording import RecordingExecutor
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.engine_process import idle_s
from trunkline_worker.engine.step_floor import model_work
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.loading import LoadedModel, load_model
from trunkline_worker.runner.step_thread import WaitingExecutor
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.model_work import ModelWork


@dataclass(slots=True)
class Stream:
    """The tokens of one request and their times, of time.perf_counter()."""

    submitted_s: float
    first_s: float = math.nan
    last_s: float = math.nan
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.submitted_s

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token."""
        return (len(self.tokens) - 1) / (self.last_s - self.first_s) if len(self.tokens) > 1 else math.nan


class EngineUnderTest:
    """An engine and the streams of its requests. Times are of time.perf_counter()."""

    def __init__(self, engine: Engine, spec: DecoderSpec, work: ModelWork, kv_bytes: int) -> None:
        self.engine = engine
        self.vocab_size = spec.vocab_size
        self.work = work  # of its steps
        self.kv_bytes = kv_bytes  # per token
        self.load_s = self.warm_up_s = 0.0
        self.streams: dict[int, Stream] = {}
        self.on_end: Callable[[int], None] = lambda handle: None
        self._waits = engine.executor if isinstance(engine.executor, WaitingExecutor) else None

    def record(self) -> list[Sample]:
        """Starts recording. Returns a list that grows by the work and time of every step."""
        self.engine.executor = recorder = RecordingExecutor(self.engine.executor)
        return recorder.samples

    def submit(
        self, handle: int, prompt: list[int], max_tokens: int, *, at_s: float | None = None, **sampling: object
    ) -> None:
        """Submits a request for exactly `max_tokens` output tokens, greedy unless `sampling` says otherwise.

        at_s: time of the request if earlier than now
        """
        params = SamplingParams(**{"temperature": 0.0, "seed": handle, **sampling})  # type: ignore[arg-type]
        params.max_tokens, params.ignore_eos = max_tokens, True
        self.streams[handle] = Stream(time.perf_counter() if at_s is None else at_s)
        self.engine.accept(EngineRequest(submits=[Submit(handle=handle, prompt_token_ids=prompt, sampling=params)]))

    def run(
        self,
        until_s: float = math.inf,
        each_step: Callable[[EngineStep], None] = lambda step: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Runs steps until no work is left, `until_s` has passed, or stop() returns True."""
        engine = self.engine
        while engine.has_work and time.perf_counter() < until_s and not stop():
            step = engine.step()
            if step is not None:
                self._take(step)
                each_step(step)
            elif self._waits is not None:
                wait_s = idle_s(engine)
                if wait_s is None or wait_s > 0:
                    select.select([self._waits], [], [], wait_s)

    def prompt(self, seed: int, length: int) -> list[int]:
        """A prompt that shares no prefix with the prompts of other seeds."""
        return [(seed * 7919 + at * 31 + seed * at % 13) % (self.vocab_size // 2) for at in range(length)]

    def abandon(self) -> None:
        """Aborts all requests that have not ended."""
        handles = [handle for handle in self.streams if handle in self.engine.scheduler.sequences]
        self.engine.accept(EngineRequest(abort_handles=handles))
        self.run()

    def close(self) -> None:
        """Releases the device's memory."""
        if self._waits is not None:
            self._waits.close()
        del self.engine, self._waits

    def _take(self, step: EngineStep) -> None:
        now_s = time.perf_counter()
        news = [(output.handle, list(output.token_ids)) for output in step.outputs]
        news += [(handle, [token]) for handle, token in zip(step.token_handles, step.token_ids, strict=True)]
        for handle, tokens in news:
            stream = self.streams[handle]
            if tokens and not stream.tokens:
                stream.first_s = now_s
            stream.tokens += tokens
            stream.last_s = now_s
        for output in step.outputs:
            assert not output.HasField("error"), output.error
            if output.finish_reason:
                self.on_end(output.handle)


@contextmanager
def running(shapes: Shapes, **options: object) -> Iterator[EngineUnderTest]:
    """A ready engine with the shapes' model, whose memory is freed afterwards. `options`: fields of EngineSettings."""
    chosen: dict[str, object] = {
        "model": str(shapes.model), "load_format": "auto" if shapes.tiny else "dummy", "device": shapes.device.type,
        "dtype": str(shapes.dtype).removeprefix("torch."),
        "kernels": "triton", "max_step_tokens": 64 if shapes.tiny else 8192, "max_running_requests": shapes.requests,
        "itl_target_ms": 0.0, "interactive_reserve": 0.0, "kv_blocks": 64 if shapes.tiny else None,
        "context_length": 256 if shapes.tiny else 4096, **options,
    }  # fmt: skip
    settings = EngineSettings(**chosen)  # type: ignore[arg-type]
    _give_back(shapes)
    under_test: EngineUnderTest | None = None
    try:
        under_test = _started(shapes, settings)
        yield under_test
    finally:
        if under_test is not None:
            under_test.close()
        del under_test
        _give_back(shapes)


def _give_back(shapes: Shapes) -> None:
    """Returns memory that torch caches to the device."""
    gc.unfreeze()
    gc.collect()
    if shapes.device.type == "cuda":
        torch.cuda.empty_cache()


def _started(shapes: Shapes, settings: EngineSettings) -> EngineUnderTest:
    started_s = time.perf_counter()
    model = load_model(
        Path(settings.model), dtype=settings.dtype, device=shapes.device, load_format=settings.load_format,
        kernels=settings.kernels, quantization=settings.quantization, kv_dtype=settings.kv_dtype,
        deterministic=settings.deterministic, context_length=settings.context_length,
    )  # fmt: skip
    loaded_s = time.perf_counter()
    warm_up = (lambda stage: None) if shapes.device.type == "cuda" else None
    engine, _ = build_engine(settings, model, shapes.device, warm_up)
    under_test = EngineUnderTest(engine, model.spec, unquantized_work(model), model.block_format(1).num_bytes)
    under_test.load_s, under_test.warm_up_s = loaded_s - started_s, time.perf_counter() - loaded_s
    return under_test


def unquantized_work(model: LoadedModel) -> ModelWork:
    """The work of a model's steps with unquantized weights."""
    spec, itemsize = model.spec, model.dtype.itemsize
    return model_work(
        spec,
        layer_bytes=(spec.layer_params - spec.expert_params) * itemsize,
        head_bytes=spec.head_params * itemsize,
        expert_bytes=spec.expert_params * itemsize,
        kv_itemsize=model.kv_dtype.itemsize,
    )
