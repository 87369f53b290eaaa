"""One request through a real router: what goes to the worker, what comes back to the client."""

import asyncio

import grpc
import pytest

from tests.router.cluster import cluster, refusal, router_before, until
from tests.router.fake_worker import FakeWorker
from tests.router.relay import Relay
from trunkline.status import INVALID_REQUEST, OVERLOADED, invalid
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds, TokenizeRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_router.request import client_buffer
from trunkline_router.request.client_buffer import Backlog, ClientBuffer
from trunkline_router.request.failover import FailoverLimits
from trunkline_runtime.channel import open_channel

PROMPT = list(range(10, 30))


async def test_the_first_response_describes_the_prompt_and_the_last_one_the_usage() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(PROMPT, request_id="r1", sampling=SamplingParams(seed=7))
        worker_side = await worker.arrived.get()
        worker_side.tokens(1)
        first = await call.read()
        worker_side.tokens(2, finish=True)
        last = await call.read()
        assert await call.read() is grpc.aio.EOF
    assert first.request_id == last.request_id == "r1"
    assert (first.prompt.model, first.prompt.worker_id, first.prompt.prompt_tokens) == ("tiny", "a", 20)
    assert first.prompt.seed == 7
    assert not first.HasField("usage")
    assert not last.HasField("prompt")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (20, 3)
    assert [c.first_token_index for r in (first, last) for c in r.chunks] == [0, 1]
    assert last.chunks[0].finish_reason == FinishReason.FINISH_REASON_LENGTH


async def test_text_is_tokenized_with_the_models_special_tokens() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        await router.answer("hi")
        tokens = (await router.stub.Tokenize(TokenizeRequest(text="hi"))).token_ids
        bare = (await router.stub.Tokenize(TokenizeRequest(text="hi", omit_special_tokens=True))).token_ids
    assert worker.submits[0].prompt_token_ids == tokens
    assert tokens == [1, *bare]


async def test_chat_is_rendered_and_its_special_tokens_are_not_added_twice() -> None:
    worker = FakeWorker("a")
    chat = ChatMessages(messages=[ChatMessage(role="user", content="hi")])
    async with cluster(worker) as router:
        call = router.stub.Generate(GenerateRequest(chat=chat))
        _ = [r async for r in call]
        tokens = (await router.stub.Tokenize(TokenizeRequest(chat=chat))).token_ids
        text = (await router.stub.Tokenize(TokenizeRequest(text="user:hi", omit_special_tokens=True))).token_ids
    assert worker.submits[0].prompt_token_ids == tokens
    assert list(tokens[: len(text) + 2]) == [1, *text, 2]


async def test_long_text_is_tokenized_like_short_text() -> None:
    worker = FakeWorker("a", context_length=20_000, kv_token_capacity=20_000)
    async with cluster(worker) as router:
        await router.answer("word " * 2000)
    assert len(worker.submits[0].prompt_token_ids) == 10_001


async def test_open_parameters_take_the_models_defaults_and_given_ones_stay() -> None:
    worker = FakeWorker("a", default_sampling=SamplingParams(temperature=0.6, top_p=0.9, top_k=20))
    async with cluster(worker) as router:
        responses = await router.answer(PROMPT, sampling=SamplingParams(temperature=0.0))
    sampling = worker.submits[0].sampling
    assert sampling.temperature == 0.0
    assert sampling.top_p == pytest.approx(0.9)
    assert sampling.top_k == 20
    assert sampling.HasField("seed")
    assert responses[0].prompt.seed == sampling.seed


async def test_every_choice_is_submitted_to_one_worker_with_one_seed_and_its_own_number() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    async with cluster(a, b) as router:
        responses = await router.answer(PROMPT, n=3)
    submits = a.submits + b.submits
    assert not (a.submits and b.submits)
    assert [submit.choice for submit in submits] == [0, 1, 2]
    assert len({submit.sampling.seed for submit in submits}) == 1
    assert responses[-1].usage.completion_tokens == 9
    assert sorted({chunk.index for response in responses for chunk in response.chunks}) == [0, 1, 2]


async def test_the_choices_of_a_request_that_fails_in_one_choice_are_all_ended() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(PROMPT, n=3)
        choices = [await worker.arrived.get() for _ in range(3)]
        choices[0].tokens(1)
        await call.read()
        choices[1].fail(invalid("sampling", "makes no sense after all"))
        refused = await refusal(call)
        await until(lambda: worker.num_running == 0)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, INVALID_REQUEST)
        assert sorted(submit.choice for submit in worker.aborted) == [0, 2]


async def test_a_request_id_is_minted_where_none_is_given() -> None:
    async with cluster(FakeWorker("a")) as router:
        one, two = await router.answer(PROMPT), await router.answer(PROMPT)
    assert len(one[0].request_id) >= 16
    assert one[0].request_id != two[0].request_id


async def test_a_client_that_cancels_frees_its_work_on_the_worker() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(PROMPT, n=2)
        choices = [await worker.arrived.get() for _ in range(2)]
        choices[0].tokens(1)
        await call.read()
        call.cancel()
        await until(lambda: worker.num_running == 0)
        assert len(worker.aborted) == 2


async def test_a_client_that_cancels_before_the_first_token_frees_its_work_too() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(PROMPT)
        await worker.arrived.get()
        call.cancel()
        await until(lambda: worker.num_running == 0)


async def test_a_client_whose_connection_breaks_frees_its_work_on_the_worker() -> None:
    worker = FakeWorker("a", answer=None)
    async with (
        cluster(worker) as router,
        Relay(router.port) as relay,
        open_channel(relay.address) as channel,
    ):
        call = InferenceServiceStub(channel).Generate(GenerateRequest(text="hello"))
        (await worker.arrived.get()).tokens(1)
        await call.read()
        relay.cut()
        await until(lambda: worker.num_running == 0)
        assert (await refusal(call)).code == grpc.StatusCode.UNAVAILABLE


async def test_a_deadline_is_handed_to_the_worker_and_ends_the_request() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(PROMPT, timeout_s=3.0)
        choice = await worker.arrived.get()
        assert 0 < choice.submit.timeout.ToNanoseconds() <= 3.1e9  # the transport rounds up
        assert (await refusal(call)).code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: worker.num_running == 0)


async def test_a_request_without_a_deadline_gives_the_worker_none() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        await router.answer(PROMPT, timeout_s=None)
    assert not worker.submits[0].HasField("timeout")


async def test_a_slow_client_holds_nobody_up_and_gets_everything_in_few_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_buffer, "MAX_WAITING_BYTES", 1 << 30)  # how much of it waits is the transport's choice
    worker = FakeWorker("a", answer=None, context_length=100_000, kv_token_capacity=100_000, vocab_size=100_000)
    async with cluster(worker) as router:
        slow = router.generate(PROMPT)
        mine = await worker.arrived.get()
        tokens, text = 4000, "y" * 4000  # 16 MB: more than the transport buffers
        for _ in range(tokens):
            mine.tokens(1, text=text)
        mine.tokens(1, finish=True, text="")
        fast = router.generate(PROMPT)
        other = await worker.arrived.get()
        other.tokens(2, finish=True)
        assert [r async for r in fast][-1].usage.completion_tokens == 2
        responses = [response async for response in slow]
    chunks = [chunk for response in responses for chunk in response.chunks]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(tokens + 1))
    assert "".join(chunk.text for chunk in chunks) == text * tokens
    assert len(responses) < tokens / 2
    assert responses[-1].usage.completion_tokens == tokens + 1


async def test_a_client_that_paused_and_sets_nothing_of_grpc_gets_everything() -> None:
    worker, backlog = (
        FakeWorker("a", answer=None, context_length=100_000, kv_token_capacity=100_000, vocab_size=100_000),
        Backlog(),
    )
    await worker.start()
    try:
        async with router_before(worker, backlog=backlog) as router:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                request = GenerateRequest(token_ids=TokenIds(ids=PROMPT))
                call = InferenceServiceStub(channel).Generate(request, timeout=60)
                mine = await worker.arrived.get()
                text, tokens = "y" * 100_000, 0
                while backlog.waiting_bytes < 4 << 20:  # what does not fit into the transport
                    mine.tokens(1, text=text)
                    tokens += 1
                    await asyncio.sleep(0.005)  # what is on its way must stay below what is cut off
                mine.tokens(1, finish=True, text="")
                responses = [response async for response in call]
            chunks = [chunk for response in responses for chunk in response.chunks]
            assert [token for chunk in chunks for token in chunk.token_ids] == list(range(tokens + 1))
            assert "".join(chunk.text for chunk in chunks) == text * tokens
            assert max(response.ByteSize() for response in responses) > 2 * len(text), "still in few"
    finally:
        await worker.die()


async def test_a_client_that_falls_too_far_behind_loses_its_request_at_once_and_others_nothing() -> None:
    worker = FakeWorker("a", answer=None, context_length=100_000, kv_token_capacity=100_000, vocab_size=100_000)
    async with cluster(worker) as router:
        slow = router.generate(PROMPT)
        mine = await worker.arrived.get()
        fast = router.generate([*PROMPT, 1])
        other = await worker.arrived.get()
        other.tokens(1)
        await fast.read()
        while worker.num_running == 2:  # no client reads: it ends without that
            mine.tokens(1, text="y" * 100_000)
            await asyncio.sleep(0)
        assert [submit.handle for submit in worker.aborted] == [mine.submit.handle]
        assert router.connected(0).open_choices == 1, "the worker is free of it, and is chosen as such"
        other.tokens(2, finish=True)
        assert (await fast.read()).usage.completion_tokens == 3
        assert await fast.read() is grpc.aio.EOF
        refused = await refusal(slow)
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, OVERLOADED)
        assert "reads too slowly" in refused.message
    assert len(worker.submits) == 2, "another worker would not help"


class NotedBacklog(Backlog):
    """Notes how much waited at once, and how much would have if nothing had ended."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.most_bytes = self.most_wanted_bytes = 0

    def grow(self, waiting: ClientBuffer, more_bytes: int) -> None:
        self.most_wanted_bytes = max(self.most_wanted_bytes, self.waiting_bytes + more_bytes)
        super().grow(waiting, more_bytes)
        self.most_bytes = max(self.most_bytes, self.waiting_bytes)


async def test_many_slow_clients_together_are_bounded_and_the_one_furthest_behind_goes_first() -> None:
    worker = FakeWorker("a", answer=None, context_length=100_000, kv_token_capacity=100_000, vocab_size=100_000)
    backlog = NotedBacklog(max_bytes := 4 << 20)
    await worker.start()
    try:
        async with router_before(worker, backlog=backlog) as router:
            calls = [router.generate([*PROMPT, number], timeout_s=60) for number in range(5)]
            choices = [await worker.arrived.get() for _ in calls]
            first = next(choice for choice in choices if choice.submit.prompt_token_ids[-1] == 0)
            while not backlog.waiting_bytes:  # until the transport takes no more
                first.tokens(1, text="y" * 100_000)
                await asyncio.sleep(0.001)
            while worker.num_running == len(calls):  # none of them comes to 8 MiB
                for choice in choices:
                    # None of the others is ever as far behind, however much the transport takes from the first.
                    choice.tokens(1, text="y" * (50_000 if choice is first else 5_000))
                await asyncio.sleep(0.001)
            assert backlog.most_bytes <= max_bytes < backlog.most_wanted_bytes
            assert [submit.handle for submit in worker.aborted] == [first.submit.handle]
            refused = await refusal(calls[0])
            assert (refused.reason, "for all clients" in refused.message) == (OVERLOADED, True)
            for call in calls[1:]:
                call.cancel()
            await until(lambda: worker.num_running == 0)
            await until(lambda: backlog.waiting_bytes == 0)
    finally:
        await worker.die()


async def test_a_slow_client_that_gives_up_frees_its_work_on_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    worker = FakeWorker("a", answer=None, context_length=100_000, kv_token_capacity=100_000, vocab_size=100_000)
    async with cluster(worker) as router:
        slow = router.generate(PROMPT)
        mine = await worker.arrived.get()
        for _ in range(1000):
            mine.tokens(1, text="y" * 8000)
            await asyncio.sleep(0)
        await until(lambda: router.connected(0).session.num_open == 1)
        slow.cancel()
        await until(lambda: worker.num_running == 0)
    assert not caplog.records, "the request's generator was closed in another context than its own"


async def test_without_failover_a_worker_that_dies_ends_its_streams_at_once_with_unavailable() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker, failover=FailoverLimits(max_resumptions=0)) as router:
        call = router.generate(PROMPT)
        (await worker.arrived.get()).tokens(1)
        await call.read()
        await worker.die()
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        assert refused.retry_s is not None


async def test_many_requests_at_once_share_the_session_and_keep_their_outputs_apart() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        calls = [router.generate([*PROMPT, number], request_id=f"r{number}") for number in range(50)]
        by_id = {}
        for _ in calls:
            choice = await worker.arrived.get()
            by_id[choice.submit.request_id] = choice
        for number in range(50):
            by_id[f"r{number}"].tokens(number + 1, finish=True)
        totals = [[r async for r in call][-1].usage.completion_tokens for call in calls]
    assert totals == [number + 1 for number in range(50)]
