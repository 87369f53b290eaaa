"""Text that cannot fit is refused before time is spent on it."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.router.cluster import cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import DEMO_MODEL, byte_tokenizer
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenizeRequest
from trunkline_router.prompts import tokenizer as tokenizer_module
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import BYTES_PER_CHARACTER, PromptTokenizer
from trunkline_router.prompts.tokenizer_files import characters_per_token

LIKELY = "\u1f82\u03b1\u0313\u0300\u0345 \n<s>"
DEMO = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def chat(content: str) -> ChatMessages:
    return ChatMessages(messages=[ChatMessage(role="user", content=content)])


def normalized(*parts: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Sequence(list(parts))
    return tokenizer


NFC = normalized(normalizers.NFC())


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(LIKELY), min_size=1))
def test_no_text_is_wider_than_its_tokens_say(text: str) -> None:
    for tokenizer in (DEMO, byte_tokenizer(), NFC):
        width = characters_per_token(tokenizer)
        assert width is not None
        assert len(text) <= width * len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_four_characters_that_normalize_to_one_count_as_four() -> None:
    text = "\u03b1\u0313\u0300\u0345"
    assert len(normalizers.NFC().normalize_str(text)) == 1
    assert characters_per_token(NFC) == 4 * (characters_per_token(byte_tokenizer()) or 0)


def without(token: str) -> Tokenizer:
    described = json.loads(byte_tokenizer().to_str())
    del described["model"]["vocab"][token]
    return Tokenizer.from_str(json.dumps(described))


def absorbing() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True)])
    return tokenizer


def cutting(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        without("!"),
        absorbing(),
        normalized(normalizers.Strip()),
        normalized(normalizers.NFC(), normalizers.Replace("aa", "a")),
        cutting(pre_tokenizers.WhitespaceSplit()),
        cutting(pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_where_text_can_vanish_there_is_no_bound(tokenizer: Tokenizer) -> None:
    assert characters_per_token(tokenizer) is None


@pytest.mark.parametrize("name", ["models/stories260k", "tokenizers/tinyllama"])
def test_real_tokenizers_have_a_bound(shared: Path, name: str) -> None:
    assert characters_per_token(Tokenizer.from_file(str(shared / name / "tokenizer.json"))) == {
        "models/stories260k": 7, "tokenizers/tinyllama": 16,
    }[name]  # fmt: skip


async def test_text_and_conversations_that_cannot_fit_are_refused_untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeWorker("a", context_length=100, kv_token_capacity=80)) as router:

        async def unreachable(*_: object, **__: object) -> list[int]:
            raise AssertionError("it was tokenized")

        monkeypatch.setattr(PromptTokenizer, "encode", unreachable)
        width = characters_per_token(byte_tokenizer())
        assert width is not None
        for request in (
            GenerateRequest(text="x" * (80 * width + 1)),
            GenerateRequest(chat=chat("x" * (80 * width + 1))),
        ):
            refused = await refusal(router.stub.Generate(request))
            assert (refused.reason, refused.field) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")
            assert "maximum context length is 80 tokens" in refused.message


async def test_a_conversation_many_times_too_long_is_refused_unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeWorker("a", context_length=100)) as router:

        async def unreachable(*_: object, **__: object) -> None:
            raise AssertionError("it was rendered")

        monkeypatch.setattr(Helpers, "render", unreachable)
        for turns in (1, 100):
            width = characters_per_token(byte_tokenizer())
            assert width is not None
            long = ChatMessage(role="user", content="x" * (BYTES_PER_CHARACTER * 100 * width // turns))
            refused = await refusal(router.stub.Generate(GenerateRequest(chat=ChatMessages(messages=[long] * turns))))
            assert (refused.reason, refused.field) == ("CONTEXT_LENGTH_EXCEEDED", "prompt")
            assert "100 tokens" in refused.message


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
