"""Tokens to text: detokenizing, stop strings, offsets, and going on from a ledger."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.worker.engine_rig import DEMO_MODEL
from tests.worker.front.text_oracle import text_of
from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams
from trunkline.v1.worker_pb2 import Resume, Submit
from trunkline_worker.front.text.output_stream import Detokenizer, NewText, OutputStream, StopSearch
from trunkline_worker.front.text.token_texts import TokenTexts

DEMO = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
BOS = 0
EOS = frozenset({1})


def whole(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    both: str = tokenizer.decode([*prompt, *output])
    return both[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize(
    "text", ["Hello there, little fox!", "naïve café — ünïcödé", "日本語とemoji 🦊🦊🏽 mixed", "  two  spaces\n\n"]
)
def test_text_that_was_encoded_comes_back(text: str) -> None:
    prompt = DEMO.encode("Once upon").ids
    output = DEMO.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(TokenTexts(DEMO), prompt, keep_special=False)
    news = [detokenizer.push(token) for token in output]
    assert text_of([*news, detokenizer.flush()]) == text
    assert not any("\ufffd" in new.text for new in news), "half characters are held back"


@pytest.mark.parametrize("name", ["models/stories260k", "tokenizers/tinyllama", "tokenizers/phi-3-mini"])
def test_sentencepiece_spaces_are_right_between_prompt_and_output(shared: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(shared / name / "tokenizer.json"))
    for text in ("Once upon a time there was a fox", "Hello  world\nnew line 🦊 ok"):
        ids = tokenizer.encode(text).ids
        for cut in range(1, len(ids)):
            detokenizer = Detokenizer(TokenTexts(tokenizer), ids[:cut], keep_special=False)
            streamed = text_of([*(detokenizer.push(token) for token in ids[cut:]), detokenizer.flush()])
            prefix = tokenizer.decode(ids[:cut])
            if not prefix.endswith("\ufffd"):
                assert prefix + streamed == tokenizer.decode(ids)


def run_stop(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    search = StopSearch(stops, include_stop=include)
    out = ""
    for piece in pieces:
        released = search.push(NewText(piece), may_stop=True)
        out += released.text
        if released.matched is not None:
            return out, released.matched
    return out + search.flush(), None


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.randoms()
)
def test_a_stop_string_is_found_however_the_text_is_cut(text: str, stops: list[str], cut: random.Random) -> None:
    pieces, rest = [], text
    while rest:
        size = cut.randrange(1, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    expected = (text, None) if not ends else (text[: min(ends)[1]], min(ends)[2])
    assert run_stop(pieces, stops) == expected


def test_nothing_that_may_become_a_stop_string_gets_out() -> None:
    search = StopSearch(["<end>"], include_stop=False)
    assert search.push(NewText("say <en"), may_stop=True).text == "say "
    assert search.push(NewText("try"), may_stop=True).text == "<entry"
    assert search.push(NewText("<"), may_stop=True).text == ""
    assert search.flush() == "<"


def test_include_stop_keeps_the_match_and_nothing_after_it() -> None:
    assert run_stop(["one. two. three"], [". t"], include=True) == ("one. t", ". t")


def submit_of(prompt: list[int], *, output: list[int] | None = None, sent: int = 0, **sampling: object) -> Submit:
    submit = Submit(handle=7, prompt_token_ids=prompt, sampling=SamplingParams(seed=1, **sampling))  # type: ignore[arg-type]
    if output is not None:
        submit.resume.CopyFrom(Resume(output_token_ids=output, text_bytes_sent=sent))
    return submit


def stream_of(submit: Submit) -> OutputStream:
    return OutputStream(submit, TokenTexts(DEMO), eos=EOS, max_total=1000)


def feed(stream: OutputStream, tokens: list[int]) -> tuple[str, int, list[int]]:
    """Text, its first offset, tokens that came out."""
    text, first = "", None
    out: list[int] = []
    for token in tokens:
        if stream.finished:
            break
        chunk = stream.take(EngineOutput(handle=1, token_ids=[token])).chunk
        first = chunk.text_offset if first is None else first
        assert chunk.text_offset == (first or 0) + len(text.encode())
        text += chunk.text
        out += chunk.token_ids
    return text, first or 0, out


PROMPT = DEMO.encode("Once upon a time").ids
OUTPUT = DEMO.encode(" there was a naïve 🦊 fox. The END of it all", add_special_tokens=False).ids


@pytest.mark.parametrize("stop", ["fox", "🦊", "a naïve", "The END", "of it all", "e", " there"])
def test_pitfall_8_a_stop_string_over_tokens_characters_and_the_seam_of_a_failover(stop: str) -> None:
    text, _, tokens = feed(stream_of(submit_of(PROMPT, stop=[stop])), OUTPUT)
    reference = whole(DEMO, PROMPT, OUTPUT)
    assert text == reference[: reference.index(stop)]
    for cut in range(len(tokens)):
        before = stream_of(submit_of(PROMPT, stop=[stop]))
        sent, _, _ = feed(before, OUTPUT[:cut])
        after = stream_of(submit_of(PROMPT, stop=[stop], output=OUTPUT[:cut], sent=len(sent.encode())))
        rest, offset, more = feed(after, OUTPUT[cut:])
        assert sent + rest == text, f"seam after {cut} tokens"
        assert offset == len(sent.encode())
        assert OUTPUT[:cut] + more == tokens, "tokens past the stop are dropped, none is lost"


def test_a_ledger_whose_text_was_not_all_sent_sends_the_rest() -> None:
    whole_text, _, _ = feed(stream_of(submit_of(PROMPT)), OUTPUT)
    stream = stream_of(submit_of(PROMPT, output=OUTPUT[:6], sent=4))
    rest, offset, _ = feed(stream, OUTPUT[6:])
    assert offset == 4
    assert whole_text[:4] + rest == whole_text


@pytest.mark.parametrize(
    ("sampling", "reason", "matched"),
    [
        ({"max_tokens": len(OUTPUT)}, FinishReason.FINISH_REASON_LENGTH, None),
        ({"stop_token_ids": [OUTPUT[-1]]}, FinishReason.FINISH_REASON_STOP, "stop_token_id"),
        ({"stop": ["it all"]}, FinishReason.FINISH_REASON_STOP, "stop_string"),
    ],
)
def test_a_complete_ledger_ends_without_computing(
    sampling: dict[str, object], reason: int, matched: str | None
) -> None:
    output = stream_of(submit_of(PROMPT, output=OUTPUT, sent=2, **sampling)).ledger_output()
    assert output is not None
    assert output.handle == 7
    assert output.chunk.finish_reason == reason
    assert output.chunk.WhichOneof("matched") == matched
    assert not output.chunk.token_ids


@pytest.mark.parametrize(
    ("sent", "sampling", "field"),
    [
        (10_000, {}, "resume.text_bytes_sent"),
        (len(" there was a naï".encode()) - 1, {}, "resume.text_bytes_sent"),
        (0, {"max_tokens": 3}, "resume.output_token_ids"),
        (0, {"stop": ["there"]}, "resume.output_token_ids"),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(sent: int, sampling: dict[str, object], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        stream_of(submit_of(PROMPT, output=OUTPUT, sent=sent, **sampling))
    assert caught.value.field == field


def test_end_tokens_are_tokens_but_not_text() -> None:
    stream = stream_of(submit_of(PROMPT))
    text, _, tokens = feed(stream, [*OUTPUT[:3], 1, *OUTPUT[3:]])
    assert tokens == [*OUTPUT[:3], 1]
    assert text == whole(DEMO, PROMPT, OUTPUT[:3])
    assert stream.finish == FinishReason.FINISH_REASON_STOP


def test_min_tokens_lets_stop_strings_pass() -> None:
    stream = stream_of(submit_of(PROMPT, stop=["e"], min_tokens=4))
    text, _, tokens = feed(stream, OUTPUT)
    assert len(tokens) > 4
    assert " there was a" in text


def test_logprobs_of_dropped_tokens_are_dropped() -> None:
    stream = stream_of(submit_of(PROMPT, stop=["was"], logprobs=0))
    output = EngineOutput(handle=1, token_ids=OUTPUT[:6])
    for token in OUTPUT[:6]:
        output.logprobs.add().chosen.token_id = token
    chunk = stream.take(output).chunk
    assert len(chunk.logprobs) == len(chunk.token_ids) < 6
