"""The offset of a token is where its text begins in the text that the client sees."""

import asyncio
import codecs
import random
import re
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers, processors

from tests.parameters import one_in
from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import client
from tests.router.tokenizer_files import DEMO_MODEL, byte_tokenizer, tokenizer_files
from trunkline_router.edge.openai.completion_details import TextOffsets
from trunkline_router.edge.openai.token_details import PIECE
from trunkline_router.prompts.token_bytes import TokenBytes, token_bytes

SENTENCE_PIECE = ("tokenizers/tinyllama", "tokenizers/phi-3-mini", "models/stories260k")
TEXT = "Once upon a time, a naïve 🦊 麤龘 sat.\n\nThe end"


@cache
def load(folder: Path) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer, token_bytes(tokenizer)


def byte_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    match = re.fullmatch("<0x([0-9A-F]{2})>", tokenizer.id_to_token(token_id) or "")
    return bytes.fromhex(match[1]) if match else b""


def is_whole_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def runs_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> Iterator[list[int]]:
    """The tokens, with byte tokens side by side in one list."""
    run: list[int] = []
    for token_id in tokens:
        if run and not (byte_of(tokenizer, run[-1]) and byte_of(tokenizer, token_id)):
            yield run
            run = []
        run.append(token_id)
    yield run


def expected(tokenizer: Tokenizer, tokens: Sequence[int], *, keeps_special: bool) -> list[int | None]:
    """The number of characters that the library decodes from what is before each token. None: from the first run of
    byte tokens on that is not text, of which the library makes more characters."""

    def length(ids: Sequence[int]) -> int:
        return len(tokenizer.decode(list(ids), skip_special_tokens=not keeps_special))

    offsets: list[int | None] = []
    before: list[int] = []
    is_text = True
    for run in runs_of(tokenizer, tokens):
        data = b"".join(byte_of(tokenizer, token_id) for token_id in run)
        is_text = is_text and is_whole_text(data)
        for number in range(len(run)):
            num_complete = len(data[:number].decode(errors="ignore").encode())
            offsets.append(length([*before, *run[:num_complete]]) if is_text else None)
        before += run
    return offsets


@pytest.mark.parametrize("name", SENTENCE_PIECE)
def test_offsets_of_any_tokens_are_those_of_the_librarys_text(shared: Path, name: str) -> None:
    tokenizer, names = load(shared / name)
    draw = random.Random(f"offsets of {name}")
    single = [token_id for token_id in range(len(names)) if byte_of(tokenizer, token_id)]
    special = sorted(names.special)
    spelled = tokenizer.encode(TEXT, add_special_tokens=False).ids

    def part() -> list[int]:
        start = draw.randrange(len(spelled))
        parts = [
            spelled[start : start + draw.randint(1, 9)],
            [draw.randrange(tokenizer.get_vocab_size())],
            draw.choices(single, k=draw.randint(1, 3)),
            tokenizer.encode(draw.choice(["  two", " ", "麤\n", "🦊"]), add_special_tokens=False).ids,
        ]
        return draw.choice(parts)

    num_checked = 0
    for _ in range(600):
        tokens = [token_id for _ in range(draw.randint(1, 6)) for token_id in part()]
        keeps_special = draw.random() < 0.5
        for _ in range(draw.randrange(3)):
            # Not within a run of bytes, which special tokens do not end if they are left out.
            places = [at for at in range(len(tokens) + 1) if not any(one in single for one in tokens[at - 1 : at + 1])]
            if places:
                tokens.insert(draw.choice(places), draw.choice(special))
        offsets = TextOffsets(names, keeps_special=keeps_special)
        pairs = zip(offsets.of_output(tokens), expected(tokenizer, tokens, keeps_special=keeps_special), strict=True)
        for told, right in pairs:
            assert right is None or told == right, (tokens, keeps_special)
            num_checked += right is not None
    assert num_checked > 2_000


def test_offsets_of_any_tokens_of_bytes_are_those_of_their_text() -> None:
    _, names = load(DEMO_MODEL)
    draw = random.Random(0)
    for _ in range(300):
        tokens = [draw.choice([draw.randrange(1, 260), draw.randrange(2, len(names))]) for _ in range(20)]
        tokens = [token_id for token_id in tokens if token_id not in names.special]
        offsets = TextOffsets(names, keeps_special=False)
        before, right = b"", []
        for token_id in tokens:
            data = before + names[token_id][:1]
            text, used = codecs.utf_8_decode(data, "replace", False)
            right.append(len(text) - (used == len(data)))  # its first byte is within a character or ends one
            before += names[token_id]
        assert offsets.of_output(tokens) == right


@pytest.mark.parametrize("name", ["demo", *SENTENCE_PIECE])
def test_a_token_within_a_character_has_its_offset(shared: Path, name: str) -> None:
    tokenizer, names = load(DEMO_MODEL if name == "demo" else shared / name)
    ids = tokenizer.encode(TEXT).ids
    at = TextOffsets(names, keeps_special=False).of_output(ids)
    for index, token_id in enumerate(ids):
        if token_id in names.special:
            continue
        told = names[token_id].decode(errors="ignore").lstrip()
        assert TEXT[at[index] :].lstrip().startswith(told)
        if not told.strip() and names[token_id].strip():
            assert not TEXT[at[index]].isascii(), "a part of the character there"


@pytest.mark.parametrize("name", ["demo", *SENTENCE_PIECE])
async def test_a_prompt_that_is_not_in_the_text_is_where_its_output_continues(shared: Path, name: str) -> None:
    tokenizer, names = load(DEMO_MODEL if name == "demo" else shared / name)
    ids = tokenizer.encode(TEXT).ids
    at = TextOffsets(names, keeps_special=False).of_output(ids)
    for cut in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        offsets = TextOffsets(names, keeps_special=False)
        offsets.pass_prompt(array("i", ids[:cut]), 0)
        if not prompt.endswith("\ufffd"):
            assert offsets.of_output(ids[cut:]) == [one - len(prompt) for one in at[cut:]]
    offsets = TextOffsets(names, keeps_special=False)
    offsets.pass_prompt(array("i", ids[:-1]), 0)
    assert offsets.of_output(ids[-1:]) == [0]


async def test_an_echoed_prompt_has_offsets_in_its_text(shared: Path) -> None:
    folder = shared / "models/stories260k"
    files = {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}
    worker = FakeWorker("w", files=files, vocab_size=512, answer=1)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Once upon a time").ids
    given: dict[str, tuple[object, str, list[int]]] = {
        "a text": ("Once upon a time", "Once upon a time", [0, 0, 4, 9, 11]),
        "tokens, with the special one": (ids, "<s> Once upon a time", [0, 3, 8, 13, 15]),
        "a text with special tokens": ("Once<s> upon</s>a", "Once<s> upon</s>a", [0, 0, 4, 7, 7, 12, 16]),
    }
    async with client(worker) as asks:
        for prompt, text, at in given.values():
            [choice] = (await asks.complete(prompt, echo=True, logprobs=0, max_tokens=0))["choices"]
            assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, at)


async def test_the_offsets_of_an_output_follow_its_prompt_if_that_is_echoed(shared: Path) -> None:
    files = {path.name: path.read_bytes() for path in (shared / "models/stories260k").glob("tokenizer*")}
    worker = FakeWorker("w", files=files, vocab_size=512, answer=8)  # <unk> <s> </s> and five bytes
    async with client(worker) as asks:
        for echo, before in ((True, len("Once")), (False, 0)):
            for keeps, at in ((False, [0, 0, 0, 0, 1, 2, 3, 4]), (True, [0, 5, 8, 12, 13, 14, 15, 16])):
                body = {"echo": echo, "logprobs": 0, "max_tokens": 8, "skip_special_tokens": not keeps}
                [choice] = (await asks.complete("Once", **body))["choices"]
                assert choice["logprobs"]["text_offset"][-8:] == [before + one for one in at]
                events = await asks.all_events("/v1/completions", prompt="Once", **body)
                told = [event["choices"][0]["logprobs"] for event in events[:-1]]
                streamed = [one for columns in told if columns for one in columns["text_offset"]]
                assert streamed == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    "text",
    one_in(3, ["<|user|>\nHi there<|end|>\n<|assistant|> Well,\n\nyes", "  two <|end|>  more", TEXT]),
)
async def test_the_white_space_that_special_tokens_add_or_take_moves_no_offset(shared: Path, text: str) -> None:
    files = {path.name: path.read_bytes() for path in (shared / "tokenizers/phi-3-mini").glob("tokenizer*")}
    async with client(FakeWorker("w", files=files, vocab_size=32064, answer=1)) as asks:
        [choice] = (await asks.complete(text, echo=True, logprobs=0, max_tokens=0))["choices"]
    columns = choice["logprobs"]
    for name, at in zip(columns["tokens"], columns["text_offset"], strict=True):
        if (piece := name.strip()) and not name.startswith("bytes:"):
            assert text.startswith(piece, at) or text.startswith(f" {piece}", at)


async def test_the_offsets_of_an_echoed_text_count_its_characters_before_they_are_normalized() -> None:
    tokenizer = byte_tokenizer()  # a token for each byte, after NFC
    tokenizer.normalizer = normalizers.NFC()
    special = tokenizer.post_processor
    for trims in (False, True):
        trimming = processors.ByteLevel(trim_offsets=trims)
        tokenizer.post_processor = processors.Sequence([trimming, special])
        worker = FakeWorker("w", files=tokenizer_files(tokenizer, add_eos_token=True), vocab_size=512, answer=1)
        async with client(worker) as asks:
            [choice] = (await asks.complete("cafe\u0301 is good", echo=True, logprobs=0, max_tokens=0))["choices"]
        assert choice["logprobs"]["tokens"][:8] == ["<s>", "c", "a", "f", "bytes:\\xc3", "bytes:\\xa9", " ", "i"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("is_text", [True, False])
async def test_an_echo_looks_at_each_token_once_for_all_choices_and_gives_way(
    shared: Path, monkeypatch: pytest.MonkeyPatch, is_text: bool
) -> None:
    folder = shared / "models/stories260k"
    files = {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}
    text = "\u2581" + " " * 1000 + "c" + "zq" * 500  # its first token has one blank more than the text
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    lookups = [0]  # in each turn of the event loop
    text_of = TokenBytes.text

    def counted(names: TokenBytes, token_id: int) -> str:
        if lookups[-1] == 0:
            asyncio.get_running_loop().call_soon(lookups.append, 0)
        lookups[-1] += 1
        return text_of(names, token_id)

    worker = FakeWorker("w", files=files, vocab_size=512, answer=1)
    monkeypatch.setattr(TokenBytes, "text", counted)
    async with client(worker) as asks:
        prompt = text if is_text else ids
        choices = (await asks.complete(prompt, echo=True, logprobs=0, max_tokens=0, n=4))["choices"]
    assert len(ids) > 4 * PIECE
    assert sum(lookups) <= 2 * len(ids)  # as a token, and as the likeliest one
    assert max(lookups) <= 2 * PIECE
    told = choices[0]["logprobs"]["text_offset"]
    assert all(choice["logprobs"]["text_offset"] == told for choice in choices)
    length = len(choices[0]["text"])
    assert told[-1000:] == list(range(length - 1000, length))
