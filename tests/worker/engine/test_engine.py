"""The engine on the demo model: what each sampling parameter promises, end to end of the engine."""

import math
import random
import select
import socket
from threading import Semaphore

import pytest

from tests.worker.engine_rig import drive, make_engine, make_submit
from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import FinishReason
from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.engine_process import FrontLink, Watchdog, run
from trunkline_worker.link.channel import frame
from trunkline_worker.runner.step_thread import InlineExecutor, StepRunner, ThreadedExecutor
from trunkline_worker.step.plan import StepResult

PROMPT = list(range(60, 80))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(kv_blocks=512)


def test_choices_of_one_seed_differ_and_repeat(engine: Engine) -> None:
    def choices() -> list[list[int]]:
        submits = [
            make_submit(n + 1, PROMPT, choice=n, temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
            for n in range(4)
        ]
        return list(drive(engine, submits).tokens.values())

    first = choices()
    assert len({tuple(tokens) for tokens in first}) == 4
    assert choices() == first


def test_a_temperature_next_to_zero_is_greedy(engine: Engine) -> None:
    submits = [make_submit(n, PROMPT, max_tokens=6, temperature=t) for n, t in enumerate((0.0, 1e-38, 1e-6), start=1)]
    tokens = list(drive(engine, submits).tokens.values())
    assert tokens[0] == tokens[1] == tokens[2]


def test_max_tokens_and_the_context_bound_the_output(engine: Engine) -> None:
    limit = engine.limits.max_total_tokens
    long_prompt = [60] * (limit - 3)
    done = drive(
        engine, [make_submit(1, PROMPT, max_tokens=5, ignore_eos=True), make_submit(2, long_prompt, ignore_eos=True)]
    )
    assert [len(tokens) for tokens in done.tokens.values()] == [5, 3]
    assert set(done.finished.values()) == {FinishReason.FINISH_REASON_LENGTH}


def test_stop_token_ids_end_the_output_with_the_token(engine: Engine) -> None:
    free = drive(engine, [make_submit(1, PROMPT, max_tokens=12, ignore_eos=True)]).tokens[1]
    stop = free[6]
    done = drive(engine, [make_submit(1, PROMPT, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])])
    assert done.tokens[1] == free[: free.index(stop) + 1]
    assert done.finished[1] == FinishReason.FINISH_REASON_STOP
    assert done.outputs[1][-1].stop_token_id == stop


def test_min_tokens_puts_the_end_off(engine: Engine) -> None:
    free = drive(engine, [make_submit(1, PROMPT, max_tokens=12, ignore_eos=True)]).tokens[1]
    done = drive(
        engine, [make_submit(1, PROMPT, max_tokens=12, ignore_eos=True, stop_token_ids=[free[0]], min_tokens=6)]
    )
    assert len(done.tokens[1]) > 6
    assert free[0] not in done.tokens[1][:6]


def test_logit_bias_forces_and_forbids(engine: Engine) -> None:
    free = drive(engine, [make_submit(1, PROMPT, max_tokens=4, ignore_eos=True)]).tokens[1]
    done = drive(
        engine,
        [
            make_submit(1, PROMPT, max_tokens=4, ignore_eos=True, logit_bias={77: 100.0}),
            make_submit(2, PROMPT, max_tokens=4, ignore_eos=True, logit_bias={free[0]: -100.0}),
        ],
    )
    assert done.tokens[1] == [77] * 4
    assert free[0] != done.tokens[2][0]


def test_logprobs_are_normalised_ordered_and_contain_the_greedy_token(engine: Engine) -> None:
    done = drive(engine, [make_submit(1, PROMPT, max_tokens=6, ignore_eos=True, logprobs=20)])
    entries = [entry for output in done.outputs[1] for entry in output.logprobs]
    assert [entry.chosen.token_id for entry in entries] == done.tokens[1]
    for entry in entries:
        assert entry.chosen.rank == 1
        assert entry.top[0] == entry.chosen
        values = [item.logprob for item in entry.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 20
        assert sum(map(math.exp, values)) <= 1 + 1e-5


@pytest.mark.parametrize("chunk", [7, 64])
def test_prompt_logprobs_cover_the_prompt_whatever_the_chunks(chunk: int) -> None:
    whole = drive(make_engine(kv_blocks=64), [make_submit(1, PROMPT, max_tokens=1, prompt_logprobs=2)])
    parts = drive(
        make_engine(kv_blocks=64, max_step_tokens=chunk), [make_submit(1, PROMPT, max_tokens=1, prompt_logprobs=2)]
    )
    entries = whole.outputs[1][0].prompt.logprobs
    assert len(entries) == len(PROMPT)
    assert not entries[0].HasField("chosen")
    assert [entry.chosen.token_id for entry in entries[1:]] == PROMPT[1:]
    again = parts.outputs[1][0].prompt.logprobs
    assert [e.chosen.logprob for e in again] == pytest.approx([e.chosen.logprob for e in entries], abs=1e-4)


def test_a_full_queue_refuses_with_a_retry_delay_and_disturbs_no_other_request() -> None:
    engine = make_engine(kv_blocks=64, max_running_requests=1, max_waiting_requests=2)
    engine.accept(EngineRequest(submits=[make_submit(n, PROMPT, max_tokens=3, ignore_eos=True) for n in range(1, 5)]))
    refused = {}
    finished = set()
    while engine.has_work:
        step = engine.step()
        assert step is not None
        for output in step.outputs:
            if output.HasField("error"):
                refused[output.handle] = output.error
            if output.finish_reason:
                finished.add(output.handle)
    assert set(refused) == {3, 4}
    assert finished == {1, 2}
    assert {error.reason for error in refused.values()} == {"OVERLOADED"}
    assert all(error.retry_delay_ms > 0 for error in refused.values())


def test_ragged_batches_give_the_tokens_of_lone_runs() -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(500) for _ in range(draw.randrange(1, 70))] for _ in range(12)]
    lone = [
        drive(make_engine(kv_blocks=64), [make_submit(1, p, max_tokens=8, ignore_eos=True)]).tokens[1] for p in prompts
    ]
    batch = drive(
        make_engine(kv_blocks=256, max_step_tokens=48),
        [make_submit(n + 1, p, max_tokens=8, ignore_eos=True) for n, p in enumerate(prompts)],
    )
    assert list(dict(sorted(batch.tokens.items())).values()) == lone


def test_load_and_events_tell_what_the_pool_holds(engine: Engine) -> None:
    engine = make_engine(kv_blocks=16)
    engine.accept(EngineRequest(submits=[make_submit(1, PROMPT, max_tokens=2, ignore_eos=True)]))
    step = engine.step()
    assert step is not None
    assert (step.load.running, step.load.waiting, step.load.kv_live_blocks) == (1, 0, 2)
    assert [len(event.stored.block_hashes) // 16 for event in step.cache_events] == [1]
    while engine.has_work:
        step = engine.step()
    assert step is not None
    assert (step.load.kv_live_blocks, step.load.kv_cached_blocks, step.load.kv_free_blocks) == (0, 1, 15)


def test_load_samples_tell_routers_what_waits_by_lane_and_what_a_step_takes() -> None:
    engine = make_engine(kv_blocks=64, max_running_requests=1, max_step_tokens=8)
    running = make_submit(1, PROMPT, max_tokens=3, ignore_eos=True)
    waiting = [make_submit(n, [*PROMPT, *[n] * 10], max_tokens=2, ignore_eos=True) for n in (2, 3)]
    for submit, lane in zip((running, *waiting), (2, 2, 3), strict=True):
        submit.lane = lane  # type: ignore[assignment]
    engine.accept(EngineRequest(submits=[running]))
    assert engine.step() is not None
    engine.accept(EngineRequest(submits=waiting))
    step = engine.step()
    assert step is not None
    assert list(step.load.uncached_tokens_by_lane) == [0, (20 - 16) + 30, 30], "of the running prompt, what is left"
    assert step.load.running_kv_tokens == 20
    assert sum(step.load.uncached_tokens_by_lane) == step.load.waiting_uncached_tokens
    assert not step.load.HasField("step_cost"), "nothing is known yet"
    step = engine.step()
    assert step is not None
    assert list(step.load.uncached_tokens_by_lane) == [0, 30 - 16, 30 - 16], "what was looked for and found is left out"
    while engine.has_work:
        step = engine.step()
    assert step is not None
    assert (list(step.load.uncached_tokens_by_lane), step.load.running_kv_tokens) == ([0, 0, 0], 0)
    engine.accept(EngineRequest(submits=[make_submit(5, PROMPT, max_tokens=400, ignore_eos=True)]))
    while engine.has_work:
        step = engine.step()
    cost = engine.scheduler.cost
    assert step is not None
    assert cost.is_known
    told = step.load.step_cost
    assert (told.fixed_s, told.token_s, told.kv_token_s, told.pair_s) == (
        cost.fixed_s,
        cost.token_s,
        cost.kv_token_s,
        cost.pair_s,
    )


def test_the_load_tells_what_steps_save_whose_choices_leave_out_experts() -> None:
    engine = make_engine()
    engine.accept(EngineRequest(submits=[make_submit(1, PROMPT, max_tokens=4, ignore_eos=True)]))
    assert engine.load().other_experts_s == 0, "the model has none"
    cost = engine.scheduler.cost
    cost.routing, cost.experts_s = RoutingRule(num_experts=8, top_k=2), 0.008
    assert engine.step() is not None
    assert engine.load().running == 1
    assert engine.load().other_experts_s == pytest.approx(0.006)


def test_time_between_steps_is_what_the_engine_does_and_not_what_it_rests() -> None:
    engine, now_s = make_engine(kv_blocks=64), 0.0
    engine._clock_s = lambda: now_s
    for handle in range(1, 4):
        engine.accept(EngineRequest(submits=[make_submit(handle, PROMPT, max_tokens=40, ignore_eos=True)]))
        while engine.has_work:
            engine.step()
            now_s += 0.02  # messages, which the engine sends and takes in
        now_s += 10.0
    assert engine.scheduler.cost.between_s == pytest.approx(0.02, rel=0.05)


class Held(ThreadedExecutor):
    """Each step ends when it is released."""

    def __init__(self, runner: StepRunner) -> None:
        self.released = Semaphore(0)
        super().__init__(runner, 0)

    def _next(self) -> StepResult | None:
        result = super()._next()
        if result is not None:
            assert self.released.acquire(timeout=60)
        return result


def held_engine() -> tuple[Engine, Held]:
    """An engine whose steps are computed on a thread, and their executor."""
    engine = make_engine(kv_blocks=64)
    assert isinstance(engine.executor, InlineExecutor)
    executor = Held(engine.executor._runner)
    engine.use(executor)
    return engine, executor


def test_requests_are_taken_in_while_a_thread_computes_a_step() -> None:
    engine, executor = held_engine()
    submits = [make_submit(n, PROMPT[n:], max_tokens=5) for n in (1, 2)]
    expected = drive(make_engine(kv_blocks=64), submits).tokens
    engine.accept(EngineRequest(submits=submits[:1]))
    assert engine.step() is not None, "the first one was admitted"
    assert engine.is_computing
    assert engine.is_waiting
    assert engine.wakes_s() is None, "only the end of the step changes anything"
    engine.accept(EngineRequest(submits=submits[1:]))
    assert engine.step() is None
    tokens: dict[int, list[int]] = {1: [], 2: []}
    while engine.has_work:
        if engine.is_computing and engine.is_waiting:
            executor.released.release()
            assert select.select([executor], [], [], 60)[0]
        step = engine.step()
        for output in step.outputs if step is not None else ():
            tokens[output.handle].extend(output.token_ids)
        for handle, token_id in zip(step.token_handles, step.token_ids, strict=True) if step is not None else ():
            tokens[handle].append(token_id)
    executor.close()
    assert tokens == expected


def test_an_abort_while_a_thread_computes_a_step_changes_no_other_output() -> None:
    engine, executor = held_engine()
    submits = [make_submit(n, PROMPT[n:], max_tokens=5) for n in (1, 2)]
    expected = drive(make_engine(kv_blocks=64), submits).tokens
    engine.accept(EngineRequest(submits=submits))
    engine.step()
    assert engine.is_computing
    engine.accept(EngineRequest(abort_handles=[1]))
    executor.released.release(100)
    assert drive(engine, []).tokens == {2: expected[2]}
    executor.close()


class News:
    """A front that sends an empty request whenever it is asked for news, and is gone after ten; and the engine's
    watchdog."""

    def __init__(self) -> None:
        self.left, self.progress = 10, 0

    def receive(self, *_: object) -> list[EngineRequest] | None:
        self.left -= 1
        return [EngineRequest()] if self.left >= 0 else None

    def send(self, _: object) -> None:
        pass

    def goes_on(self, now_s: float) -> None:
        self.progress += 1

    def rests(self) -> None:
        raise AssertionError("a step is in flight")


def test_news_does_not_hide_a_step_that_hangs() -> None:
    engine, front = make_engine(kv_blocks=64), News()
    assert isinstance(engine.executor, InlineExecutor)
    executor = Held(engine.executor._runner)
    engine.use(executor)
    engine.accept(EngineRequest(submits=[make_submit(1, PROMPT, max_tokens=5)]))
    run(engine, front, front)  # type: ignore[arg-type]
    assert front.progress == 1
    executor.released.release()
    executor.close()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_preemptions_beside_a_step_on_a_thread_change_no_output(run_ahead: int) -> None:
    submits = [make_submit(n, PROMPT[n:], max_tokens=100) for n in (1, 2, 3)]
    expected = drive(make_engine(kv_blocks=64), submits).tokens
    engine = make_engine(kv_blocks=12, admission="optimistic", itl_target_ms=0.0)
    assert isinstance(engine.executor, InlineExecutor)
    executor = ThreadedExecutor(engine.executor._runner, run_ahead)
    engine.use(executor)
    assert drive(engine, submits).tokens == expected
    assert engine.scheduler.stats.preemptions > 0
    executor.close()


class Lost(ThreadedExecutor):
    """A device that fails in the first step."""

    def _next(self) -> StepResult | None:
        result = super()._next()
        if result is not None:
            raise RuntimeError("the device is lost")
        return result


def test_an_exception_of_a_step_on_a_thread_ends_the_engine() -> None:
    engine = make_engine(kv_blocks=64)
    assert isinstance(engine.executor, InlineExecutor)
    executor = Lost(engine.executor._runner)
    engine.use(executor)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(EngineRequest(submits=[make_submit(1, PROMPT, max_tokens=5)])))
        with pytest.raises(RuntimeError, match="the device is lost"):
            run(engine, FrontLink(ours), Watchdog(timeout_s=0.0))
    executor.close()
