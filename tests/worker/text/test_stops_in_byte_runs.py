"""A stop string ends the output at the token that completes it, also within a run of byte tokens of usual decoders.

The reference decodes everything so far after each token, with the library, and searches the whole text.
"""

import os.path
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.worker.front.text_oracle import TEXTS, added_text
from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams
from trunkline.v1.worker_pb2 import Resume, Submit
from trunkline_worker.front.text.output_stream import OutputStream
from trunkline_worker.front.text.token_texts import TokenTexts

NAMES = ("tokenizers/tinyllama", "tokenizers/phi-3-mini", "models/stories260k")
STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
REPLACEMENT = "\ufffd"
EOS = 2


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    output: list[int]  # what the engine computes, if nothing ends the output
    sampling: SamplingParams


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    matched: str | int | None
    finish: int


@cache
def load(directory: Path) -> tuple[Tokenizer, TokenTexts]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return tokenizer, TokenTexts(tokenizer)


def byte_of(tokenizer: Tokenizer, token_id: int) -> int | None:
    match = re.fullmatch("<0x([0-9A-F]{2})>", tokenizer.id_to_token(token_id) or "")
    return int(match[1], 16) if match else None


def without_incomplete_character(tokenizer: Tokenizer, tokens: Sequence[int], *, keep_special: bool) -> list[int]:
    """The tokens without the bytes at their end that begin a character and do not complete it."""
    special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    run: list[int] = []  # indices
    for index in range(len(tokens) - 1, -1, -1):
        if byte_of(tokenizer, tokens[index]) is not None:
            run.insert(0, index)
        elif tokenizer.id_to_token(tokens[index]) is not None and (keep_special or tokens[index] not in special):
            break
    try:
        bytes(byte_of(tokenizer, tokens[index]) or 0 for index in run).decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            left_out = set(run[error.start :])
            return [token_id for index, token_id in enumerate(tokens) if index not in left_out]
    return list(tokens)


def text_so_far(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, keep_special: bool) -> str:
    alone = tokenizer.decode(prompt, skip_special_tokens=not keep_special)
    both = without_incomplete_character(tokenizer, [*prompt, *output], keep_special=keep_special)
    text: str = tokenizer.decode(both, skip_special_tokens=not keep_special)
    return text[len(os.path.commonprefix([alone, text])) :]  # noqa: RUF071  # of characters


def first_stop(text: str, stops: Sequence[str], after: int) -> tuple[int, str] | None:
    """Start of the match that ends first beyond `after`, and its stop string: the longest of those."""
    found = [
        (match.end(1), match.start(1), stop)
        for stop in stops
        for match in re.finditer(f"(?=({re.escape(stop)}))", text)
        if match.end(1) > after
    ]
    return min(found)[1:] if found else None


def expected(tokenizer: Tokenizer, case: Case) -> Answer:
    params, prompt = case.sampling, case.prompt
    keep, include = params.keep_special_tokens, params.include_stop

    def stopped(text: str, num_tokens: int) -> Answer | None:
        after = len(os.path.commonprefix([before, text]))  # noqa: RUF071  # of characters
        found = first_stop(text, params.stop, after)
        if found is None or num_tokens <= params.min_tokens:
            return None
        start, stop = found
        return Answer(text[: start + len(stop) * include], num_tokens, stop, STOP)

    before = ""
    for num_tokens, token_id in enumerate(case.output, 1):
        output = case.output[:num_tokens]
        if token_id == EOS and num_tokens > params.min_tokens:
            ended = added_text(tokenizer, prompt, output[:-1], keep_special=keep)
            if (answer := stopped(ended, num_tokens - 1)) is not None:
                return answer
            text = added_text(tokenizer, prompt, output, keep_special=keep) if include else ended
            return Answer(text, num_tokens, EOS, STOP)
        text = text_so_far(tokenizer, prompt, output, keep_special=keep)
        if (answer := stopped(text, num_tokens)) is not None:
            return answer
        before = text
    text = added_text(tokenizer, prompt, case.output, keep_special=keep)
    return stopped(text, len(case.output)) or Answer(text, len(case.output), None, LENGTH)


def streamed(texts: TokenTexts, case: Case, *, cut: int = 0) -> Answer:
    """The answer of a stream. With `cut`, another worker continues after that many tokens."""
    submit = Submit(handle=1, prompt_token_ids=case.prompt, sampling=case.sampling)
    stream = OutputStream(submit, texts, eos=frozenset({EOS}), max_total=100_000)
    text, num_tokens, matched = "", 0, None
    for index, token_id in enumerate(case.output):
        if index and index == cut:
            submit.resume.CopyFrom(Resume(output_token_ids=case.output[:cut], text_bytes_sent=len(text.encode())))
            stream = OutputStream(submit, texts, eos=frozenset({EOS}), max_total=100_000)
        finish = LENGTH if index == len(case.output) - 1 else FinishReason.FINISH_REASON_UNSPECIFIED
        chunk = stream.take(EngineOutput(handle=1, token_ids=[token_id], finish_reason=finish)).chunk
        assert chunk.text_offset == len(text.encode())
        text += chunk.text
        num_tokens += len(chunk.token_ids)
        if stream.finished:
            if (kind := chunk.WhichOneof("matched")) is not None:
                matched = getattr(chunk, kind)
            break
    return Answer(text, num_tokens, matched, stream.finish)


def cases(tokenizer: Tokenizer, name: str, count: int) -> Iterator[Case]:
    """Random cases, always the same ones, heavy in byte tokens."""
    draw = random.Random(f"stops in {name}")
    bytes_ = [id_ for id_ in range(tokenizer.get_vocab_size()) if byte_of(tokenizer, id_) is not None]
    newline = next(id_ for id_ in bytes_ if byte_of(tokenizer, id_) == 0x0A)
    special = sorted(tokenizer.get_added_tokens_decoder())
    id_of_byte = {byte_of(tokenizer, id_): id_ for id_ in bytes_}
    spelled = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]

    def part() -> list[int]:
        kind = draw.randrange(9)
        if kind == 0:
            return draw.choices(bytes_, k=draw.randint(1, 3))
        if kind == 1:
            return [draw.randrange(tokenizer.get_vocab_size() + 2)]
        if kind == 2:
            return [draw.choice([*special, EOS])] if draw.random() < 0.3 else []
        if kind in (3, 4):
            ids = draw.choice(spelled)
            start = draw.randrange(len(ids))
            return ids[start : start + draw.randint(1, 8)]
        if kind in (5, 6):
            return [newline] * draw.choice([1, 1, 2, 3, 8])
        return [id_of_byte[byte] for byte in draw.choice(["麤", "é", "🦊", "a\n", "\n\nb", "\r\n", "龘靐"]).encode()]

    def tokens(most: int) -> list[int]:
        return [id_ for _ in range(draw.randint(1, most)) for id_ in part()] or [newline]

    def stop(text: str) -> str:
        start = draw.randrange(len(text)) if text else 0
        return draw.choice([text[start : start + draw.randint(1, 4)], "\n\n", "\n", "é", "\n麤", REPLACEMENT, "\n\n\n"])

    for _ in range(count):
        prompt, output, keep = tokens(3), tokens(8), draw.random() < 0.3
        length = draw.randint(1, len(output))
        seen = text_so_far(tokenizer, prompt, output[:length], keep_special=keep)
        stops = [one for one in {stop(seen): None for _ in range(draw.randint(1, 3))} if one] or ["a"]
        sampling = SamplingParams(
            seed=1,
            stop=stops,
            keep_special_tokens=keep,
            include_stop=draw.random() < 0.3,
            min_tokens=0 if any(REPLACEMENT in one for one in stops) else draw.choice([0, 0, 1, 3, 6, 12]),
        )
        yield Case(prompt, output, sampling)


def check(shared: Path, name: str, count: int) -> None:
    tokenizer, texts = load(shared / name)
    num_in_runs = 0
    for case in cases(tokenizer, name, count):
        answer = expected(tokenizer, case)
        assert streamed(texts, case) == answer, case
        if answer.num_tokens > 1:
            cut = random.Random(len(answer.text)).randrange(1, answer.num_tokens)
            assert streamed(texts, case, cut=cut) == answer, (case, cut)
        last = case.output[answer.num_tokens - 1]
        num_in_runs += isinstance(answer.matched, str) and byte_of(tokenizer, last) is not None
    assert num_in_runs > count / 5, "many stop strings end in byte tokens"


def test_newlines_end_the_output_as_they_come(shared: Path) -> None:
    tokenizer, texts = load(shared / "tokenizers/tinyllama")
    newline = tokenizer.token_to_id("<0x0A>")
    assert newline is not None
    for min_tokens, num_tokens in ((0, 2), (1, 2), (2, 3), (7, 8)):
        sampling = SamplingParams(seed=1, stop=["\n\n"], min_tokens=min_tokens)
        answer = streamed(texts, Case([1], [newline] * 300, sampling))
        assert answer == Answer("\n" * (num_tokens - 2), num_tokens, "\n\n", STOP)


@pytest.mark.parametrize(
    ("steps", "num_tokens"),
    [
        ([decoders.ByteFallback()], 2),
        ([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")], 2),
        ([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()], 5),
        ([decoders.ByteFallback(), decoders.Metaspace()], 5),
    ],
)
def test_a_stop_string_in_a_byte_run_waits_for_its_end_if_another_step_than_fuse_follows_byte_fallback(
    steps: list[decoders.Decoder], num_tokens: int
) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<0x0A>": 1}, "a"))
    tokenizer.decoder = decoders.Sequence(steps)
    case = Case([0], [1, 1, 1, 1, 0, 0], SamplingParams(seed=1, stop=["\n\n"]))
    assert streamed(TokenTexts(tokenizer), case) == Answer("", num_tokens, "\n\n", STOP)


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_ends_the_output_at_the_token_that_completes_it(shared: Path, name: str) -> None:
    check(shared, name, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_ends_thousands_of_outputs_at_the_token_that_completes_it(shared: Path, name: str) -> None:
    check(shared, name, 5_000)
