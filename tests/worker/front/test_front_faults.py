"""An exception that one choice's text, stop strings or reader raises ends that choice, and nothing else."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link, Reader
from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineStep
from trunkline.status import CODE_INTERNAL, INTERNAL, OVERLOADED, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams
from trunkline.v1.worker_pb2 import SequenceOutput, SessionRequest, Submit
from trunkline_worker.front import session as outbox_module
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.choice import Choice
from trunkline_worker.front.front import Front
from trunkline_worker.front.session import Outbox, Session

OUTPUT = TOKENIZER.encode(" a time there was a fox", add_special_tokens=False).ids
TEXT = " a time there was a fox"
LENGTH = FinishReason.FINISH_REASON_LENGTH


@pytest.fixture
def front() -> Front:
    front = Front(MODEL, TOKENIZER, CacheMirror(1))
    front.connect(Link())
    return front


def link_of(front: Front) -> Link:
    assert isinstance(front._link, Link)
    return front._link


def submit(front: Front, reader: Callable[[SequenceOutput], None], handle: int = 1) -> Choice:
    sampling = SamplingParams(seed=1, stop=["never said"])
    request = Submit(handle=handle, request_id=f"request-{handle}", prompt_token_ids=PROMPT, sampling=sampling)
    choice = front.submit(request, reader)
    assert choice is not None
    return choice


def steps(choices: list[Choice]) -> Iterator[EngineStep]:
    """A token each, of those that the engine still has; the last one with the engine's finish."""
    handles = [choice.handle for choice in choices]
    for token_id in OUTPUT[:-1]:
        yield EngineStep(token_handles=handles, token_ids=[token_id] * len(handles), last_handle=max(handles))
    yield EngineStep(
        outputs=[EngineOutput(handle=handle, token_ids=OUTPUT[-1:], finish_reason=LENGTH) for handle in handles]
    )


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


COMPUTATIONS: dict[str, Callable[[Choice], tuple[Any, str]]] = {
    "detokenizer": lambda choice: (choice.stream._detokenizer, "push"),
    "what was held back": lambda choice: (choice.stream._detokenizer, "flush"),
    "stop search": lambda choice: (choice.stream._stops, "push"),
    "everything": lambda choice: (choice.stream, "take"),
}


@pytest.mark.parametrize("at_step", [0, 1, len(OUTPUT) - 1])
@pytest.mark.parametrize("name", COMPUTATIONS)
async def test_a_computation_that_raises_ends_its_own_choice_alone(
    front: Front, name: str, at_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = [Reader() for _ in range(3)]
    choices = [submit(front, reader, handle) for handle, reader in enumerate(readers, start=1)]
    for index, step in enumerate(steps(choices)):
        if index == at_step:
            owner, method = COMPUTATIONS[name](choices[1])
            monkeypatch.setattr(type(owner), method, raising_for(owner, getattr(type(owner), method)))
        front.on_step(step)
    assert [readers[0].text, readers[2].text] == [TEXT, TEXT]
    assert readers[1].reasons == [INTERNAL]
    assert [reader.num_ends for reader in readers] == [1, 1, 1]
    assert link_of(front).aborted == [choices[1].handle]
    assert front.num_choices == 0
    assert (await front.drain(1.0)).aborted == 0


def raising_for(owner: object, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **named: broken() if self is owner else method(self, *args, **named)


READERS: dict[str, Callable[[SequenceOutput], bool]] = {
    "at once": lambda output: not output.HasField("error"),
    "at a middle output": lambda output: output.chunk.first_token_index == 2,
    "at the last output": lambda output: bool(output.chunk.finish_reason),
    "always": lambda output: True,
    "at errors": lambda output: output.HasField("error"),
}


@pytest.mark.parametrize("name", READERS)
async def test_a_reader_that_raises_loses_its_own_choice_alone(front: Front, name: str) -> None:
    readers = [Reader(), Reader(fails=READERS[name]), Reader()]
    choices = [submit(front, reader, handle) for handle, reader in enumerate(readers, start=1)]
    for step in steps(choices):
        front.on_step(step)
    assert [readers[0].text, readers[2].text] == [TEXT, TEXT]
    assert readers[1].reasons == ([INTERNAL] if name not in ("always", "at errors") else [])
    assert front.num_choices == 0


@pytest.mark.parametrize("ending", ["the engine's death", "a drain", "a deadline"])
async def test_a_reader_that_raises_when_all_end_leaves_none_without_its_end(front: Front, ending: str) -> None:
    readers = [Reader(), Reader(fails=READERS["always"]), Reader()]
    choices = [submit(front, reader, handle) for handle, reader in enumerate(readers, start=1)]
    if ending == "the engine's death":
        front.on_engine_death("a test")
    elif ending == "a drain":
        assert (await front.drain(0.0)).aborted == 3
    else:
        for choice in choices:
            front._break_off(choice, RequestRefused(CODE_INTERNAL, "DEADLINE_EXCEEDED", "late"))
    assert [len(reader.reasons) for reader in readers] == [1, 0, 1]
    assert front.num_choices == 0


@pytest.mark.parametrize("at_step", range(len(OUTPUT)))
async def test_a_direct_call_that_is_given_up_at_any_output_leaves_the_engine_s_reader_alive(
    front: Front, at_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the last one: the choice is cancelled while its end is told."""
    given_up: list[Choice] = []

    def give_up() -> None:
        given_up.append(direct)
        front.cancel(direct)

    outbox, other = Outbox(give_up), Reader()
    direct = submit(front, outbox.put)
    choices = [direct, submit(front, other, 2)]
    for index, step in enumerate(steps(choices)):
        monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 1 if index == at_step else 1 << 20)
        if index == 0:  # one output may always wait
            outbox.put(SequenceOutput(handle=1))
        front.on_step(step)
    assert given_up == [direct]
    assert other.text == TEXT
    assert front.num_choices == 0
    with pytest.raises(RequestRefused) as caught:
        await outbox.take()
    assert caught.value.reason == OVERLOADED


async def test_a_session_that_is_given_up_while_its_choices_end_leaves_the_others_alone(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at_step in range(len(OUTPUT)):
        stalled: list[bool] = []
        slow = Session(front, on_stalled=partial(stalled.append, True))
        request = SessionRequest()
        for handle in range(1, 4):
            request.submits.add(handle=handle, prompt_token_ids=PROMPT, sampling=SamplingParams(seed=1))
        await slow.take(request.SerializeToString())
        other = Reader()
        submit(front, other, 9)
        for index, step in enumerate(steps(list(front._choices.values()))):
            monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 1 if index == at_step else 1 << 20)
            front.on_step(step)
        assert stalled == [True]
        assert other.text == TEXT
        assert front.num_choices == 0


async def test_a_submit_that_cannot_be_handed_on_leaves_nothing_behind(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", broken)
    request = Submit(handle=1, request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(seed=1))
    request.timeout.FromSeconds(5)
    with pytest.raises(RuntimeError):
        front.submit(request, Reader())
    monkeypatch.undo()
    assert front.num_choices == 0
    assert (await front.drain(1.0)).aborted == 0
