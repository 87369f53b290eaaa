"""A GrammarLink without processes: answers are made at once, and delivered as late as a test wants."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from trunkline.status import RequestRefused, invalid
from trunkline_worker.grammar.grammar_link import Allowed, Broken, Compiled, Events, GrammarLink, Refused
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import CannotMatch, Matching, compiled
from trunkline_worker.step.plan import RowError

News = Compiled | Refused | Allowed | Broken


class InProcessLink(GrammarLink):
    """late: share of the calls of take() that do not deliver a piece of news yet"""

    def __init__(self, model: Path, vocab: int, eos: Sequence[int], *, late: float = 0.0, seed: int = 1) -> None:
        self._tokenizer = LLTokenizer(str(model / "tokenizer.json"), n_vocab=vocab, eos_token=[*eos])
        self._num_words, self._late = -(-vocab // 32), late
        self._draw = random.Random(seed)
        self._compiled: dict[bytes, LLMatcher] = {}
        self._matchings: dict[int, Matching] = {}
        self._news: list[News] = []
        self.events = Events()
        self.num_forced = self.num_late = 0

    @property
    def num_matched(self) -> int:
        """Sequences that have begun and not ended."""
        return len(self._matchings)

    def compile(self, digest: bytes, kind: int, text: str, tenant: str = "") -> None:
        try:
            self._compiled[digest] = compiled(self._tokenizer, llguidance_grammar(kind, text))
        except CannotMatch as error:
            self._news.append(Refused(digest, invalid("grammar", str(error))))
        except RequestRefused as refused:
            self._news.append(Refused(digest, refused))
        else:
            self._news.append(Compiled(digest))

    def withdraw(self, digest: bytes) -> None:
        pass

    def begin(self, sequence_id: int, digest: bytes, output: Sequence[int] = ()) -> None:
        assert sequence_id not in self._matchings

        def begun() -> None:
            matcher = self._compiled[digest].deep_copy()
            self._matchings[sequence_id] = Matching(matcher, self._tokenizer, output)

        self._answer(sequence_id, begun)

    def advance(self, sequence_id: int, tokens: Sequence[int]) -> None:
        self._answer(sequence_id, lambda: self._matchings[sequence_id].advance(tokens))

    def _answer(self, sequence_id: int, take_in: Callable[[], None]) -> None:
        mask = np.zeros(self._num_words, np.int32)
        try:
            take_in()
            matching = self._matchings[sequence_id]
            has_mask = matching.mask_into(mask.ctypes.data, mask.nbytes)
        except CannotMatch as error:
            self._news.append(Broken(sequence_id, RowError(str(error))))
            return
        forced = [*matching.forced]
        self.num_forced += len(forced)
        self._news.append(Allowed(sequence_id, matching.num_output, forced, mask if has_mask else None))

    def end(self, sequence_id: int) -> None:
        self._matchings.pop(sequence_id, None)
        self._news = [
            one for one in self._news if isinstance(one, Compiled | Refused) or one.sequence_id != sequence_id
        ]

    def flush(self) -> None:
        pass

    def take(self) -> list[News]:
        delivered: list[News] = []
        kept: list[News] = []
        for one in self._news:
            (kept if self._draw.random() < self._late else delivered).append(one)
        self.num_late += len(kept)
        self._news = kept
        return delivered

    def tick(self) -> float | None:
        return 0.0 if self._news else None

    def close(self) -> None:
        pass
