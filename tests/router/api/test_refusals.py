"""Every row of the error table that a router can produce, as a client sees it."""

import asyncio
import math

import grpc
import pytest

from tests.router.cluster import cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.http.http_rig import connected_to, error_of, post
from tests.router.tokenizer_files import VOCAB_SIZE, tokenizer_files
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    ListModelsRequest,
    TokenIds,
    TokenizeRequest,
)
from trunkline_router.edge.http_call import Edge
from trunkline_router.prompts.tokenizer import PromptTokenizer

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CHAT = ChatMessages(messages=[ChatMessage(role="user", content="hi")])


def ids(*token_ids: int) -> TokenIds:
    return TokenIds(ids=token_ids)


BAD_REQUESTS = {
    "no prompt": (GenerateRequest(), "prompt"),
    "no tokens": (GenerateRequest(token_ids=ids()), "token_ids"),
    "negative token": (GenerateRequest(token_ids=ids(5, -1)), "token_ids"),
    "token beyond the vocabulary": (GenerateRequest(token_ids=ids(VOCAB_SIZE)), "token_ids"),
    "no messages": (GenerateRequest(chat=ChatMessages()), "chat"),
    "a role the template refuses": (
        GenerateRequest(chat=ChatMessages(messages=[ChatMessage(role="owl", content="hoo")])),
        "chat",
    ),
    "no choice": (GenerateRequest(text="x", n=0), "n"),
    "too many choices": (GenerateRequest(text="x", n=1_000_000), "n"),
    "NaN temperature": (
        GenerateRequest(text="x", sampling=SamplingParams(temperature=math.nan)),
        "sampling.temperature",
    ),
    "top_p of zero": (GenerateRequest(text="x", sampling=SamplingParams(top_p=0.0)), "sampling.top_p"),
    "no output wanted": (GenerateRequest(text="x", sampling=SamplingParams(max_tokens=0)), "sampling.max_tokens"),
    "too many logprobs": (GenerateRequest(text="x", sampling=SamplingParams(logprobs=21)), "sampling.logprobs"),
    "empty stop string": (GenerateRequest(text="x", sampling=SamplingParams(stop=[""])), "sampling.stop"),
    "stop token beyond the vocabulary": (
        GenerateRequest(text="x", sampling=SamplingParams(stop_token_ids=[VOCAB_SIZE])),
        "sampling.stop_token_ids",
    ),
    "bias of no token": (
        GenerateRequest(text="x", sampling=SamplingParams(logit_bias={-1: 1.0})),
        "sampling.logit_bias",
    ),
    "request id too long": (GenerateRequest(text="x", request_id="r" * 129), "request_id"),
    "request id with a line break": (GenerateRequest(text="x", request_id="a\nb"), "request_id"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_field_is_named_and_no_worker_hears_of_it(name: str) -> None:
    request, field = BAD_REQUESTS[name]
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        refused = await refusal(router.stub.Generate(request))
    assert (refused.code, refused.reason, refused.field) == (INVALID, "INVALID_REQUEST", field)
    assert refused.message.startswith(field)
    assert "\n" not in refused.message
    assert not worker.submits


async def test_a_prompt_over_the_context_is_refused_with_the_numbers() -> None:
    async with cluster(FakeWorker("a", context_length=100)) as router:
        refused = await refusal(router.generate([5] * 100))
        exact = await router.answer([5] * 99)
    assert (refused.code, refused.reason) == (INVALID, "CONTEXT_LENGTH_EXCEEDED")
    assert refused.message.count("100") == 2
    assert exact[-1].HasField("usage")


async def test_prompt_and_max_tokens_over_the_context_are_refused_with_the_numbers() -> None:
    async with cluster(FakeWorker("a", context_length=100)) as router:
        refused = await refusal(router.generate([5] * 60, sampling=SamplingParams(max_tokens=41)))
        exact = await router.answer([5] * 60, sampling=SamplingParams(max_tokens=40))
    assert refused.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert all(number in refused.message for number in ("60", "41", "100"))
    assert exact[-1].HasField("usage")


async def test_a_prompt_over_what_the_kv_pool_can_ever_hold_is_refused_with_the_numbers() -> None:
    async with cluster(FakeWorker("a", kv_token_capacity=64)) as router:
        refused = await refusal(router.generate([5] * 64))
    assert refused.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "KV" in refused.message
    assert "64" in refused.message


async def test_an_unknown_model_is_not_found_and_the_served_ones_are_named() -> None:
    async with cluster(FakeWorker("a")) as router:
        for call in (
            router.stub.Generate(GenerateRequest(text="x", model="huge")),
            router.stub.Tokenize(TokenizeRequest(text="x", model="huge")),
            router.stub.Detokenize(DetokenizeRequest(token_ids=[5], model="huge")),
        ):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
            assert "tiny" in refused.message


async def test_an_empty_model_name_is_enough_where_one_model_is_served_only() -> None:
    async with cluster(FakeWorker("a"), FakeWorker("b", model="other")) as router:
        refused = await refusal(router.generate("x"))
        named = await router.answer("x", model="other")
        models = (await router.stub.ListModels(ListModelsRequest())).models
    assert refused.reason == "MODEL_NOT_FOUND"
    assert "other, tiny" in refused.message
    assert named[0].prompt.worker_id == "b"
    assert [(model.name, model.ready_workers) for model in models] == [("other", 1), ("tiny", 1)]


async def test_without_a_ready_worker_a_request_is_told_to_come_back() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        await worker.die()
        await router.until_workers(False)
        refused = await refusal(router.generate("x", model="tiny"))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
        assert refused.retry_s
        assert not (await router.stub.ListModels(ListModelsRequest())).models


async def test_chat_needs_a_chat_template() -> None:
    async with cluster(FakeWorker("a", files=tokenizer_files(chat_template=None))) as router:
        for call in (
            router.stub.Generate(GenerateRequest(chat=CHAT)),
            router.stub.Tokenize(TokenizeRequest(chat=CHAT)),
        ):
            refused = await refusal(call)
            assert (refused.code, refused.reason, refused.field) == (INVALID, "INVALID_REQUEST", "chat")
        models = (await router.stub.ListModels(ListModelsRequest())).models
    assert not models[0].has_chat_template


async def test_tokenize_needs_an_input_and_detokenize_tokens_of_the_vocabulary() -> None:
    async with cluster(FakeWorker("a")) as router:
        nothing = await refusal(router.stub.Tokenize(TokenizeRequest()))
        beyond = await refusal(router.stub.Detokenize(DetokenizeRequest(token_ids=[1, VOCAB_SIZE])))
    assert (nothing.reason, nothing.field) == ("INVALID_REQUEST", "input")
    assert (beyond.reason, beyond.field) == ("INVALID_REQUEST", "token_ids")


async def test_tokens_of_text_turn_back_into_the_text() -> None:
    async with cluster(FakeWorker("a")) as router:
        tokens = (await router.stub.Tokenize(TokenizeRequest(text="Grüße, 🦊"))).token_ids
        plain = (await router.stub.Detokenize(DetokenizeRequest(token_ids=tokens))).text
        kept = (await router.stub.Detokenize(DetokenizeRequest(token_ids=tokens, keep_special_tokens=True))).text
    assert (plain, kept) == ("Grüße, 🦊", "<s>Grüße, 🦊")


async def test_a_deadline_that_has_passed_already_costs_no_worker_anything() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        assert (await refusal(router.generate("x", timeout_s=0.0))).code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: worker.num_running == 0)


async def test_a_bug_is_told_with_the_request_id_and_nothing_else_by_both_fronts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(self: PromptTokenizer, text: str, **how: object) -> list[int]:
        raise KeyError("secret detail")

    monkeypatch.setattr(PromptTokenizer, "encode", broken)
    async with cluster(FakeWorker("a"), edge=Edge) as router, connected_to(router.http_port) as client:
        refused = await refusal(router.generate("x", request_id="r-17"))
        body = b'{"model": "tiny", "prompt": "x"}'
        client.send(post(body, "Content-Type: application/json", "X-Request-Id: r-17", path="/v1/completions"))
        status, _, told = await client.response()
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert (status, error_of(told)["message"]) == (500, refused.message)
    assert "r-17" in refused.message
    assert "secret" not in refused.message
    assert "secret detail" in "".join(capsys.readouterr()), "the log has it"


async def test_a_refused_request_disturbs_nobody_else() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        running = router.generate("hello")
        choice = await worker.arrived.get()
        await asyncio.gather(*(refusal(router.stub.Generate(request)) for request, _ in BAD_REQUESTS.values()))
        choice.tokens(2, finish=True)
        assert [r async for r in running][-1].usage.completion_tokens == 2
