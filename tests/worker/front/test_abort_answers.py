"""A worker answers an abort with the choice's timeline."""

from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import SequenceOutput, SessionHello, SessionRequest, Submit
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.front import Front
from trunkline_worker.front.session import Session


async def answers(*aborts: int) -> list[SequenceOutput]:
    """What a session has to say after two submits and these aborts."""
    front = Front(MODEL, TOKENIZER, CacheMirror(1))
    front.connect(Link())
    session = Session(front, lambda: None)
    submits = [Submit(handle=h, prompt_token_ids=PROMPT, sampling=SamplingParams(seed=1)) for h in (7, 8)]
    hello = SessionHello(router_id="r")
    await session.take(SessionRequest(hello=hello, submits=submits).SerializeToString())
    await session.take(SessionRequest(abort_handles=aborts).SerializeToString())
    said = [output for output, _ in session._outbox._waiting]
    session.close()
    assert front.num_choices == 0
    return said


async def test_an_abort_is_answered_with_the_timeline_and_nothing_else() -> None:
    (output,) = await answers(8, 8, 99)
    assert output.handle == 8
    assert [field.name for field, _ in output.ListFields()] == ["handle", "timeline"]
    assert output.timeline.ended_s >= 0.0
    assert output.timeline.received.seconds
    assert not output.timeline.HasField("admitted_s")
