"""A grammar link with its processes, and what tests ask of it."""

import hashlib
import json
import random
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trunkline.v1.worker_pb2 import GrammarKind
from trunkline_worker.grammar.grammar_link import Allowed, Broken, Compiled, GrammarLink, Refused

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "tiny-tales" / "tokenizer.json"
DEMO_VOCAB, DEMO_EOS = 2048, 1
TIMEOUT_S = 30.0
BUSY = "too busy to compile"

News = Compiled | Refused | Allowed | Broken


def bits_of(mask: NDArray[np.int32]) -> list[int]:
    """The tokens that a mask allows."""
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


class GrammarRig:
    """Drives a link as an engine does. Masks are copied as they come."""

    def __init__(
        self, tokenizer: Path = DEMO, vocab_size: int = DEMO_VOCAB, eos: Sequence[int] = (DEMO_EOS,), slots: int = 64
    ) -> None:
        self.link = GrammarLink(tokenizer, vocab_size=vocab_size, eos_token_ids=eos, max_sequences=slots)
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.eos = min(eos)
        self.compiled: dict[bytes, Compiled | Refused] = {}
        self.allowed: dict[int, Allowed] = {}
        self.broken: dict[int, Broken] = {}

    def __enter__(self) -> "GrammarRig":
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def until(self, done: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Takes news until something is true."""
        end_s = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < end_s, "the link does not answer"
            select.select([self.link], [], [], self.link.tick() or 0.0)
            for news in self.link.take():
                if isinstance(news, Compiled | Refused):
                    self.compiled[news.digest] = news
                elif isinstance(news, Allowed):
                    mask = None if news.mask is None else news.mask.copy()
                    self.allowed[news.sequence_id] = news._replace(mask=mask)
                else:
                    self.broken[news.sequence_id] = news

    def compile(self, kind: int, text: str) -> tuple[bytes, Compiled | Refused]:
        """The digest of a grammar, and the answer. One that got too little time on a busy machine is sent again, as
        often as the link takes it."""
        digest = hashlib.sha256(bytes([kind]) + text.encode()).digest()
        while True:
            self.compiled.pop(digest, None)
            self.link.compile(digest, kind, text)
            self.until(lambda: digest in self.compiled)
            answer = self.compiled[digest]
            if isinstance(answer, Compiled) or BUSY not in answer.error.message:
                return digest, answer

    def schema(self, schema: Any) -> bytes:
        """The digest of a schema, which is compiled."""
        digest, answer = self.compile(GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, json.dumps(schema))
        assert isinstance(answer, Compiled), answer
        return digest

    def regex(self, pattern: str) -> bytes:
        """The digest of a regular expression, which is compiled."""
        digest, answer = self.compile(GrammarKind.GRAMMAR_KIND_REGEX, pattern)
        assert isinstance(answer, Compiled), answer
        return digest

    def begin(self, sequence_id: int, digest: bytes, output: Sequence[int] = ()) -> Allowed:
        self.link.begin(sequence_id, digest, output)
        return self.answer(sequence_id)

    def advance(self, sequence_id: int, tokens: Sequence[int]) -> Allowed:
        self.link.advance(sequence_id, tokens)
        return self.answer(sequence_id)

    def answer(self, sequence_id: int) -> Allowed:
        """What may follow a sequence's output, which has just changed."""
        self.allowed.pop(sequence_id, None)
        self.link.flush()
        self.until(lambda: sequence_id in self.allowed or sequence_id in self.broken)
        assert sequence_id not in self.broken, self.broken[sequence_id]
        return self.allowed[sequence_id]

    def generate(self, sequence_id: int, digest: bytes, seed: int, most: int = 200) -> list[int]:
        """A random output that a grammar allows, with the token that ends it unless it has `most` tokens."""
        chance = random.Random(seed)
        output: list[int] = []
        allowed = self.begin(sequence_id, digest)
        while len(output) < most:
            new = allowed.forced if allowed.forced else [chance.choice(bits_of(_mask(allowed)))]
            output += new
            if output[-1] == self.eos:
                break
            allowed = self.advance(sequence_id, new)
        self.link.end(sequence_id)
        self.link.flush()
        return output

    def text(self, output: Sequence[int]) -> str:
        """The text of a finished output."""
        assert output[-1] == self.eos
        return str(self.tokenizer.decode(list(output[:-1]), skip_special_tokens=False))


def _mask(allowed: Allowed) -> NDArray[np.int32]:
    assert allowed.mask is not None
    return allowed.mask
