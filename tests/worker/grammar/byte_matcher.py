"""A matcher whose tokens are bytes: what a grammar accepts, and samples of it."""

import json
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from trunkline.v1.worker_pb2 import GrammarKind
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import LIMITS

END = 256
SCHEMA = GrammarKind.GRAMMAR_KIND_JSON_SCHEMA
REGEX = GrammarKind.GRAMMAR_KIND_REGEX
EBNF = GrammarKind.GRAMMAR_KIND_EBNF
LARK = GrammarKind.GRAMMAR_KIND_LARK
CHOICE = GrammarKind.GRAMMAR_KIND_CHOICE
TAGS = GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG


class Bytes:
    """A tokenizer with a token for each byte."""

    bos_token_id = None
    eos_token_id = END
    unk_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


class DoesNotCompile(Exception):
    """llguidance refuses the grammar."""


def matcher_of(kind: int, text: str) -> LLMatcher:
    """Raises RequestRefused or DoesNotCompile."""
    matcher = _compiled(llguidance_grammar(kind, text, compiles=lambda grammar: not _compiled(grammar).is_error()))
    if matcher.is_error():
        raise DoesNotCompile(matcher.get_error())
    return matcher


def _compiled(grammar: str) -> LLMatcher:
    return LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)


def accepts(matcher: LLMatcher, text: str | bytes) -> bool:
    tokens = list(text.encode() if isinstance(text, str) else text)
    fresh = matcher.deep_copy()
    return fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()


def sample(matcher: LLMatcher, random: Random, max_bytes: int, begun: bytes = b"") -> str | None:
    """A random text that the matcher accepts, and that begins as is given; None if it is not complete after
    `max_bytes`."""
    fresh = matcher.deep_copy()
    text = bytearray(begun)
    assert fresh.try_consume_tokens(list(begun)) == len(begun)
    for _ in range(max_bytes):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(fresh.compute_bitmask(), np.uint8), bitorder="little"))
        assert len(allowed), "no token may follow"
        if allowed[-1] == END and (len(allowed) == 1 or random.random() < 0.2):
            return text.decode()
        allowed = allowed[allowed < END]
        # Half of the time what ends strings and containers soon, so that most documents end.
        closing = [byte for byte in allowed if byte in b'"}],']
        byte = random.choice(closing if closing and random.random() < 0.5 else [*allowed])
        assert fresh.consume_token(int(byte)), "a token of the mask is refused"
        text.append(int(byte))
    return None


def compact(value: Any) -> str:
    """A document in the form that grammars of JSON have."""
    return json.dumps(value, ensure_ascii=False)
