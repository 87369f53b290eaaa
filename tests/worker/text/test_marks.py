"""Special tokens that mark reasoning and tool calls: their text is kept where the answer is parsed."""

import pytest
from canitoolcall.fixtures import load_families, load_fixtures
from tokenizers import Tokenizer

from tests.contract.tool_calls import format_of, parsed
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.answer.answer_parser import PARSERS
from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Resume, Submit
from trunkline_worker.front.text.output_stream import OutputStream
from trunkline_worker.front.text.token_texts import TokenTexts

FAMILIES = load_families()
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
TOKENIZER.add_special_tokens(["<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|pad|>"])
TEXTS = TokenTexts(TOKENIZER, PARSERS["harmony"].marks())
EOS = frozenset(TOKENIZER.encode("<|call|>", add_special_tokens=False).ids)
PROMPT = TOKENIZER.encode("Once").ids
ANSWER = "<|channel|>analysis<|message|>Hm, ä🦊.<|pad|><|end|>{}<|call|>"
TOKENS = TOKENIZER.encode(ANSWER, add_special_tokens=False).ids
KEEP = SamplingParams(keep_marks=True)
MARKED = "<|channel|>analysis<|message|>Hm, ä🦊.<|end|>{}"


def stream_of(sampling: SamplingParams, num_had: int = 0, sent: int = 0) -> OutputStream:
    resume = Resume(output_token_ids=TOKENS[:num_had], text_bytes_sent=sent) if num_had else None
    submit = Submit(prompt_token_ids=PROMPT, sampling=sampling, resume=resume)
    return OutputStream(submit, TEXTS, eos=EOS, max_total=1000)


def text_of(stream: OutputStream, tokens: list[int]) -> str:
    chunks = [stream.take(EngineOutput(token_ids=[token])).chunk for token in tokens]
    assert stream.finished
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (SamplingParams(), "analysisHm, ä🦊.{}"),
        (KEEP, MARKED),
        (SamplingParams(keep_marks=True, include_stop=True), MARKED + "<|call|>"),
        (SamplingParams(keep_marks=True, keep_special_tokens=True), ANSWER.removesuffix("<|call|>")),
    ],
)
def test_marks_are_kept_and_other_special_tokens_and_the_end_are_not(sampling: SamplingParams, text: str) -> None:
    assert text_of(stream_of(sampling), TOKENS) == text


def test_an_answer_with_marks_continues_after_a_failover() -> None:
    for num_had in range(1, len(TOKENS)):
        first = stream_of(KEEP)
        had = "".join(first.take(EngineOutput(token_ids=[token])).chunk.text for token in TOKENS[:num_had])
        second = stream_of(KEEP, num_had, len(had.encode()))
        assert had + text_of(second, TOKENS[num_had:]) == MARKED


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tokens_of_fixtures_become_the_text_that_parsers_read(family: str) -> None:
    """The marks are special tokens here, and each token comes alone."""
    for fixture in load_fixtures(families=[family]):
        marks = PARSERS[format_of(fixture, FAMILIES[family])].marks()
        tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        tokenizer.add_special_tokens(
            [token for token in FAMILIES[family].markers if any(token in mark for mark in marks)]
        )
        tokens = tokenizer.encode(fixture.raw_output, add_special_tokens=False).ids
        submit = Submit(prompt_token_ids=PROMPT, sampling=SamplingParams(keep_marks=True, max_tokens=len(tokens)))
        stream = OutputStream(submit, TokenTexts(tokenizer, marks), eos=frozenset(), max_total=100_000)
        texts = [stream.take(EngineOutput(token_ids=[token])).chunk.text for token in tokens]
        assert "".join(texts) == fixture.raw_output
        whole = parsed(fixture, FAMILIES[family], [fixture.raw_output])
        assert parsed(fixture, FAMILIES[family], texts) == whole, fixture.id


def test_tokens_of_other_formats_are_no_marks() -> None:
    texts = TokenTexts(TOKENIZER, PARSERS["hermes"].marks())
    kept = texts.units(keep_special=False, keep_marks=True)
    assert [kept[token] for token in TOKENS] == [texts.units(keep_special=False)[token] for token in TOKENS]
