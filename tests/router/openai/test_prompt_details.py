"""An answer with details of its prompt costs one tokenization, like any other: within quotas, within the request's
span, and only as long as its client waits."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.router.cluster import refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, OpenAiClient, client
from trunkline.names import TENANT_KEY
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.quotas.quota import Quotas

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
DETAILED: dict[str, tuple[str, dict[str, Any]]] = {
    "token ids": (COMPLETIONS, {"prompt": "hi", "return_token_ids": True}),
    "scored echo": (COMPLETIONS, {"prompt": "hi", "echo": True, "logprobs": 1}),
    "prompt_logprobs": (COMPLETIONS, {"prompt": "hi", "prompt_logprobs": 1}),
    "logprobs": (COMPLETIONS, {"prompt": "hi", "logprobs": 1}),
    "no special tokens": (COMPLETIONS, {"prompt": "hi", "add_special_tokens": False}),
    "chat's token ids": (CHATS, {"messages": CHAT, "return_token_ids": True}),
    "chat's prompt_logprobs": (CHATS, {"messages": CHAT, "prompt_logprobs": 1}),
    "chat's logprobs": (CHATS, {"messages": CHAT, "logprobs": True}),
}


def tokenizer_of(asks: OpenAiClient) -> PromptTokenizer:
    return asks.router.inference.pools.models()["tiny"].tokenizer


@contextmanager
def counted(tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts that are encoded meanwhile."""
    encode, texts = tokenizer.encode, []

    async def counting(text: str, **how: Any) -> Any:
        texts.append(text)
        return await encode(text, **how)

    with monkeypatch.context() as patched:
        patched.setattr(tokenizer, "encode", counting)
        yield texts


@pytest.mark.parametrize("name", DETAILED)
async def test_a_prompt_is_tokenized_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = DETAILED[name]
    async with client(FakeWorker("w", answer=1)) as asks:
        with counted(tokenizer_of(asks), monkeypatch) as texts:
            await asks.answer(path, **body)
            assert len(texts) == 1
            await asks.all_events(path, **body)
            assert len(texts) == 2


@pytest.mark.parametrize(
    "quotas",
    [
        Quotas(requests_per_minute=1),
        Quotas(tokens_per_minute=64),
    ],
    ids=["requests", "tokens"],
)
async def test_a_tenant_whose_quota_is_used_up_has_nothing_tokenized(
    quotas: Quotas, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, tenants=Tenants({"acme": Tenant(quotas=quotas)})) as asks:
        first = asyncio.create_task(
            asks.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 40, "max_tokens": 23}, x_trunkline_tenant="acme")
        )
        choice = await worker.arrived.get()
        with counted(tokenizer_of(asks), monkeypatch) as texts:
            for path, body in DETAILED.values():
                refused = await asks.post(path, {"model": "tiny", **body}, x_trunkline_tenant="acme")
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
                assert 1 <= int(refused.headers["retry-after"]) <= 61
            over_grpc = await refusal(
                asks.router.stub.Generate(GenerateRequest(text="hi"), metadata=[(TENANT_KEY, "acme")])
            )
            assert over_grpc.reason == "QUOTA_EXCEEDED"
            assert not texts
        choice.tokens(23, finish=True)
        assert (await first).status_code == 200


async def test_a_client_that_goes_while_its_prompt_is_tokenized_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client(FakeWorker("w")) as asks:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def endless(text: str, **how: Any) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        monkeypatch.setattr(tokenizer_of(asks), "encode", endless)
        for path, body in DETAILED.values():
            begun.clear()
            ended.clear()
            with capture_logs() as logs:
                asked = asyncio.create_task(asks.post(path, {"model": "tiny", **body}))
                await begun.wait()
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                await ended.wait()
                await until(lambda: any(log["event"] == "request ended" for log in logs))
            [log] = [log for log in logs if log["event"] == "request ended"]
            assert log["outcome"] == "cancelled"
            assert log["model"] == "tiny"


async def test_a_refusal_of_what_is_told_charges_nothing() -> None:
    tenants = Tenants(otherwise=Tenant(quotas=Quotas(tokens_per_minute=20_000)))
    worker = FakeWorker("w", answer=1, context_length=10_000, kv_token_capacity=10_000)
    async with client(worker, tenants=tenants) as asks:
        for _ in range(3):
            error = await asks.refusal(COMPLETIONS, prompt="x" * 7000, echo=True, logprobs=20)
            assert error["param"] == "logprobs"
        assert not worker.submits
        answer = await asks.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 7000, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
