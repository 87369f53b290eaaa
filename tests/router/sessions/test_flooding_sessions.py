"""A worker that fills its session with what says nothing is left after a few hundred pieces of it, and an honest worker
never is."""

import asyncio
from random import Random

import pytest

from tests.parameters import one_in
from trunkline.status import no_worker
from trunkline.v1.generation_pb2 import OutputChunk, SamplingParams
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, SessionResponse, SessionWelcome, Submit
from trunkline_router.workers.claims import FalseClaim
from trunkline_router.workers.session import MAX_OTHER_BYTES, PART_BYTES, WorkerSession, split_response
from trunkline_router.workers.session_outputs import IDLE_PER_HANDLE
from trunkline_runtime.wire import fields

MESSAGE_BYTES = 8 << 20
MAX_TOKENS = 6
ENDED, OPEN, GRANTED = 1, 2, 3  # handles
FEW_TURNS = 4 * 3 * IDLE_PER_HANDLE


def output(handle: int, *token_ids: int, finish: int = 0) -> SequenceOutput:
    chunk = OutputChunk(token_ids=token_ids, finish_reason=finish)  # type: ignore[arg-type]
    return SequenceOutput(handle=handle, chunk=chunk)


def of(*outputs: SequenceOutput) -> bytes:
    return SessionResponse(outputs=outputs).SerializeToString()


UNKNOWN: dict[str, bytes] = {
    "an unknown number": b"\x78\x00",
    "an unknown number, its tag drawn out": b"\xf8\x80\x00\x00",
    "unknown bytes": b"\x7a\x00",
    "a welcome": b"\x0a\x00",
    "a number in place of an output": b"\x10\x00",
}
FLOODS: dict[str, bytes] = {
    "an output, its tag drawn out": b"\x92\x00\x00",
    "an empty output": b"\x12\x00",
    "an output of a choice that has ended": of(output(ENDED)),
    "a token of a choice that has ended": of(output(ENDED, 1)),
    "an end of a choice that has ended": of(output(ENDED, 1, finish=2)),
    "an error of a choice that has ended": of(SequenceOutput(handle=ENDED, error=no_worker("it drains").to_proto())),
    "an output without a token": of(output(OPEN)),
    "an output that an older router cannot read": of(SequenceOutput(handle=OPEN)),
    "a text without a token": of(SequenceOutput(handle=OPEN, chunk=OutputChunk(text="x"))),
    "a report of a grant": of(SequenceOutput(handle=GRANTED, granted=GrantReport())),
    "a large output of a choice that has ended": of(
        SequenceOutput(handle=ENDED, chunk=OutputChunk(text="x" * 2 * PART_BYTES))
    ),
}


def session_with_one_of_each() -> WorkerSession:
    session = WorkerSession(vocab_size=10)
    submits = [Submit(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=MAX_TOKENS)) for _ in range(3)]
    session.submit(submits[:2], [bool] * 2)
    session.grant(submits[2:], lambda handle, report: None)
    session.outputs.hand_out(output(ENDED, 1, finish=2))
    return session


async def heard(session: WorkerSession, raw: bytes) -> int:
    """Returns in how many turns of the event loop."""
    turns = 0
    task = asyncio.create_task(session.receive(raw, lambda welcome: None))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    task.result()
    return turns


async def heard_until_it_is_left(unit: bytes, message_bytes: int) -> None:
    raw = unit * max(1, message_bytes // len(unit))
    session, turns = session_with_one_of_each(), 0
    while turns < FEW_TURNS:
        turns += await heard(session, raw)


@pytest.mark.parametrize("unit", UNKNOWN.values(), ids=UNKNOWN)
async def test_a_worker_that_sends_what_no_worker_would_is_left_before_much_of_it_is_looked_at(unit: bytes) -> None:
    with pytest.raises(FalseClaim):
        await heard_until_it_is_left(unit, MESSAGE_BYTES)


@pytest.mark.parametrize("message_bytes", [MESSAGE_BYTES, PART_BYTES // 2], ids=["in one message", "in many"])
@pytest.mark.parametrize("unit", FLOODS.values(), ids=FLOODS)
async def test_a_worker_whose_outputs_say_nothing_is_left_before_many_are_taken(
    unit: bytes, message_bytes: int
) -> None:
    with pytest.raises(FalseClaim):
        await heard_until_it_is_left(unit, message_bytes)


async def test_what_a_newer_worker_adds_to_a_long_message_is_passed_over() -> None:
    session = session_with_one_of_each()
    added = b"\x7a\x02ab" * (MAX_OTHER_BYTES // 8)
    known = of(*[output(OPEN)] * IDLE_PER_HANDLE)
    large = of(SequenceOutput(handle=OPEN, chunk=OutputChunk(token_ids=[1], text="x" * 1000)))
    await heard(session, SessionResponse(welcome=SessionWelcome()).SerializeToString() + added + known + large)
    assert session.outputs.open[OPEN].left_tokens == MAX_TOKENS - 1


@pytest.mark.parametrize("most_fields", [1, 7, 1000])
@pytest.mark.parametrize("most_bytes", [1, 50, 4000])
def test_a_response_in_parts_is_the_same_response_and_each_part_is_small(most_bytes: int, most_fields: int) -> None:
    draw = Random(most_bytes + most_fields)
    for _ in range(30):
        outputs = [output(1 << draw.randrange(60), *[5] * draw.choice([0, 1, 3, 90])) for _ in range(300)]
        raw = of(*outputs) + b"\x78\x01" * draw.randrange(20)
        parts = list(split_response(raw, most_bytes, most_fields))
        assert b"".join(parts) == raw
        for part in parts:
            count = len(list(fields(part)))
            assert count <= most_fields
            assert len(part) <= most_bytes or count == 1


@pytest.mark.parametrize("seed", one_in(4, range(20)))
async def test_a_worker_that_hears_late_of_every_abort_is_never_left(seed: int) -> None:
    """Its outputs come in a message for each step, or, after a while, in one for many. Each choice ends, or is aborted
    and told of until its last token."""
    draw = Random(seed)
    session = WorkerSession(vocab_size=10)
    left: dict[int, int] = {}  # tokens, of what the worker computes
    late: list[SequenceOutput] = []
    num_late = 0
    for _ in range(200):
        submits = [
            Submit(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=draw.randrange(1, 200)))
            for _ in range(draw.randrange(4))
        ]
        handles = session.submit(submits, [bool] * len(submits))
        left |= {handle: submit.sampling.max_tokens for handle, submit in zip(handles, submits, strict=True)}
        grants = session.grant([Submit(sampling=SamplingParams(max_tokens=5))] * 2, lambda handle, report: None)
        session.forget(grants[: draw.randrange(3)])
        for handle in grants:
            late += [SequenceOutput(handle=handle, granted=GrantReport(ended=ended)) for ended in (False, True)]
        for handle in list(left):
            left[handle] -= 1
            is_last = not left[handle] or draw.random() < 0.01
            late.append(output(handle, 1, finish=2 if is_last else 0))
            num_late += handle not in session.outputs.open
            if is_last:
                del left[handle]
        if draw.random() < 0.2:
            await heard(session, of(*late))
            late.clear()
        session.abort(draw.sample(list(session.outputs.open), k=len(session.outputs.open) // 3))
        if draw.random() < 0.02:
            session.give_up("the engine stands still")
    assert num_late > 1000
