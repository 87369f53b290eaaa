"""The scheduler's own plans on a device that is not there: chunks, shared prefixes, preemption, padding, run ahead."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.worker.device.cards import H200
from tests.worker.device.device import FakeDevice
from tests.worker.device.models import inventions, model_of, spec_of
from tests.worker.device.session import Session
from tests.worker.engine_rig import make_submit
from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.runner.gpu.gpu_runner import GpuRunner
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Masks, StepPlan, StepResult

CONTEXT, REQUESTS = 2048, 40


class LaunchingExecutor:
    """QueueingExecutor without its thread: a device that is not there is in one thread alone."""

    def __init__(self, device: FakeDevice, runner: GpuRunner, run_ahead: int) -> None:
        self.run_ahead = run_ahead
        self.session = Session(device, runner)
        self._begun: deque[Callable[[], StepResult]] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._begun.append(self.session.begin(plan))

    def sample(self, masks: Masks) -> None:
        raise NotImplementedError

    def is_done(self) -> bool:
        return bool(self._begun)

    def collect(self) -> StepResult:
        return self._begun.popleft()()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"kv_blocks": 160, "admission": "optimistic"},  # preemptions
        pytest.param(
            {"batching": "static", "batch_size": 8, "max_step_tokens": 256}, marks=pytest.mark.slow
        ),  # padding
        pytest.param({"batching": "dynamic", "batch_size": 8}, marks=pytest.mark.slow),
        pytest.param({"deterministic": True, "max_running_requests": 300, "kv_blocks": 400}, marks=pytest.mark.slow),
        pytest.param({"run_ahead": 0, "kv_dtype": "fp8", "quantization": "int8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_schedulers_plans_keep_the_rules(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    # Without a target: steps depend on no clock.
    limits = {"max_step_tokens": 512, "max_running_requests": 16, "kv_blocks": 2000, "itl_target_ms": 0.0}
    settings = EngineSettings("model", **{**limits, **options})
    spec = spec_of("qwen3-0.6b", layers=1)
    device = FakeDevice(H200, inventions(spec.vocab_size, seed=2))
    monkeypatch.setattr(
        "trunkline_worker.engine.step_runner.QueueingExecutor",
        lambda runner, run_ahead: LaunchingExecutor(device, runner, run_ahead),
    )
    prefix = [draw.randrange(spec.vocab_size) for _ in range(600)]
    with device.running():
        model = model_of(
            spec, deterministic=settings.deterministic, quantization=settings.quantization,
            kv_dtype=settings.kv_dtype, context_length=CONTEXT,
        )  # fmt: skip
        engine, _ = build_engine(settings, model, torch.device("cuda"), lambda stage: None)
        assert isinstance(engine.executor, LaunchingExecutor)
        submits = [
            make_submit(
                handle, [*prefix[: draw.choice([0, 100, 600])], *draw.choices(range(5, 9000), k=draw.randint(1, 300))],
                max_tokens=draw.randint(1, 40), temperature=draw.choice([0.0, 1.0]), top_p=draw.choice([1.0, 0.9]),
                logprobs=draw.choice([0, 3]), repetition_penalty=draw.choice([1.0, 1.3]), ignore_eos=True,
            )
            for handle in range(REQUESTS)
        ]  # fmt: skip
        ended: set[int] = set()
        while submits or engine.has_work:
            batch, submits = submits[:3], submits[3:]
            engine.accept(EngineRequest(submits=batch))
            step = engine.step()
            if step is not None:
                ended |= {output.handle for output in step.outputs if output.finish_reason or output.HasField("error")}
        engine.scheduler.check_integrity()
        assert ended == set(range(REQUESTS))
        assert engine.scheduler.blocks.num_live == 0
        assert engine.executor.session.replays > 10
        if options.get("kv_blocks") == 160:
            assert engine.scheduler.stats.preemptions
