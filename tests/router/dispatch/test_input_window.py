"""How many inputs of a call are at its worker, or answered and not read by its client."""

from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from trunkline.ledger import AnswerLedger
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.worker_pb2 import Capability, OutputKind, PoolingModel, Task, Work
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.input_window import GROWS_AFTER, MOST_AT_WORKER, SENT_SHARE, InputWindow
from trunkline_router.request.inputs import Inputs
from trunkline_router.request.request_call import Extras, RequestCall

SENT_AT_ONCE = int(SENT_SHARE * MOST_AT_WORKER)


async def test_answers_that_a_client_does_not_read_hold_back_the_inputs_after_them() -> None:
    worker = FakeWorker(
        "a",
        task=Task.TASK_EMBED,
        capabilities=[Capability.CAPABILITY_VECTORS],
        pooling=PoolingModel(dimensions=2),
    )
    inputs = Inputs([[1, index % 9] for index in range(4 * MOST_AT_WORKER)])
    extras = Extras(work=Work(output=OutputKind.OUTPUT_KIND_VECTOR), inputs=inputs)
    async with cluster(worker) as router:
        caller = router.service._access.caller(())
        call = RequestCall(GenerateRequest(), RequestRecord("r"), caller, (), lambda: None, extras)
        responses = router.inference.generate(call)
        await anext(responses)
        session = router.connected(0).session
        for num_read in range(2, SENT_AT_ONCE):
            await until(lambda: not session.num_open)
            await anext(responses)
            assert len(worker.submits) == MOST_AT_WORKER, num_read
        await anext(responses)
        await until(lambda: len(worker.submits) == MOST_AT_WORKER + SENT_AT_ONCE)
        assert len([response async for response in responses]) == len(inputs.given) - SENT_AT_ONCE


def test_every_input_is_sent_however_the_client_reads() -> None:
    answer, window = AnswerLedger(5 * MOST_AT_WORKER), InputWindow()
    sent = window.begin(list(answer.unfinished()), 0, one_by_one=False)
    for num_untaken in (MOST_AT_WORKER - 1, 1, 0, 0, 0, 0):
        num_unfinished = answer.num_unfinished - len(sent)
        more = window.next(num_unfinished, num_untaken=num_untaken, one_by_one=False)
        assert len(more) == (
            0 if num_untaken == MOST_AT_WORKER - 1 else min(num_unfinished, MOST_AT_WORKER - num_untaken)
        )
        sent += more
    assert [index for index, _ in sent] == list(range(5 * MOST_AT_WORKER))


def test_the_window_grows_again_after_a_full_worker_and_after_a_small_one() -> None:
    choices = list(AnswerLedger(9 * MOST_AT_WORKER).unfinished())
    window = InputWindow()
    assert len(window.begin(choices, 8, one_by_one=False)) == 4, "half of the places"
    assert len(window.begin(choices, 0, one_by_one=False)) == MOST_AT_WORKER
    window.was_refused()
    window.was_refused()
    left, sizes = len(choices), [len(window.begin(choices, 0, one_by_one=False))]
    for _ in range(2 * GROWS_AFTER + 1):
        left -= sizes[-1]
        sizes.append(len(window.next(left, one_by_one=False)))
    assert [MOST_AT_WORKER // size for size in sizes] == [*[4] * (GROWS_AFTER + 1), *[2] * GROWS_AFTER, 1]
