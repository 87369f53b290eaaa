"""Text that cannot fit is refused before time is spent on it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from tests.router.cluster import cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import DEMO_MODEL, byte_tokenizer, tokenizer_files
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenizeRequest
from trunkline_router.prompts import tokenizer as tokenizer_module
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.prompts.tokenizer_files import CHARACTERS_PER_TOKEN, described

LIKELY = "\u1f82\u03b1\u0313\u0300\u0345 \n<s>"
DEMO = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def chat(content: str) -> ChatMessages:
    return ChatMessages(messages=[ChatMessage(role="user", content=content)])


def characters_per_token(tokenizer: Tokenizer) -> int:
    return described(tokenizer_files(tokenizer))[1].characters_per_token


def composing() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


WIDTHS = {tokenizer: characters_per_token(tokenizer) for tokenizer in (DEMO, byte_tokenizer(), composing())}


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(LIKELY), min_size=1))
def test_no_text_is_wider_than_its_tokens_say(text: str) -> None:
    for tokenizer, width in WIDTHS.items():
        assert len(text) <= width * len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_token_stands_for_64_characters_or_as_many_as_the_longest_has() -> None:
    long = "x" * 100
    assert characters_per_token(byte_tokenizer()) == 64
    assert characters_per_token(Tokenizer(models.WordLevel({"a": 0, long: 1}, unk_token="a"))) == 100


async def test_text_and_conversations_that_cannot_fit_are_refused_untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeWorker("a", context_length=100, kv_token_capacity=80)) as router:

        async def unreachable(*_: object, **__: object) -> list[int]:
            raise AssertionError("it was tokenized")

        monkeypatch.setattr(PromptTokenizer, "encode", unreachable)
        too_long = "x" * (80 * CHARACTERS_PER_TOKEN + 1)
        for request in (
            GenerateRequest(text=too_long),
            GenerateRequest(chat=chat(too_long)),
        ):
            refused = await refusal(router.stub.Generate(request))
            assert (refused.reason, refused.field) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")
            assert "maximum context length is 80 tokens" in refused.message


async def test_tokenize_takes_texts_that_fit_no_context_but_not_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_BYTES", 10_000)
    monkeypatch.setattr(tokenizer_module, "MAX_CHAT_BYTES", 10_000)
    async with cluster(FakeWorker("a", context_length=100)) as router:
        assert len((await router.stub.Tokenize(TokenizeRequest(text="x" * 10_000))).token_ids) == 10_001
        for request, field in (
            (TokenizeRequest(text="x" * 10_001), "text"),
            (TokenizeRequest(text="ü" * 5_001), "text"),
            (TokenizeRequest(chat=chat("x" * 10_000)), "chat"),
        ):
            refused = await refusal(router.stub.Tokenize(request))
            assert (refused.reason, refused.field) == ("INVALID_REQUEST", field)


async def test_a_flood_of_token_ids_is_refused_for_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeWorker("a", context_length=100)) as router:
        refused = await refusal(router.generate([5] * 200_000))
    assert refused.reason == "CONTEXT_LENGTH_EXCEEDED"
