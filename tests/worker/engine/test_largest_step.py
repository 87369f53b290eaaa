"""The step that is run before the KV pool is sized is one that the scheduler could plan."""

import pytest
import torch

from tests.worker.engine_rig import DEMO_MODEL
from trunkline_worker.engine.rehearsal import activation_bytes, largest_step
from trunkline_worker.model.loading import load_model
from trunkline_worker.runner.torch_runner import TorchRunner
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import NO_MASKS


@pytest.mark.parametrize(("tokens", "running", "block_size"), [(100, 7, 16), (5, 256, 4), (64, 1, 16), (2048, 256, 16)])
def test_it_has_all_tokens_and_all_samples(tokens: int, running: int, block_size: int) -> None:
    settings = EngineSettings("m", max_step_tokens=tokens, max_running_requests=running, block_size=block_size)
    plan = largest_step(settings, 4096)
    assert plan.num_tokens == tokens
    assert sum(step.samples for step in plan.steps) == min(running, tokens)
    blocks = [block for start in plan.starts for block in start.block_table]
    assert blocks == list(range(len(blocks)))


def test_it_stays_within_the_context() -> None:
    assert largest_step(EngineSettings("m", max_step_tokens=500, max_running_requests=2), 100).num_tokens == 198


def test_an_executor_runs_it() -> None:
    settings = EngineSettings(str(DEMO_MODEL), max_step_tokens=40, max_running_requests=6)
    model = load_model(DEMO_MODEL, device=torch.device("cpu"))
    plan = largest_step(settings, model.context_length)
    runner = TorchRunner(model, num_blocks=10, block_size=16)
    runner.forward(plan)
    assert all(token is not None for token in runner.sample(plan, NO_MASKS)().token_ids)
    assert activation_bytes(model, settings) == 0
