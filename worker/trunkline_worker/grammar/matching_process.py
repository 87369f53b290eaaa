"""A matching process: holds the matchers of constrained sequences, and writes their masks into shared memory.

It is forked from the grammar process, whose tokenizer it shares. It has one thread: most calls of the library hold the
interpreter lock, and threads that take turns make it slower. So slow sequences have a process of their own.
"""

import socket
import time

from llguidance import LLTokenizer

from trunkline.engine.v1.grammar_pb2 import BeginMatch, BrokenMatch, MatchAnswer, MatchRequest
from trunkline_worker.grammar.compiled_grammars import CompiledGrammars
from trunkline_worker.grammar.mask_memory import MaskMemory
from trunkline_worker.grammar.matching import BUG, SLOW_S, CannotMatch, Matching, trace_of
from trunkline_worker.link.channel import FrameReader, frame

SEND_AFTER_S = 0.5e-3  # what has been found is sent after this time, or once nothing is left to do
RECEIVE_BYTES = 1 << 20


class MatchingProcess:
    """Answers an engine.

    index: of this process, for the memory
    memory: where masks are written
    """

    def __init__(self, connection: socket.socket, tokenizer: LLTokenizer, memory: MaskMemory, index: int) -> None:
        self._socket = connection
        self._tokenizer = tokenizer
        self._memory = memory
        self._index = index
        self._grammars = CompiledGrammars(tokenizer)
        self._begun: dict[int, BeginMatch] = {}  # slots of sequences that are not matched yet
        self._matching: dict[int, Matching] = {}
        self._took_s: dict[int, float] = {}  # time that the last answer took
        self._answer = MatchAnswer()

    def run(self) -> None:
        """Answers until the engine closes the socket."""
        frames = FrameReader()
        while data := self._socket.recv(RECEIVE_BYTES):
            for payload in frames.feed(data):
                self._take(MatchRequest.FromString(payload))

    def _take(self, request: MatchRequest) -> None:
        """Answers a message. The sequences of which the last answer took least time come first."""
        new: dict[int, list[int]] = {}
        for begin in request.begins:
            self._begun[begin.slot] = begin
            new[begin.slot] = []
        start, token_ids = 0, list(request.advanced_token_ids)
        for slot, count in zip(request.advanced_slots, request.advanced_counts, strict=True):
            new.setdefault(slot, []).extend(token_ids[start : start + count])
            start += count
        for slot in request.ended_slots:
            for slots in (self._begun, self._matching, self._took_s, new):
                slots.pop(slot, None)
        self._answer.free_slots.extend(request.ended_slots)
        sent_s = time.monotonic()
        for slot in sorted(new, key=lambda slot: self._took_s.get(slot, SLOW_S)):
            if time.monotonic() - sent_s > SEND_AFTER_S:
                self._send()
                sent_s = time.monotonic()
            self._advance(slot, new[slot])
        self._answer.is_last = True
        self._send()

    def _advance(self, slot: int, tokens: list[int]) -> None:
        """Takes in the output of a sequence, and answers with what may follow it, or that it cannot go on."""
        since_s = time.process_time()
        self._memory.begin_work(self._index, slot, time.monotonic())
        try:
            if begin := self._begun.pop(slot, None):
                matcher = self._grammars.fork(begin.digest, begin.grammar, begin.memory_bytes)
                self._matching[slot] = Matching(matcher, self._tokenizer, begin.output_token_ids)
            elif slot not in self._matching:
                return  # it could not begin, and the engine has not read of it yet
            matching = self._matching[slot]
            matching.advance(tokens)
            has_mask = matching.mask_into(self._memory.address(slot), self._memory.mask_bytes)
        except CannotMatch as error:
            self._break(slot, str(error))
        except BaseException as error:  # also a panic of the library
            self._break(slot, BUG, trace_of(error))
        else:
            self._took_s[slot] = time.process_time() - since_s
            if self._took_s[slot] > SLOW_S and not begin:
                self._answer.slow_slots.append(slot)
            self._answer.slots.append(slot)
            self._answer.num_output.append(matching.num_output)
            self._answer.forced_counts.append(len(matching.forced))
            self._answer.forced_token_ids.extend(matching.forced)
            self._answer.has_mask.append(has_mask)
        finally:
            self._memory.end_work(self._index)

    def _break(self, slot: int, reason: str, trace: str = "") -> None:
        self._answer.broken.append(BrokenMatch(slot=slot, reason=reason, trace=trace))

    def _send(self) -> None:
        if self._answer.ByteSize():
            self._socket.sendall(frame(self._answer))
            self._answer = MatchAnswer()
