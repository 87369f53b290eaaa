"""Whatever tokens come, the streamed text is what decoding prompt and output in one piece adds to the prompt."""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from tests.worker.engine_rig import DEMO_MODEL
from tests.worker.front.text_oracle import added_text, text_of, token_ids
from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, SamplingParams
from trunkline.v1.worker_pb2 import Resume, Submit
from trunkline_worker.front.text.decoder_stages import ByteRun
from trunkline_worker.front.text.output_stream import Detokenizer, NewText, OutputStream
from trunkline_worker.front.text.token_texts import TokenTexts

NAMES = ("demo", "tokenizers/tinyllama", "tokenizers/phi-3-mini", "models/stories260k")
NO_END = FinishReason.FINISH_REASON_UNSPECIFIED
STOP = FinishReason.FINISH_REASON_STOP


@cache
def load(directory: Path) -> tuple[Tokenizer, TokenTexts]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return tokenizer, TokenTexts(tokenizer)


@pytest.fixture(params=NAMES)
def real(request: pytest.FixtureRequest) -> tuple[Tokenizer, TokenTexts]:
    if request.param == "demo":
        return load(DEMO_MODEL)
    return load(request.getfixturevalue("shared") / request.param)


def streamed(texts: TokenTexts, prompt: list[int], output: list[int], *, keep_special: bool) -> str:
    detokenizer = Detokenizer(texts, prompt, keep_special=keep_special)
    news = [detokenizer.push(token_id) for token_id in output]
    held = detokenizer.held()
    assert detokenizer.flush() == held
    return text_of([*news, held])


def test_any_tokens_give_the_text_that_they_add(real: tuple[Tokenizer, TokenTexts]) -> None:
    tokenizer, texts = real

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(token_ids(tokenizer), token_ids(tokenizer), st.booleans())
    def check(prompt: list[int], output: list[int], keep: bool) -> None:
        expected = added_text(tokenizer, prompt, output, keep_special=keep)
        assert streamed(texts, prompt, output, keep_special=keep) == expected

    check()


def test_the_texts_that_went_wrong_once(shared: Path) -> None:
    tokenizer, texts = load(shared / "tokenizers/tinyllama")
    prompt = tokenizer.encode("麤龘靐").ids
    assert streamed(texts, prompt, [236, 192, 140, 338, 10812], keep_special=False) == "齉 is rare"
    for output in ([2] * 5, []):
        for text in ("😀", "\ufffd\ufffd😀"):
            ids = [*output, *tokenizer.encode(text, add_special_tokens=False).ids]
            assert streamed(texts, prompt, ids, keep_special=False).endswith(text)


PIECES = (
    *("", "a", "b.", "##c", "##", "▁d", "▁", "▁▁e", "x</w>", "</w>", "<pad>", "|", " ", "  y ", ".", " ?", "n't", "日"),
    *("<0xE9>", "<0xBD>", "<0x89>", "<0xff>", "<0x0A>", "<0x+5>", "<0xG1>", "<0x1>", "<0xé>"),
    *("Ġh", "é", "½", "\u0101", "ï", "¿", "½", "Ċ", "ab", "aab", "\ufffd", "\ufffd\ufffd"),
)
STEPS: tuple[decoders.Decoder, ...] = (
    decoders.ByteLevel(),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.BPEDecoder("</w>"),
    decoders.CTC(),
    decoders.CTC("<pad>", "|", False),
    decoders.WordPiece(),
    decoders.WordPiece("##", False),
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="first"),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.Replace("▁", " "),
    decoders.Replace("aab", "-"),
    decoders.Replace(Regex("a+b"), "+"),
    decoders.Replace("d", ""),
    decoders.Strip(" ", 1, 0),
    decoders.Strip(" ", 3, 0),
)


def of_pieces(decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer of PIECES; the last two are special."""
    names = list(dict.fromkeys(PIECES))
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, "a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


NUM_PIECES = of_pieces(None).get_vocab_size()


@st.composite
def any_decoder(draw: st.DrawFn) -> decoders.Decoder | None:
    """None, one step, or several, nested or not: with the usual ones more often than by chance."""
    usual = [
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
        [decoders.ByteFallback(), decoders.Metaspace()],
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")],
        [decoders.WordPiece(), decoders.Fuse(), decoders.Strip(" ", 1, 2)],
        [decoders.Fuse(), decoders.Strip("b", 0, 1)],
    ]
    steps = draw(st.one_of(st.none(), st.sampled_from(usual), st.lists(st.sampled_from(STEPS), max_size=4)))
    if steps is None:
        return None
    if len(steps) == 1:
        return steps[0]
    cut = draw(st.integers(0, len(steps)))
    return decoders.Sequence([decoders.Sequence(steps[:cut]), *steps[cut:]])


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    any_decoder(),
    st.lists(st.integers(0, NUM_PIECES), max_size=8),
    st.lists(st.integers(0, NUM_PIECES), max_size=8),
    st.booleans(),
)
def test_any_decoder_gives_the_text_that_tokens_add(
    decoder: decoders.Decoder | None, prompt: list[int], output: list[int], keep: bool
) -> None:
    tokenizer = of_pieces(decoder)
    described = None if decoder is None else json.loads(decoder.__getstate__())
    if re.search("'stop': [1-9]", str(described)):
        # The library's Strip fails on a text that is shorter than what it may cut off.
        prompt = [PIECES.index("日")] * 3 + prompt
    expected = added_text(tokenizer, prompt, output, keep_special=keep)
    assert streamed(TokenTexts(tokenizer), prompt, output, keep_special=keep) == expected, described


def stream_of(texts: TokenTexts, prompt: list[int], resume: Resume | None = None, **sampling: object) -> OutputStream:
    submit = Submit(handle=1, prompt_token_ids=prompt or [0], sampling=SamplingParams(seed=1, **sampling))  # type: ignore[arg-type]
    if resume is not None:
        submit.resume.CopyFrom(resume)
    return OutputStream(submit, texts, eos=frozenset(), max_total=10_000)


def feed(stream: OutputStream, output: list[int], *, ends: bool) -> tuple[list[str], list[int]]:
    """The text of each step, and the tokens that came out. `ends`: the engine ends the output with the last token."""
    pieces: list[str] = []
    tokens: list[int] = []
    for index, token_id in enumerate(output):
        if stream.finished:
            break
        news = EngineOutput(handle=1, token_ids=[token_id])
        if ends and index == len(output) - 1:
            news.finish_reason = FinishReason.FINISH_REASON_LENGTH
        chunk = stream.take(news).chunk
        pieces.append(chunk.text)
        tokens += chunk.token_ids
    return pieces, tokens


def first_match(text: str, stops: list[str]) -> str | None:
    """The stop string whose first end comes first, the longest of those."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return min(found)[2] if found else None


@st.composite
def stops_of(draw: st.DrawFn, text: str) -> list[str]:
    """Stop strings, most of which are in the text."""
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stops.append(text[start : start + draw(st.integers(1, 4))] + draw(st.sampled_from(["", "", "", "\ufffd", "x"])))
    return [stop for stop in stops if stop] or ["a"]


def test_a_stop_string_is_found_in_exactly_that_text() -> None:
    """Where no token changes earlier text. test_stops_in_byte_runs.py has the tokenizers with byte fallback."""
    tokenizer, texts = load(DEMO_MODEL)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(token_ids(tokenizer, max_parts=5), token_ids(tokenizer), st.booleans(), st.booleans(), st.data())
    def check(prompt: list[int], output: list[int], keep: bool, include: bool, data: st.DataObject) -> None:
        prompt, output = prompt or [0], output or [0]
        text = added_text(tokenizer, prompt, output, keep_special=keep)
        stops = data.draw(stops_of(text))
        stream = stream_of(texts, prompt, stop=stops, keep_special_tokens=keep, include_stop=include)
        pieces, tokens = feed(stream, output, ends=True)
        stop = first_match(text, stops)
        if stop is None:
            assert "".join(pieces) == text
            assert tokens == output
            return
        assert stream.finish == STOP
        assert "".join(pieces) == text[: text.index(stop) + len(stop) * include]
        assert tokens == output[: len(tokens)]
        kept = added_text(tokenizer, prompt, tokens, keep_special=keep)
        assert stop in kept, "the tokens that are kept make the stop string"

    check()


def test_an_output_goes_on_from_every_ledger_as_if_it_had_never_stopped(real: tuple[Tokenizer, TokenTexts]) -> None:
    tokenizer, texts = real

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(token_ids(tokenizer, max_parts=5), token_ids(tokenizer, max_parts=6), st.booleans(), st.data())
    def check(prompt: list[int], output: list[int], keep: bool, data: st.DataObject) -> None:
        prompt, output = prompt or [0], output or [0]
        stops = data.draw(stops_of(added_text(tokenizer, prompt, output, keep_special=keep)))
        sampling: dict[str, Any] = {
            "stop": stops,
            "keep_special_tokens": keep,
            "min_tokens": data.draw(st.integers(0, 4)),
        }
        whole = stream_of(texts, prompt, **sampling)
        pieces, tokens = feed(whole, output, ends=True)
        text = "".join(pieces)
        for cut in range(1, len(tokens)):
            boundaries = {sum(len(piece.encode()) for piece in pieces[:index]) for index in range(cut + 1)}
            for sent in boundaries:
                resume = Resume(output_token_ids=tokens[:cut], text_bytes_sent=sent)
                after = stream_of(texts, prompt, resume, **sampling)
                more, rest = feed(after, output[cut:], ends=True)
                assert text.encode()[sent:].decode() == "".join(more)
                assert tokens[:cut] + rest == tokens
                assert (after.finish, after._matched) == (whole.finish, whole._matched)

    check()


def test_text_that_a_worker_of_another_version_sent_earlier_is_not_sent_again(shared: Path) -> None:
    tokenizer, texts = load(shared / "tokenizers/tinyllama")
    ids = tokenizer.encode("so 麤龘 it is", add_special_tokens=False).ids
    text = added_text(tokenizer, [1], ids, keep_special=False)
    cut = ids.index(338) - 1  # before "is" and "it": the run has come, and is held back
    for sent in range(len("so 麤龘".encode()) + 2):
        resume = Resume(output_token_ids=ids[:cut], text_bytes_sent=sent)
        try:
            text.encode()[:sent].decode()
        except UnicodeDecodeError:
            with pytest.raises(RequestRefused, match="inside a character"):
                stream_of(texts, [1], resume)
            continue
        if sent > len("so 麤龘".encode()):
            with pytest.raises(RequestRefused, match="more than the 9 bytes"):
                stream_of(texts, [1], resume)
            continue
        for pause in (False, True):  # another ledger is taken while some of it is held back
            after = stream_of(texts, [1], resume)
            output = after.take(EngineOutput(handle=1)).chunk if pause else OutputChunk(text_offset=sent)
            assert output.text_offset == sent
            more, _ = feed(after, ids[cut:], ends=True)
            assert text.encode()[:sent].decode() + output.text + "".join(more) == text


def test_text_leaves_as_soon_as_it_is_certain(real: tuple[Tokenizer, TokenTexts]) -> None:
    """What has left is all that the texts of two continuations have in common, but for an incomplete character."""
    tokenizer, texts = real
    ids = tokenizer.encode("Once upon a time, there was a fox. Once more.", add_special_tokens=False).ids
    detokenizer = Detokenizer(texts, ids[:3], keep_special=False)
    for index in range(3, len(ids)):
        new = detokenizer.push(ids[index])
        assert new.text
        assert new.is_final
        assert detokenizer.held().text == ""


def test_a_stop_string_that_is_held_back_when_the_output_ends_comes_before_the_end(shared: Path) -> None:
    tokenizer, texts = load(shared / "tokenizers/tinyllama")
    ids = [*tokenizer.encode("so 麤", add_special_tokens=False).ids, 2]
    for include in (False, True):
        for keep in (False, True):
            sampling: dict[str, Any] = {"include_stop": include, "keep_special_tokens": keep, "stop_token_ids": [2]}
            so = " so " if keep else "so "  # the prompt's <s> is text or nothing
            stream = stream_of(texts, [1], stop=["麤"], **sampling)
            pieces, tokens = feed(stream, ids, ends=False)
            assert ("".join(pieces), stream._matched, tokens) == (so + "麤" * include, "麤", ids[:-1])
            # Without that stop string, the end token is the end; its text is there where both were asked for.
            stream = stream_of(texts, [1], stop=["</s>"], **sampling)
            pieces, tokens = feed(stream, ids, ends=False)
            assert ("".join(pieces), stream._matched) == (f"{so}麤" + "</s>" * (include and keep), 2)
            assert tokens == ids


def test_a_long_run_of_bytes_is_decoded_as_it_comes(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, texts = load(shared / "tokenizers/tinyllama")
    run = tokenizer.encode("麤" * 10_000, add_special_tokens=False).ids[1:]

    def decoded(self: ByteRun) -> Any:
        raise AssertionError("the whole run is decoded again")

    monkeypatch.setattr(ByteRun, "pieces", decoded)
    detokenizer = Detokenizer(texts, run[:15_000], keep_special=False)
    news = [detokenizer.push(one) for one in run[15_000:]]
    assert text_of(news) == "麤" * 5_000
    assert not any(new.is_final for new in news)
    assert detokenizer.flush() == NewText("")


def test_a_stream_opens_near_the_end_of_its_prompt(real: tuple[Tokenizer, TokenTexts]) -> None:
    tokenizer, texts = real
    prompt = tokenizer.encode("Once upon a time there was a fox. " * 50).ids
    opening = texts.opening(prompt, texts.units(keep_special=False))
    assert opening.begun
    assert opening.start >= len(prompt) - 2


def test_everything_that_is_asked_of_a_copy_leaves_the_stream_as_it_was() -> None:
    for steps in (STEPS[:], *pairwise(STEPS)):
        texts = TokenTexts(of_pieces(decoders.Sequence(list(steps))))
        asked, silent = (Detokenizer(texts, [3, 1], keep_special=True) for _ in range(2))
        for token_id in range(NUM_PIECES):
            asked.held()
            assert asked.push(token_id) == silent.push(token_id)
        assert asked.flush() == silent.flush()
