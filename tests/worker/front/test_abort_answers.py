"""A worker answers an abort with the choice's timeline."""

import asyncio

from tests.router.virtual_time import virtual_time
from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import SequenceOutput, SessionHello, SessionRequest, Submit
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.front import Front
from trunkline_worker.front.session import REST_S, Session


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


@virtual_time
async def test_answers_to_aborts_that_follow_one_another_share_a_message() -> None:
    front = Front(MODEL, TOKENIZER, CacheMirror(1))
    front.connect(Link())
    session = Session(front, lambda: None)
    submits = [
        Submit(handle=handle, prompt_token_ids=PROMPT, sampling=SamplingParams(seed=1)) for handle in range(1, 6)
    ]
    await session.take(SessionRequest(submits=submits).SerializeToString())
    messages: list[list[int]] = []

    async def read() -> None:
        async for response in session.responses(1):
            messages.append([output.handle for output in response.outputs])

    reading = asyncio.create_task(read())
    await asyncio.sleep(2 * REST_S)
    for handle in range(1, 6):
        await asyncio.sleep(REST_S / 10)
        await session.take(SessionRequest(abort_handles=[handle]).SerializeToString())
    await asyncio.sleep(2 * REST_S)
    reading.cancel()
    session.close()
    assert messages == [[], [1], [2, 3, 4, 5]]
