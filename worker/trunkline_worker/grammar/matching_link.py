"""The engine's view of one matching process: the sequences in it, and what is to be told to it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from trunkline.engine.v1.grammar_pb2 import BeginMatch, MatchRequest
from trunkline_worker.grammar.connection import Connection
from trunkline_worker.grammar.mask_memory import Work


class UsableGrammar(NamedTuple):
    """A grammar that can be used."""

    digest: bytes
    text: str  # in the form that a matching process compiles
    memory_bytes: int
    slow: bool  # to compile it, or to find what may follow an output, takes long


@dataclass(slots=True, eq=False)
class Constrained:
    """A sequence that has a grammar."""

    sequence_id: int
    grammar: UsableGrammar
    output: list[int]
    slot: int = -1  # of its mask; -1 while it waits for one
    has_begun: bool = False  # the process knows of it


@dataclass(slots=True, eq=False)
class MatchingLink:
    """Collects changes, which message() returns at once."""

    index: int
    connection: Connection | None = None  # None: the process is not running
    sequences: dict[int, Constrained] = field(default_factory=dict)  # by slot
    num_asked: int = 0  # messages that it has not answered in full
    quiet_since_s: float = 0.0  # when it last answered; if it was not asked since, when it was
    fruitless_starts: int = 0  # since the last answer
    killed_for: Work | None = None  # what took too long, if the process is being killed
    _to_begin: dict[int, Constrained] = field(default_factory=dict)  # by slot
    _advanced: list[tuple[int, Sequence[int]]] = field(default_factory=list)  # slots and their new tokens
    _ended: list[int] = field(default_factory=list)  # slots
    _ending: set[int] = field(default_factory=set)  # slots of ended sequences that the process may still write to

    @property
    def has_changes(self) -> bool:
        return bool(self._to_begin or self._advanced or self._ended)

    def begin(self, sequence: Constrained) -> None:
        """Adds a sequence, which has a slot."""
        self.sequences[sequence.slot] = self._to_begin[sequence.slot] = sequence

    def advance(self, sequence: Constrained, tokens: Sequence[int]) -> None:
        """The sequence's output has grown by these tokens."""
        if sequence.has_begun:
            self._advanced.append((sequence.slot, tokens))

    def end(self, sequence: Constrained) -> bool:
        """Removes a sequence. Returns whether its slot is free; if not, freed() will return it."""
        del self.sequences[sequence.slot]
        self._to_begin.pop(sequence.slot, None)
        if sequence.has_begun:
            sequence.has_begun = False
            self._ended.append(sequence.slot)
            self._ending.add(sequence.slot)
        return sequence.slot not in self._ending

    def answered(self, *, is_last: bool) -> None:
        """The process has answered a message, or a part of one."""
        self.num_asked -= is_last
        self.quiet_since_s = time.monotonic()
        self.fruitless_starts = 0

    def freed(self, slots: Sequence[int]) -> set[int]:
        """The slots of ended sequences among these, to which the process writes no more."""
        free = self._ending.intersection(slots)
        self._ending -= free
        return free

    def begin_again(self) -> set[int]:
        """The process has ended: its sequences begin in the next one. Returns the slots that are free now."""
        self.connection = self.killed_for = None
        self.num_asked = 0
        free, self._ending = self._ending, set()
        self._advanced.clear()
        self._ended.clear()
        for sequence in self.sequences.values():
            sequence.has_begun = False
        self._to_begin = dict(self.sequences)
        return free

    def message(self) -> MatchRequest:
        """All changes since the last call."""
        if not self.num_asked:
            self.quiet_since_s = time.monotonic()
        self.num_asked += 1
        # Columns are filled at once: adding to a message takes longer than adding to a list.
        request = MatchRequest(
            begins=[self._begin(sequence) for sequence in self._to_begin.values()],
            advanced_slots=[slot for slot, _ in self._advanced],
            advanced_counts=[len(tokens) for _, tokens in self._advanced],
            advanced_token_ids=chain.from_iterable([tokens for _, tokens in self._advanced]),
            ended_slots=self._ended,
        )
        self._to_begin.clear()
        self._advanced.clear()
        self._ended.clear()
        return request

    def _begin(self, sequence: Constrained) -> BeginMatch:
        sequence.has_begun = True
        return BeginMatch(
            slot=sequence.slot,
            digest=sequence.grammar.digest,
            grammar=sequence.grammar.text,
            memory_bytes=sequence.grammar.memory_bytes,
            output_token_ids=sequence.output,
        )
