"""Outputs under grammars: of their grammar, and the same whatever else the engine does."""

import random
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from tests.worker.engine_rig import DEMO_MODEL, Collected, drive, make_engine, make_submit
from tests.worker.guided.guided_rig import (
    CODE,
    EOS,
    FIXED,
    LENGTH,
    OBJECT,
    PERSON,
    REGEX,
    STOP,
    TOKENIZER,
    VOCAB,
    WORDS,
    Bits,
    OneByOne,
    bits,
    check,
    grammar,
    guided,
    guided_engine,
    text_of,
)
from tests.worker.guided.in_process_link import InProcessLink
from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.status import INTERNAL, INVALID_REQUEST
from trunkline.v1.worker_pb2 import GetModelResponse, Grammar, Submit
from trunkline_worker.engine.assembly import take_grammars
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.guided_sequences import GuidedSequences
from trunkline_worker.runner.step_thread import InlineExecutor, QueueingExecutor
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Masks, StepPlan

PROMPTS = [
    TOKENIZER.encode(text).ids for text in ("Once upon a time", "Tom", "Lily and her dog went to the park. " * 4)
]
A, B = TOKENIZER.encode(" red").ids[-1], TOKENIZER.encode("a").ids[-1]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "logprobs": 1},
    {"temperature": 1.0, "presence_penalty": 0.7, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 2.0, "logit_bias": {A: 8.0, B: -100.0, EOS: 100.0}, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.1, "logprobs": 3, "min_tokens": 25, "ignore_eos": True},
    {"temperature": 1.0, "top_p": 0.9, "stop_token_ids": [B], "min_tokens": 3},
]
GRAMMARS: list[Grammar | None] = [PERSON, None, CODE, FIXED, OBJECT, WORDS, PERSON]


def submit_of(handle: int, *, output: list[int] | None = None, max_tokens: int = 60) -> Submit:
    """Requests of every kind: 7 grammars with 7 parameters, prompts of three lengths, and n choices of some."""
    params = PARAMS[(handle + handle // 7) % 7]
    made = make_submit(
        handle,
        PROMPTS[handle % 3],
        output=output or [],
        choice=handle % 2,
        max_tokens=max_tokens,
        **{"seed": handle // 2, **params},
    )
    return guided(made, GRAMMARS[handle % 7])


@cache
def reference(handle: int) -> tuple[Bits, int]:
    """The bits of a request alone, without runs, and how it ends."""
    collected = drive(engine_alone(), [submit_of(handle)])
    return bits(collected, handle), collected.finished[handle]


@cache
def engine_alone() -> Engine:
    return guided_engine(kind=OneByOne)


HANDLES = range(1, 50)


def compare(collected: Collected, handles: Any = HANDLES) -> None:
    for handle in handles:
        assert (bits(collected, handle), collected.finished[handle]) == reference(handle), handle


@pytest.mark.parametrize("weights", ["auto", "dummy"])
def test_every_output_is_of_its_grammar(weights: str) -> None:
    collected = drive(guided_engine(load_format=weights), [submit_of(handle) for handle in HANDLES])
    ends = [collected.finished[handle] for handle in HANDLES if GRAMMARS[handle % 7] is not None]
    assert min(ends.count(STOP), ends.count(LENGTH)) > 3
    for handle in HANDLES:
        constraint = GRAMMARS[handle % 7]
        if constraint is not None:
            check(constraint, collected, handle)


@pytest.mark.parametrize("late", [0.0, 0.6])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_neither_the_batch_nor_runs_nor_late_masks_change_an_output(run_ahead: int, late: float) -> None:
    engine = guided_engine(run_ahead=run_ahead, late=late, max_running_requests=16)
    compare(drive(engine, [submit_of(handle) for handle in HANDLES]))
    assert engine.guided is not None
    assert len(engine.guided) == 0


@pytest.mark.parametrize("late", [0.0, 0.6])
def test_nor_does_a_thread_that_computes_the_steps(late: float) -> None:
    engine = guided_engine(late=late, max_running_requests=16)
    assert isinstance(engine.executor, InlineExecutor)
    executor = engine.executor.on_thread()
    engine.use(executor)
    compare(drive(engine, [submit_of(handle) for handle in HANDLES]))
    executor.close()


@pytest.mark.parametrize(
    "options",
    [
        {"kv_blocks": 24, "admission": "optimistic"},
        {"max_step_tokens": 12},
        {"kernels": "torch", "max_step_tokens": 64},
    ],
    ids=str,
)
def test_neither_preemption_nor_chunks_change_an_output(options: dict[str, Any]) -> None:
    handles = range(1, 15) if "kernels" in options else HANDLES
    engine = guided_engine(late=0.3, max_running_requests=8, **options)
    collected = drive(engine, [submit_of(handle) for handle in handles])
    if "kernels" not in options:
        compare(collected)
    for handle in handles:
        constraint = GRAMMARS[handle % 7]
        if constraint is not None:
            check(constraint, collected, handle)
    assert bool(engine.scheduler.stats.preemptions) == ("kv_blocks" in options)


@pytest.mark.parametrize(
    "handle", [4, 6, 7, 9, 10, 13, *(pytest.param(n, marks=pytest.mark.slow) for n in (11, 18, 25))]
)
def test_an_output_continues_from_every_ledger(handle: int) -> None:
    """Also from one that ends among forced tokens."""
    expected, finish = reference(handle)
    tokens = [token for token, _ in expected]
    most = len(tokens) if finish == LENGTH else len(tokens) - 1
    submits = []
    for length in range(1, min(most, 59)):
        made = submit_of(handle, output=tokens[:length])
        made.handle = 1000 + length
        submits.append(made)
    collected = drive(guided_engine(), submits)
    for length in range(1, len(submits) + 1):
        assert bits(collected, 1000 + length) == expected[length:]
        assert collected.finished[1000 + length] == finish


def test_a_ledger_that_does_not_follow_its_grammar_is_that_requests_error() -> None:
    engine = guided_engine()
    wrong = guided(make_submit(1, PROMPTS[0], output=[B], max_tokens=9), CODE)
    engine.accept(EngineRequest(submits=[wrong, submit_of(9)]))
    reasons: dict[int, str] = {}
    while engine.has_work:
        step = engine.step()
        for output in step.outputs if step is not None else ():
            reasons[output.handle] = output.error.reason
    assert reasons == {1: INVALID_REQUEST, 9: ""}


class Unstartable(InProcessLink):
    """As where the machine can start no process."""

    def compile(self, digest: bytes, kind: int, text: str, tenant: str = "") -> None:
        raise OSError("injected")


def test_a_bug_with_a_grammar_ends_its_request_alone() -> None:
    engine = guided_engine(link=Unstartable(DEMO_MODEL, VOCAB, [EOS]))
    engine.accept(EngineRequest(submits=[submit_of(9), make_submit(2, PROMPTS[0], max_tokens=3)]))
    reasons: dict[int, str] = {}
    while engine.has_work:
        step = engine.step()
        for output in step.outputs if step is not None else ():
            reasons[output.handle] = output.error.reason
    assert reasons == {9: INTERNAL, 2: ""}
    assert engine.guided is not None
    assert len(engine.guided) == 0


def test_a_grammar_that_does_not_compile_is_refused() -> None:
    engine = guided_engine()
    bad = Grammar(kind=CODE.kind, text="(", digest=b"bad")
    first = [guided(make_submit(handle, PROMPTS[0]), bad) for handle in (1, 2)]
    engine.accept(EngineRequest(submits=[*first, submit_of(9)]))
    fields, tokens = {}, 0
    while engine.has_work:
        step = engine.step()
        for output in step.outputs if step is not None else ():
            fields[output.handle] = output.error.field
        tokens += len(step.token_ids) if step is not None else 0
    assert fields == {1: "grammar", 2: "grammar", 9: ""}


@pytest.mark.slow
def test_on_the_gpus_path(shallow_model: Path) -> None:
    found: list[dict[int, Bits]] = []
    handles = (1, 3, 6, 7)  # one of them without a grammar
    for kind in (OneByOne, GuidedSequences):
        engine = guided_engine(shallow_model, kernels="triton", run_ahead=1, kind=kind, late=0.3)
        engine.executor = QueueingExecutor(engine.executor._runner, 1)  # type: ignore[attr-defined]
        collected = drive(engine, [submit_of(handle, max_tokens=6) for handle in handles])
        found.append({handle: bits(collected, handle) for handle in handles})
        check(PERSON, collected, 7)
    one_by_one, together = ([row for handle in handles for row in outputs[handle]] for outputs in found)
    assert [token for token, _ in together] == [token for token, _ in one_by_one]
    # The interpreter multiplies with NumPy, whose last bits depend on addresses.
    assert logprobs(together) == pytest.approx(logprobs(one_by_one), abs=1e-4)


def logprobs(rows: Bits) -> list[float]:
    return [logprob for _, told in rows for _, logprob in told]


class Plans:
    """What an engine's executor is given."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[StepPlan] = []
        launch = engine.executor.launch

        def noted(plan: StepPlan) -> None:
            self.seen.append(plan)
            launch(plan)

        engine.executor.launch = noted  # type: ignore[method-assign]

    def take(self) -> list[StepPlan]:
        seen, self.seen = self.seen, []
        return seen


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_batches_without_grammars_keep_their_single_call(run_ahead: int) -> None:
    engine = guided_engine(run_ahead=run_ahead)
    plans = Plans(engine)
    unguided = [make_submit(handle, PROMPTS[0], max_tokens=9) for handle in (1, 2, 3)]
    drive(engine, [*unguided, submit_of(9)])
    assert any(plan.needs_host for plan in plans.take())
    drive(engine, [make_submit(handle, PROMPTS[0], max_tokens=9) for handle in (4, 5)])
    assert not any(plan.needs_host for plan in plans.take())
    assert (engine.scheduler.masker, engine.scheduler.runs.proposer) == (None, None), "none is asked about each row"


def test_what_is_forced_takes_one_step() -> None:
    engine = guided_engine()
    engine.accept(EngineRequest(submits=[guided(make_submit(1, PROMPTS[0], max_tokens=60), FIXED)]))
    steps = []
    while engine.has_work:
        step = engine.step()
        steps += [step] if step is not None and step.HasField("record") else []
    first, rest = ([token for output in step.outputs for token in output.token_ids] for step in steps)
    assert len(first) == 1, "the answer comes while the prompt is computed"
    assert len(rest) > 30
    assert [step.record.forced_tokens for step in steps] == [0, len(rest)]


class Slow(InProcessLink):
    """Answers at every ninth look."""

    looks = 0

    def take(self) -> Any:
        self.looks += 1
        return super().take() if self.looks % 9 == 0 else []


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_row_that_sat_out_waits_for_its_mask_without_computing(run_ahead: int) -> None:
    engine = guided_engine(run_ahead=run_ahead)
    assert engine.guided is not None
    engine.guided._link = Slow(DEMO_MODEL, VOCAB, [EOS])
    plans = Plans(engine)
    others = [make_submit(handle, PROMPTS[1], max_tokens=60, ignore_eos=True) for handle in (100, 101)]
    collected = drive(engine, [*others, submit_of(7)])
    assert bits(collected, 7) == reference(7)[0]
    computed = sum(step.sequence_id == 7 for plan in plans.take() for step in plan.steps)
    assert computed <= 2 * len(collected.outputs[7]) + 1


def test_sampling_begins_once_all_masks_are_there_and_waits_for_them_until_the_next_step_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = guided_engine()
    assert engine.guided is not None
    engine.guided._link = Slow(DEMO_MODEL, VOCAB, [EOS])
    engine.use(InlineExecutor(engine.executor._runner, 1))  # type: ignore[attr-defined]
    now_s = count(0.0, 0.001)  # each look at the clock takes a millisecond
    monkeypatch.setattr(engine, "_clock_s", lambda: next(now_s))
    monkeypatch.setattr(engine.scheduler, "expected_s", lambda plan: 1.0)
    sample, is_early = engine.executor.sample, list[bool]()

    def noted(masks: Masks) -> None:
        is_early.append(next(now_s) < engine._plan_at_s)
        sample(masks)

    monkeypatch.setattr(engine.executor, "sample", noted)
    engine.accept(EngineRequest(submits=[submit_of(7)]))
    num_late = 0
    while engine.has_work:
        step = engine.step()
        num_late += step.record.late_masks if step is not None else 0
    assert (all(is_early), len(is_early) > 10, num_late) == (True, True, 0)


def test_min_tokens_keeps_ends_out_unless_nothing_else_is_left() -> None:
    free, bias = grammar(REGEX, "[a-z ]*"), {EOS: 100.0}
    submits = [
        guided(make_submit(1, PROMPTS[0], max_tokens=40, logit_bias=bias), free),
        guided(make_submit(2, PROMPTS[0], max_tokens=40, logit_bias=bias, min_tokens=20), free),
        guided(make_submit(3, PROMPTS[0], max_tokens=40, logit_bias=bias, min_tokens=20), CODE),
    ]
    collected = drive(guided_engine(), submits)
    assert [len(collected.tokens[handle]) for handle in (1, 2)] == [1, 21]
    assert collected.finished[3] == STOP
    check(CODE, collected, 3)


class Life:
    """An engine with mixed requests, some aborted or finished by their front, some resumed, in small batches and pools.
    Each output must be what the request gets alone: the mask of another row, or of another step, would change it."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.engine = guided_engine(
            late=draw.choice([0.0, 0.3, 0.8]),
            run_ahead=draw.choice([0, 0, 1, 2]),
            kv_blocks=draw.choice([24, 40, 96]),
            admission=draw.choice(["predicted", "optimistic"]),
            max_running_requests=draw.choice([2, 4, 16]),
            max_step_tokens=draw.choice([16, 64, 256]),
        )
        self.handles = draw.sample(HANDLES, 20)

    def run(self) -> None:
        draw, engine = self.draw, self.engine
        collected, left = Collected(), list(self.handles)
        ledgers: dict[int, int] = {}
        gone: set[int] = set()
        while left or engine.has_work:
            while left and draw.random() < 0.3:
                handle = left.pop()
                expected, finish = reference(handle)
                length = draw.randrange(max(1, min(len(expected) - (finish == STOP), 59))) if draw.random() < 0.3 else 0
                ledgers[handle] = length
                output = [token for token, _ in expected[:length]]
                engine.accept(EngineRequest(submits=[submit_of(handle, output=output)]))
            if draw.random() < 0.02 and ledgers:
                handle = draw.choice([*ledgers])
                gone.add(handle)
                kind = draw.choice(["abort_handles", "finished_handles"])
                engine.accept(EngineRequest(**{kind: [handle]}))  # type: ignore[arg-type]
            step = engine.step()
            engine.scheduler.check_integrity()
            if step is not None:
                collected.add_step(step)
        for handle, length in ledgers.items():
            expected, finish = reference(handle)
            found = bits(collected, handle) if handle in collected.outputs else []
            rest = expected[length:]
            assert found == rest[: len(found)], handle
            if handle not in gone:
                assert (len(found), collected.finished[handle]) == (len(rest), finish), handle
        assert engine.scheduler.blocks.num_live == 0
        assert engine.guided is not None
        assert len(engine.guided) == 0
        assert isinstance(engine.guided._link, InProcessLink)
        assert engine.guided._link.num_matched == 0


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_masks_never_leak_between_rows(seed: int) -> None:
    Life(seed).run()


def test_a_grammars_end_ends_the_choice_whatever_the_parameters_say() -> None:
    asked = make_submit(1, PROMPTS[0], max_tokens=60, ignore_eos=True, min_tokens=60)
    collected = drive(guided_engine(), [guided(asked, FIXED)])
    assert collected.finished[1] == STOP
    assert text_of(collected.tokens[1]) == '{"a": [1, 2, 3], "b": "the only text that there is"}'


def test_an_engine_whose_tokenizer_the_library_cannot_read_takes_no_grammars_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Tokenizer(WordPiece({"a": 0, "##b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    engine, description = make_engine(), GetModelResponse(vocab_size=2, eos_token_ids=[1])
    (note,) = take_grammars(engine, description, EngineSettings(model=str(tmp_path)))
    assert note.startswith("no request can have a grammar")
    assert "tokenizer.json: can't determine decoder type" in capfd.readouterr().err
    assert not description.capabilities
    assert engine.guided is None
