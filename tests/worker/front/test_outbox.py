"""What waits for a slow router leaves in messages that it can receive."""

import pytest

from trunkline.v1.worker_pb2 import SequenceOutput
from trunkline_worker import session
from trunkline_worker.session import Outbox


async def test_messages_are_cut_by_bytes_in_order_and_a_large_output_goes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "MAX_RESPONSE_BYTES", 1000)
    outbox = Outbox()
    sizes = [100, 5000, 300, 300, 300, 300, 10]
    for handle, size in enumerate(sizes, start=1):
        output = SequenceOutput(handle=handle)
        output.chunk.text = "x" * size
        outbox.put(output)
    taken = [await outbox.take() for _ in range(4)]
    assert [[output.handle for output in part] for part in taken] == [[1], [2], [3, 4, 5], [6, 7]]
