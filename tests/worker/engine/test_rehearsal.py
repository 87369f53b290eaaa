"""Before its first request, an engine knows what steps cost, and the steps that showed it leave nothing behind."""

import torch

from tests.worker.engine_rig import DEMO_MODEL, drive, make_engine, make_submit
from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.engine.engine import Engine
from trunkline_worker.model.loading import load_model
from trunkline_worker.scheduler.step_budget import LEAST_CHUNK
from trunkline_worker.settings import EngineSettings

PROMPT = list(range(3, 303))


def rehearsed_engine(**options: object) -> tuple[Engine, list[str]]:
    """An engine as the engine process starts it, and the stages that it reported."""
    settings = EngineSettings(model=str(DEMO_MODEL), dtype="float32", device="cpu", **options)  # type: ignore[arg-type]
    device = torch.device("cpu")
    stages: list[str] = []
    return build_engine(settings, load_model(DEMO_MODEL, dtype="float32", device=device), device, stages.append)[
        0
    ], stages


def first_step_tokens(engine: Engine) -> int:
    engine.accept(EngineRequest(submits=[make_submit(1, PROMPT, max_tokens=2)]))
    engine.step()
    return engine.scheduler.last_load.num_tokens


def test_the_first_request_is_not_computed_in_the_least_chunks() -> None:
    engine, stages = rehearsed_engine()
    assert "measuring what steps cost" in stages
    # A pair is a query and a key of a prompt: decodes alone tell nothing of their speed.
    most_tokens, most_pairs = engine.scheduler.cost.experience.room(1.0, pairs_per_token=0.0)
    assert most_tokens > 0
    assert most_pairs > 0
    assert first_step_tokens(make_engine()) == LEAST_CHUNK
    assert first_step_tokens(engine) > LEAST_CHUNK


def test_on_a_cpu_the_first_prompts_are_computed_in_shorter_steps_than_later_ones() -> None:
    """Its other processes are idle during the rehearsal, and use the cores once there are requests."""
    engine, _ = rehearsed_engine()
    cost, interval_s = engine.scheduler.cost, 0.1
    assert cost.prompts_within_s(interval_s) < 0.6 * cost.within_s(interval_s)


def test_a_token_of_context_is_known_to_be_cheaper_than_a_sequence() -> None:
    """Decodes of one token of context alone would leave open which of both costs what a batch takes."""
    engine, _ = rehearsed_engine()
    cost = engine.scheduler.cost
    cost.fit()
    assert cost.kv_token_s <= cost.token_s / 4


def test_a_rehearsal_changes_no_answer_and_leaves_no_blocks_rows_or_counts() -> None:
    engine, _ = rehearsed_engine(kv_blocks=40, max_running_requests=8)
    blocks = engine.scheduler.blocks
    assert (blocks.num_live, blocks.num_cached) == (0, 0)
    assert engine.stats().steps.ByteSize() == 0
    submits = [make_submit(handle, PROMPT[: 7 * handle], max_tokens=12) for handle in range(1, 6)]
    expected = drive(make_engine(kv_blocks=40, max_running_requests=8), submits)
    assert drive(engine, submits).tokens == expected.tokens


def test_a_pool_of_one_block_is_enough_for_a_rehearsal() -> None:
    engine, _ = rehearsed_engine(kv_blocks=1, block_size=4, max_step_tokens=2)
    assert drive(engine, [make_submit(1, [3, 4], max_tokens=2)]).tokens[1]
