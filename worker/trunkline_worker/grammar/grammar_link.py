"""The engine's end of its grammar process and matching processes (grammar_process.py).

Whatever a grammar does to these processes, the engine goes on, and so do the sequences of other grammars: they are
matched again from their output in a new process, and sit out steps meanwhile. Slow sequences delay no others, because
they have a matching process of their own.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from trunkline.engine.v1.grammar_pb2 import CompileAnswer, CompileRequest, GrammarRequest, MatchAnswer
from trunkline.status import CODE_INTERNAL, CODE_RESOURCE_EXHAUSTED, INTERNAL, OVERLOADED, RequestRefused, invalid
from trunkline.v1.worker_pb2 import GrammarKind
from trunkline_worker.grammar.connection import Connection
from trunkline_worker.grammar.mask_memory import MaskMemory
from trunkline_worker.grammar.matching_link import Constrained, MatchingLink, UsableGrammar
from trunkline_worker.link.channel import frame
from trunkline_worker.step.plan import RowError

MAX_SEQUENCES = 1024  # that are matched at once
MAX_TEXT_BYTES = 256 << 10  # of one grammar
MAX_KEPT_BYTES = 64 << 20  # of compiled grammars' texts, beside those that sequences await
MAX_FAULTY = 1024  # grammars of which faults are remembered
REFUSED_AFTER = 4  # points: a grammar gets as many for breaking the compiler
MATCHING_POINTS = 2  # for ending a matching process, or taking too long in it
BUSY_POINTS = 1  # for not being compiled because there was little time on a CPU, or the grammar process ended
FORGIVEN_AFTER_S = 600.0
FAULTY = "it has crashed or stopped this worker's compiler before"
MOST_SENT = 16  # grammars that the grammar process has to compile
MOST_QUEUED = 256  # of one tenant, that wait for it
BELL_BYTES = 4096
MATCH_TIMEOUT_S = 5.0  # for what may follow one token, or a whole output that is matched again
START_TIMEOUT_S = 60.0  # to load the tokenizer
ANSWER_TIMEOUT_S = 10.0  # of a process that has something to answer: longer than compiling and matching may take
TICK_S = 0.25
UNSENT_TICK_S = 1e-3
KILL_TIMEOUT_S = 1.0
MOST_FRUITLESS_STARTS = 5  # of a process that ends without an answer
MATCHING_PROCESSES = min(4, max(1, (os.cpu_count() or 1) // 4))  # beside the slow one


class Compiled(NamedTuple):
    """Sequences with this grammar may begin."""

    digest: bytes


class Refused(NamedTuple):
    """The grammar cannot be used."""

    digest: bytes
    error: RequestRefused
    trace: str = ""  # a bug's traceback, for the log


class Allowed(NamedTuple):
    """What may follow a sequence's output; the answer to begin() and advance(). If advance() is called again before an
    answer, only the last call is answered."""

    sequence_id: int
    num_output: int  # output tokens before the forced ones
    forced: list[int]  # tokens that must follow, in order. The end of the grammar is an end-of-sequence token.
    # What may follow `forced`; None if that ends the sequence. Valid until the next advance() or end() of the sequence.
    mask: NDArray[np.int32] | None  # [num_words]


class Broken(NamedTuple):
    """The sequence cannot go on. It has ended for the link."""

    sequence_id: int
    error: RowError


News = Compiled | Refused | Allowed | Broken


@dataclass(slots=True)
class Events:
    """What metrics count, until it is reported."""

    compiles: list[tuple[str, float]] = field(default_factory=list)  # the outcome, and the time in seconds
    lost_processes: int = 0


class GrammarLink:
    """All calls come from one thread, and none waits for a process."""

    def __init__(
        self, tokenizer: Path, *, vocab_size: int, eos_token_ids: Sequence[int], max_sequences: int = MAX_SEQUENCES
    ) -> None:
        """
        tokenizer: a tokenizer.json
        vocab_size: of the model: masks have a bit for each of its tokens
        max_sequences: that are matched at once; the answers of more wait until others end
        """
        self._memory, self._memory_file = MaskMemory.create(vocab_size, max_sequences)
        self._masks = np.asarray(self._memory.masks).reshape(max_sequences, -1)  # [num_slots, num_words]
        self._arguments = ["--tokenizer", str(tokenizer), "--vocab-size", str(vocab_size)]
        self._arguments += ["--slots", str(max_sequences), "--memory-fd", str(self._memory_file.fileno())]
        self._arguments += ["--eos", *map(str, sorted(eos_token_ids))]
        self._vocab_size = vocab_size
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_rope = socket.socketpair()  # rings when there is news that no process sent
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._news: list[News] = []
        self.events = Events()
        self._process: subprocess.Popen[bytes] | None = None
        self._compiler: Connection | None = None  # to the grammar process
        self._heard_s = 0.0  # when it last answered
        self._started_s: float | None = None  # when it, or a matching process, first answered since its start
        self._fruitless_starts = 0  # since an answer

        self._grammars: OrderedDict[bytes, UsableGrammar] = OrderedDict()  # used last: last
        self._kept_bytes = 0
        self._awaited: Counter[bytes] = Counter()  # sequences that have not begun, by grammar
        self._queued: dict[bytes, CompileRequest] = {}  # not sent yet
        self._compiling: dict[bytes, tuple[CompileRequest, float]] = {}  # and since when
        self._faults: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # points, and when the last were given

        self._matchers = [MatchingLink(index) for index in range(MATCHING_PROCESSES + 1)]  # the last is the slow one
        self._sequences: dict[int, tuple[Constrained, MatchingLink]] = {}
        self._free_slots = list(range(max_sequences))
        self._without_slot: deque[tuple[Constrained, MatchingLink]] = deque()

    def fileno(self) -> int:
        """Readable when take() has news."""
        return self._selector.fileno()

    # Grammars

    def compile(self, digest: bytes, kind: int, text: str, tenant: str = "") -> None:
        """Compiles a grammar for a sequence of a tenant, and keeps it until begin() or withdraw() is called for the
        sequence. Answered with Compiled or Refused, also if the grammar is known."""
        self._awaited[digest] += 1
        if digest in self._grammars:
            self._grammars.move_to_end(digest)
            self._tell(Compiled(digest))
        elif self._points(digest) >= REFUSED_AFTER:
            self._tell(Refused(digest, invalid("grammar", FAULTY)))
        elif len(text.encode()) > MAX_TEXT_BYTES:
            self._tell(Refused(digest, invalid("grammar", f"it is longer than {MAX_TEXT_BYTES} bytes")))
        elif digest not in self._compiling and digest not in self._queued:
            if sum(one.tenant == tenant for one in self._queued.values()) >= MOST_QUEUED:
                message = "too many grammars wait to be compiled"
                refused = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=1000)
                self._tell(Refused(digest, refused))
                return
            request = CompileRequest(digest=digest, kind=GrammarKind.ValueType(kind), text=text, tenant=tenant)
            self._queued[digest] = request
            self._ring()

    def withdraw(self, digest: bytes) -> None:
        """A sequence for which compile() was called has ended without begin()."""
        self._awaited[digest] -= 1
        if self._awaited[digest] <= 0:
            del self._awaited[digest]
            self._queued.pop(digest, None)

    def _send_queued(self) -> None:
        """Sends what can be compiled. Tenants of which least is being compiled come first, and one tenant leaves a
        place to others."""
        while self._queued and len(self._compiling) < MOST_SENT:
            compiler = self._compiler or self._start()
            sent = Counter(one.tenant for one, _ in self._compiling.values())
            digest = min(self._queued, key=lambda digest: sent[self._queued[digest].tenant])
            if sent[self._queued[digest].tenant] >= MOST_SENT - 1:
                return
            chosen = self._queued.pop(digest)
            self._compiling[digest] = chosen, time.monotonic()
            compiler.send(frame(GrammarRequest(compile=chosen)))

    def _take_compiled(self, payload: bytes) -> None:
        """Raises DecodeError if a broken process has sent this."""
        answer = CompileAnswer.FromString(payload)
        self._heard_s, self._fruitless_starts = time.monotonic(), 0
        self._started_s = self._started_s or self._heard_s
        if found := self._compiling.pop(answer.digest, None):
            self.events.compiles.append((outcome_of(answer), self._heard_s - found[1]))
        if answer.HasField("error"):
            if answer.poisonous:
                self._blame(answer.digest, REFUSED_AFTER)
            elif answer.error.reason == OVERLOADED:
                self._blame(answer.digest, BUSY_POINTS)
            self._news.append(Refused(answer.digest, RequestRefused.from_proto(answer.error), answer.trace))
            return
        self._grammars[answer.digest] = UsableGrammar(answer.digest, answer.grammar, answer.memory_bytes, answer.slow)
        self._kept_bytes += len(answer.grammar)
        for digest in [*self._grammars] if self._kept_bytes > MAX_KEPT_BYTES else ():
            if self._kept_bytes > MAX_KEPT_BYTES and digest not in self._awaited:
                self._forget(digest)
        self._news.append(Compiled(answer.digest))

    def _forget(self, digest: bytes) -> None:
        if grammar := self._grammars.pop(digest, None):
            self._kept_bytes -= len(grammar.text)

    def _blame(self, digest: bytes, points: int) -> None:
        points += self._points(digest)
        self._faults[digest] = points, time.monotonic()
        self._faults.move_to_end(digest)
        if points >= REFUSED_AFTER:
            self._forget(digest)
        if len(self._faults) > MAX_FAULTY:
            self._faults.popitem(last=False)

    def _points(self, digest: bytes) -> int:
        """A grammar's points that are not forgiven."""
        forgiven_s = time.monotonic() - FORGIVEN_AFTER_S
        while self._faults and next(iter(self._faults.values()))[1] < forgiven_s:
            self._faults.popitem(last=False)
        return self._faults[digest][0] if digest in self._faults else 0

    # Sequences

    def begin(self, sequence_id: int, digest: bytes, output: Sequence[int] = ()) -> None:
        """Begins a sequence after this output. Its grammar has been compiled."""
        self.withdraw(digest)
        grammar = self._grammars.get(digest)
        if grammar is None:
            self._tell(Broken(sequence_id, RowError(FAULTY)))
            return
        self._grammars.move_to_end(digest)
        self._enqueue(Constrained(sequence_id, grammar, list(output)))

    def advance(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Adds committed tokens to a sequence's output. Has no effect on a sequence that is broken."""
        if found := self._sequences.get(sequence_id):
            sequence, matcher = found
            sequence.output += tokens
            if sequence.grammar.slow and matcher is not self._matchers[-1]:
                self.end(sequence_id)
                self._enqueue(Constrained(sequence_id, sequence.grammar, sequence.output))
            else:
                matcher.advance(sequence, tokens)

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence, if it is not broken."""
        if found := self._sequences.pop(sequence_id, None):
            sequence, matcher = found
            if sequence.slot < 0:
                self._without_slot.remove(found)
            elif matcher.end(sequence):
                self._give_slots([sequence.slot])

    def flush(self) -> None:
        """Sends what has changed since the last call, as one message to each process."""
        try:
            self._send_queued()
            for matcher in self._matchers:
                if matcher.has_changes:
                    connection = matcher.connection or self._start_matching(matcher)
                    connection.send(frame(matcher.message()))
            for connection in self._connections():
                connection.send()
        except OSError as error:  # a process cannot be started
            self._grammar_process_died(str(error))

    def _enqueue(self, sequence: Constrained) -> None:
        """Chooses a process for a sequence, which gets a slot as soon as one is free."""
        *others, slow = self._matchers
        matcher = slow if sequence.grammar.slow else min(others, key=lambda one: len(one.sequences))
        self._sequences[sequence.sequence_id] = sequence, matcher
        self._without_slot.append((sequence, matcher))
        self._give_slots([])

    def _give_slots(self, free: Iterable[int]) -> None:
        self._free_slots += free
        while self._without_slot and self._free_slots:
            sequence, matcher = self._without_slot.popleft()
            sequence.slot = self._free_slots.pop()
            matcher.begin(sequence)

    def _take_matched(self, matcher: MatchingLink, payload: bytes) -> None:
        """Raises ValueError or DecodeError if a broken process has sent this."""
        answer = MatchAnswer.FromString(payload)
        matcher.answered(is_last=answer.is_last)
        self._started_s, self._fruitless_starts = self._started_s or time.monotonic(), 0
        forced_ids = list(answer.forced_token_ids)
        if forced_ids and not 0 <= min(forced_ids) <= max(forced_ids) < self._vocab_size:
            raise ValueError("a forced token is out of range")
        start = 0
        columns = list(answer.slots), list(answer.num_output), list(answer.forced_counts), list(answer.has_mask)
        for slot, num_output, count, has_mask in zip(*columns, strict=True):
            forced = forced_ids[start : start + count]
            start += count
            sequence = matcher.sequences.get(slot)
            if sequence is not None and num_output == len(sequence.output):
                mask = self._masks[slot] if has_mask else None
                self._news.append(Allowed(sequence.sequence_id, num_output, forced, mask))
        for broken in answer.broken:
            if sequence := matcher.sequences.get(broken.slot):
                self._break(sequence, RowError(broken.reason, broken.trace))
        for slot in answer.slow_slots:
            if sequence := matcher.sequences.get(slot):
                self._set_apart(sequence)
        if answer.free_slots:
            self._give_slots(matcher.freed(answer.free_slots))

    def _set_apart(self, sequence: Constrained) -> None:
        """Has a slow sequence go on in the process for them from its next token on, and others of its grammar begin
        there."""
        sequence.grammar = sequence.grammar._replace(slow=True)
        if sequence.grammar.digest in self._grammars:
            self._grammars[sequence.grammar.digest] = sequence.grammar

    def _break(self, sequence: Constrained, error: RowError) -> None:
        self.end(sequence.sequence_id)
        self._tell(Broken(sequence.sequence_id, error))

    # News

    def take(self) -> list[News]:
        """What has been found since the last call."""
        if self._compiler is not None:
            payloads = self._compiler.receive()
            try:
                for payload in payloads or ():
                    self._take_compiled(payload)
            except DecodeError:
                payloads = None
            if payloads is None:
                self._grammar_process_died("the grammar process ended")
        for matcher in self._matchers:
            if matcher.connection is not None:
                self._take_from(matcher, matcher.connection)
        self.flush()  # what begins again
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(BELL_BYTES)
        news, self._news = self._news, []
        return news

    def _take_from(self, matcher: MatchingLink, connection: Connection) -> None:
        payloads = connection.receive()
        try:
            for payload in payloads or ():
                self._take_matched(matcher, payload)
        except (ValueError, DecodeError):
            payloads = None
        if payloads is None:
            self._matching_process_died(matcher, connection)

    def tick(self) -> float | None:
        """Ends processes that take too long. Returns the time until the next call in seconds; None: nothing is
        outstanding, so no call is needed before the next compile() or begin()."""
        if not (self._queued or self._compiling or self._sequences):
            return None
        now_s = time.monotonic()
        for matcher in self._matchers:
            work = self._memory.work(matcher.index)
            if matcher.killed_for or not (matcher.connection and self._compiler and work):
                continue
            if work.since_s < now_s - MATCH_TIMEOUT_S:
                matcher.killed_for = work
                self._compiler.send(frame(GrammarRequest(kill_matching=matcher.index)))  # take() finds it dead
        quiet_since_s = [matcher.quiet_since_s for matcher in self._matchers if matcher.num_asked]
        if self._compiling:
            quiet_since_s.append(max(self._heard_s, min(since_s for _, since_s in self._compiling.values())))
        timeout_s = ANSWER_TIMEOUT_S if self._started_s else START_TIMEOUT_S
        since_s = max(self._started_s or 0.0, min(quiet_since_s, default=now_s))
        if self._process is not None and since_s < now_s - timeout_s:
            self._process.kill()  # take() finds its sockets closed
        is_behind = any(connection.is_behind for connection in self._connections())
        return UNSENT_TICK_S if is_behind else TICK_S

    def close(self) -> None:
        """Ends the processes."""
        self._drop_processes()
        self._selector.close()
        self._bell.close()
        self._bell_rope.close()
        self._memory_file.close()

    def _tell(self, news: News) -> None:
        """Adds news that did not come from a process."""
        self._news.append(news)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell_rope.send(b"!")

    # Processes

    def _start(self) -> Connection:
        """Starts the grammar process."""
        self._started_s = None
        ours, theirs = socket.socketpair()
        self._compiler = Connection(ours)
        self._selector.register(ours, selectors.EVENT_READ)
        arguments = ["--socket-fd", str(theirs.fileno()), "--parent", str(os.getpid()), *self._arguments]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trunkline_worker.grammar.grammar_process", *arguments],
                pass_fds=[theirs.fileno(), self._memory_file.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return self._compiler

    def _start_matching(self, matcher: MatchingLink) -> Connection:
        """Starts a matching process, which ends the one before."""
        compiler = self._compiler or self._start()
        ours, theirs = socket.socketpair()
        matcher.connection = Connection(ours)
        self._selector.register(ours, selectors.EVENT_READ)
        compiler.send(frame(GrammarRequest(start_matching=matcher.index)), theirs)
        return matcher.connection

    def _matching_process_died(self, matcher: MatchingLink, connection: Connection) -> None:
        """Ends the sequence that the process was working on. All others begin again."""
        work, killed_for = self._memory.work(matcher.index), matcher.killed_for
        # If it was killed for work that it has finished meanwhile, what it has begun since is innocent.
        guilty = matcher.sequences.get(work.slot) if work and killed_for in (None, work) else None
        self._drop(connection)
        self._begin_again(matcher)
        self.events.lost_processes += 1
        matcher.fruitless_starts += 1
        if guilty:
            self._blame(guilty.grammar.digest, MATCHING_POINTS)
            late = "what may follow the output takes too long to find"
            self._break(guilty, RowError(late if killed_for else "matching the output broke off"))
        elif matcher.fruitless_starts > MOST_FRUITLESS_STARTS:
            for sequence in list(matcher.sequences.values()):
                reason = "the process that matches grammars does not start"
                self._break(sequence, RowError(reason, trace=reason))

    def _grammar_process_died(self, trace: str) -> None:
        """All sequences begin again, unless this happens again and again. What was being compiled is compiled again, if
        the process had answered before, and the grammar has not met this too often."""
        self._drop_processes()
        for matcher in self._matchers:
            self._begin_again(matcher)
        compiling, self._compiling = self._compiling, {}
        refused: list[bytes] = []
        for digest, (interrupted, _) in compiling.items():
            self._blame(digest, BUSY_POINTS)
            if self._started_s and self._points(digest) < REFUSED_AFTER:
                self._queued[digest] = interrupted
            else:
                refused.append(digest)
        self.events.lost_processes += 1
        self._fruitless_starts += 1
        if self._fruitless_starts > MOST_FRUITLESS_STARTS:
            refused += self._queued
            self._queued.clear()
            for sequence, _ in list(self._sequences.values()):
                self._break(sequence, RowError("the grammar process does not start", trace))
        message = "grammar: the process that compiles it broke off; see the worker's log"
        for digest in refused:
            self._tell(Refused(digest, RequestRefused(CODE_INTERNAL, INTERNAL, message)))

    def _begin_again(self, matcher: MatchingLink) -> None:
        self._memory.end_work(matcher.index)
        self._give_slots(matcher.begin_again())

    def _connections(self) -> list[Connection]:
        ends = (self._compiler, *(matcher.connection for matcher in self._matchers))
        return [connection for connection in ends if connection is not None]

    def _drop_processes(self) -> None:
        for connection in self._connections():
            self._drop(connection)
        self._compiler = None
        if self._process is not None:
            self._process.kill()  # which ends the processes that it has forked
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT_S)
            self._process = None

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()


def outcome_of(answer: CompileAnswer) -> str:
    """A label for metrics."""
    if not answer.HasField("error"):
        return "compiled"
    return "harmful" if answer.poisonous else answer.error.reason
