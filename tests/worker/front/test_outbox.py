"""What waits for a slow router leaves in messages that it can receive."""

import pytest

from trunkline.status import RequestRefused
from trunkline.v1.worker_pb2 import SequenceOutput
from trunkline_worker.front import session as outbox_module
from trunkline_worker.front.session import OUTPUT_BYTES, Outbox


async def test_messages_are_cut_by_bytes_in_order_and_a_large_output_goes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_RESPONSE_BYTES", 1000 + 4 * OUTPUT_BYTES)
    outbox = Outbox(lambda: None)
    sizes = [100, 5000, 300, 300, 300, 300, 10]
    for handle, size in enumerate(sizes, start=1):
        output = SequenceOutput(handle=handle)
        output.chunk.text = "x" * size
        outbox.put(output)
    taken = [await outbox.take() for _ in range(4)]
    assert [[output.handle for output in part] for part in taken] == [[1], [2], [3, 4, 5], [6, 7]]


async def test_a_reader_for_whom_too_much_waits_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 1000 + 3 * OUTPUT_BYTES)
    given_up: list[bool] = []
    outbox = Outbox(lambda: given_up.append(True))
    for handle in range(1, 6):
        output = SequenceOutput(handle=handle)
        output.chunk.text = "x" * 400
        outbox.put(output)
        assert bool(given_up) == (handle >= 3)
    assert len(given_up) == 1
    with pytest.raises(RequestRefused, match="the output is read too slowly"):
        await outbox.take()


async def test_one_output_may_be_larger_than_what_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_BYTES", 1000 + 3 * OUTPUT_BYTES)
    outbox = Outbox(lambda: pytest.fail("given up"))
    output = SequenceOutput(handle=1)
    output.chunk.text = "x" * 4000
    outbox.put(output)
    assert [taken.handle for taken in await outbox.take()] == [1]
