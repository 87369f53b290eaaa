"""The table of each token's bytes: joined, the bytes of a text's tokens are the text."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.router.loop_work import watched_loop
from tests.router.tokenizer_files import (
    BOS,
    DEMO_MODEL,
    LARGE_VOCABULARY,
    VOCAB_SIZE,
    byte_tokenizer,
    large_file,
    tokenizer_files,
)
from trunkline.status import RequestRefused
from trunkline_router.prompts.helper_pool import LONG_PROCESSES, HelperPool, Helpers, TokenizerSource
from trunkline_router.prompts.token_bytes import MAX_BYTES, TokenBytes, token_bytes
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.prompts.tokenizer_files import described

SENTENCE_PIECE = ("tokenizers/tinyllama", "tokenizers/phi-3-mini", "models/stories260k")
BLANK = "▁"  # SentencePiece's own character for a blank; a text that contains it loses it
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=BLANK) | st.sampled_from("etaoin ,'\n🦊👩‍🚀漢é\u0301")
)
MOST_WORK_S = 0.05  # of the event loop at a time, while another process lists a large vocabulary


def trained() -> Tokenizer:
    """A byte-level BPE tokenizer of a few merges that cross the bytes of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<é>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the 🦊 and the 🦉 ate 漢字 and été", "🦊🦊🦉 漢漢 then the end"] * 4, trainer)
    return tokenizer


def made(model: models.Model, decoder: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def of_pieces(decoder: Any, *pieces: str) -> Tokenizer:
    """A tokenizer of these pieces; their ids count from 0."""
    return made(models.WordLevel({piece: token_id for token_id, piece in enumerate(pieces)}, unk_token=""), decoder)


def joined(table: TokenBytes, tokenizer: Tokenizer, text: str) -> bytes:
    return b"".join(table[token_id] for token_id in tokenizer.encode(text, add_special_tokens=False).ids)


def listed(tokenizer: Tokenizer) -> list[bytes]:
    table = token_bytes(tokenizer)
    return [table[token_id] for token_id in range(len(table))]


@pytest.mark.parametrize("model", SENTENCE_PIECE)
def test_the_bytes_of_a_texts_tokens_are_the_text_behind_a_blank(model: str, shared: Path) -> None:
    tokenizer = Tokenizer.from_file(str(shared / model / "tokenizer.json"))
    table = token_bytes(tokenizer)

    @given(TEXTS)
    def check(text: str) -> None:
        assert joined(table, tokenizer, text) == (b" " if text else b"") + text.encode()

    check()


@pytest.mark.parametrize("name", ["demo", "one token per byte", "trained"])
def test_the_bytes_of_a_byte_level_texts_tokens_are_the_text(name: str) -> None:
    demo = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer = {"demo": demo, "one token per byte": byte_tokenizer(), "trained": trained()}[name]
    table = token_bytes(tokenizer)

    @settings(max_examples=300)
    @given(TEXTS | st.text(st.sampled_from("🦊🦉漢字été the")))
    def check(text: str) -> None:
        assert joined(table, tokenizer, text) == text.encode()

    check()


@pytest.mark.parametrize("name", ["demo", "trained"])
def test_the_bytes_of_any_tokens_are_what_a_byte_level_decoder_makes_of_them(name: str) -> None:
    tokenizer = trained() if name == "trained" else Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    table, draw = token_bytes(tokenizer), Random(0)
    for _ in range(200):
        ids = [draw.randrange(1, len(table)) for _ in range(20)]  # 0 is special, and the decoder garbles it
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(table[token_id] for token_id in ids).decode(errors="replace") == text


DECODED: dict[str, tuple[Any, dict[str, bytes]]] = {
    "none": (None, {"to": b" to", "é": b" \xc3\xa9"}),
    "bytes": (decoders.ByteLevel(), {"Ġto": b" to", "ð": b"\xf0", "ĊĤ": b"\n\x82", "a b": b"a b", "\x80": b"\xc2\x80"}),
    "metaspace": (decoders.Metaspace(), {"▁to": b" to", "a▁b": b"a b", "▁": b" "}),
    "byte fallback": (
        decoders.ByteFallback(),
        {"<0xE2>": b"\xe2", "<0x0a>": b"\n", "<0xG0>": b"<0xG0>", "<0x41": b"<0x41"},
    ),
    "word pieces": (decoders.WordPiece(), {"un": b" un", "##able": b"able", ".": b"."}),
    "suffixes": (decoders.BPEDecoder(suffix="</w>"), {"to</w>": b"to ", "un": b"un"}),
    "a pattern": (decoders.Replace(Regex("[0-9]+"), "#"), {"a12": b"a#"}),
    "pieces without ends": (decoders.Strip("_", 1, 0), {"_a_": b"a_"}),
    "a text without ends": (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), {" a ": b" a "}),
    "a pattern in the whole text": (
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("^x|b$"), "")]),
        {"xab": b"xab"},
    ),
    "bytes before another step": (
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex("x"), "y")]),
        {"<0xFF>": b"\xff", "x": b"y"},
    ),
    "sequences of sequences": (
        decoders.Sequence([decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]), decoders.Fuse()]),
        {"▁a": b" a", "<0xFF>": b"\xff"},
    ),
}


@pytest.mark.parametrize("name", DECODED)
def test_each_decoder_has_its_notation_of_bytes(name: str) -> None:
    decoder, expected = DECODED[name]
    assert listed(of_pieces(decoder, *expected)) == list(expected.values())


def test_added_tokens_are_their_own_text() -> None:
    tokenizer = trained()
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<end▁of é>"])
    tokenizer.add_tokens([AddedToken("   "), AddedToken("été")])
    table = token_bytes(tokenizer)
    assert [table.text(size + index) for index in range(3)] == ["<end▁of é>", "   ", "été"]
    assert table.text(0) == "<é>", "its characters are not bytes of the alphabet"


def test_an_added_token_that_is_a_piece_of_the_model_is_decoded() -> None:
    tokenizer = of_pieces(decoders.Replace("▁", " "), "a", "▁▁")
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    assert listed(tokenizer) == [b"a", b"  "]


def test_ids_that_the_tokenizer_does_not_have_are_empty() -> None:
    table = token_bytes(made(models.WordLevel({"a": 1, "b": 4}, unk_token="a"), decoders.Fuse()))
    assert [table[token_id] for token_id in range(-2, 7)] == [b"", b"", b"", b"a", b"", b"", b"b", b"", b""]
    assert len(table) == 5
    assert table.text(-1) == table.text(2) == table.text(1 << 40) == ""
    assert len(token_bytes(Tokenizer(models.BPE()))) == 0


def test_a_part_of_a_character_is_written_in_escapes() -> None:
    table = token_bytes(of_pieces(decoders.ByteLevel(), "âĢ", "Ġð", "Ċ\\ð", "Ġé", "é", "Ã©"))
    assert [table.text(token_id) for token_id in range(6)] == [
        *(r"bytes:\xe2\x80", r"bytes: \xf0", r"bytes:\x0a\x5c\xf0", r"bytes: \xe9", r"bytes:\xe9", "é")
    ]
    assert [table.chat_text(token_id) for token_id in (0, 1, 5)] == [r"\xe2\x80", r" \xf0", "é"]


@pytest.mark.parametrize("model", [*SENTENCE_PIECE, DEMO_MODEL], ids=str)
def test_tokens_of_different_bytes_have_different_texts(model: Path | str, shared: Path) -> None:
    table = token_bytes(Tokenizer.from_file(str(shared / model / "tokenizer.json")))
    bytes_of: dict[str, bytes] = {}
    for token_id in range(len(table)):
        text = table.text(token_id)
        assert bytes_of.setdefault(text, table[token_id]) == table[token_id]
        if text.startswith("bytes:"):
            escaped = table.chat_text(token_id).encode().decode("unicode_escape").encode("latin-1")
            assert escaped == table[token_id], "the escapes can be read back"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}


@pytest.mark.parametrize("model", [*SENTENCE_PIECE, DEMO_MODEL], ids=str)
async def test_a_process_lists_the_same_bytes_as_this_one(model: Path | str, shared: Path, helpers: Helpers) -> None:
    files = files_of(shared / model)
    tokenizer, traits = described(files)
    expected = token_bytes(tokenizer)
    here, there = PromptTokenizer(files, helpers), PromptTokenizer(files, helpers, traits)
    for table in (await here.token_bytes(), await there.token_bytes()):
        assert table.to_wire() == expected.to_wire()
    assert len(helpers.long._idle) == 1, "a process listed them"


async def test_requests_at_the_same_time_share_one_table_whichever_of_them_goes_away(helpers: Helpers) -> None:
    files = files_of(DEMO_MODEL)
    tokenizer = PromptTokenizer(files, helpers, described(files)[1])
    first, *others = [asyncio.create_task(tokenizer.token_bytes()) for _ in range(4)]
    await asyncio.sleep(0)
    first.cancel()
    tables = await asyncio.gather(*others)
    assert first.cancelled()
    assert all(table is tables[0] for table in [*tables, await tokenizer.token_bytes()])


async def test_a_large_vocabulary_is_listed_beside_the_event_loop(helpers: Helpers) -> None:
    files = {**tokenizer_files(), "tokenizer.json": large_file()}
    tokenizer = PromptTokenizer(files, helpers, described(files)[1])
    async with watched_loop() as work:
        table = await tokenizer.token_bytes()
    assert len(table) == LARGE_VOCABULARY
    assert work.longest_s < MOST_WORK_S


def changed(**parts: Any) -> Tokenizer:
    tokenizer = byte_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def wide_file() -> bytes:
    """Its tokens are short, but its decoder makes each of them long."""
    pieces = ["a" * width for width in range(1, 257)]
    return of_pieces(decoders.Replace("a", "b" * 1024), *pieces).to_str().encode()


HOSTILE = {
    "bytes without measure": (wide_file(), f"more than {MAX_BYTES} bytes"),
    "a step that panics": (changed(decoder=decoders.Strip("a", 0, 5)).to_str().encode(), "cannot be listed"),
}


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_tokenizer_costs_its_own_requests_alone(name: str, is_here: bool, helpers: Helpers) -> None:
    file, problem = HOSTILE[name]
    files = {**tokenizer_files(), "tokenizer.json": file}
    tokenizer = PromptTokenizer(files, helpers, None if is_here else described(files)[1])
    for _ in range(2):
        with pytest.raises(RequestRefused, match=problem) as refused:
            await tokenizer.token_bytes()
        assert (refused.value.reason, refused.value.field) == ("INVALID_REQUEST", "tokenizer")
        assert "\n" not in refused.value.message
    good = tokenizer_files()
    assert (await PromptTokenizer(good, helpers, described(good)[1]).token_bytes()).text(BOS) == "<s>"


async def test_a_pattern_on_which_a_token_hangs_ends_with_its_process() -> None:
    tokenizer = of_pieces(decoders.Replace(Regex(r"(a+)+$"), "-"), "a" * 60 + "b")
    helpers = Helpers(long_limit_s=0.5)
    try:
        with pytest.raises(RequestRefused) as refused:
            await helpers.token_bytes(TokenizerSource(tokenizer.to_str().encode()))
        assert refused.value.reason == "INVALID_REQUEST"
        assert len(await helpers.token_bytes(TokenizerSource(tokenizer_files()["tokenizer.json"]))) == VOCAB_SIZE
    finally:
        await helpers.close()


@pytest.mark.parametrize("file", [b"", b"{}", b"\xff", b"[" * 100_000])
async def test_a_damaged_file_is_refused(file: bytes, helpers: Helpers) -> None:
    for _ in range(2):
        with pytest.raises(RequestRefused, match="cannot be loaded"):
            await helpers.token_bytes(TokenizerSource(file))


async def test_a_refusal_is_remembered_unless_it_was_for_lack_of_room(helpers: Helpers) -> None:
    file, problem = HOSTILE["a step that panics"]
    files = {**tokenizer_files(), "tokenizer.json": file}
    hostile = PromptTokenizer(files, helpers, described(files)[1])
    with pytest.raises(RequestRefused, match=problem):
        await hostile.token_bytes()
    good = PromptTokenizer(tokenizer_files(), helpers, described(tokenizer_files())[1])
    working = helpers.long
    helpers.long = HelperPool(LONG_PROCESSES, max_bytes=0)
    with pytest.raises(RequestRefused, match=problem):
        await hostile.token_bytes()
    with pytest.raises(RequestRefused) as refused:
        await good.token_bytes()
    assert refused.value.reason == "OVERLOADED"
    helpers.long = working
    assert len(await good.token_bytes()) == VOCAB_SIZE
