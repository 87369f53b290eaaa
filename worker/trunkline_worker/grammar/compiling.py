"""Compiles a grammar in a process of its own, which is forked from the grammar process and may crash, hang or run out
of memory. Whatever a matching process compiles has been compiled here before."""

import ctypes
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from random import Random

from llguidance import LLTokenizer

from trunkline.engine.v1.grammar_pb2 import CompileAnswer, CompileRequest
from trunkline.status import CODE_INTERNAL, CODE_RESOURCE_EXHAUSTED, INTERNAL, OVERLOADED, RequestRefused, invalid
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import BUG, SLOW_S, CannotMatch, Matching, compiled, trace_of
from trunkline_worker.grammar.structural_literals import AddedTokens
from trunkline_worker.link.lifeline import die_with

COMPILE_TIMEOUT_S = 1.5
FAIR_SHARE = 0.5  # of the timeout: a process that got less time on a CPU may have done nothing wrong
# Of an output that is drawn at random, so that most grammars that are too complex are refused at once:
TRIED_TOKENS = 256
TRIED_S = 0.2  # of a CPU
SLOW_TO_COMPILE_S = 0.1  # of a CPU: a matching process compiles it again, and matches nothing meanwhile
COMPILE_BYTES = 512 << 20  # of address space, beside that of the grammar process
PIPE_BYTES = 1 << 16


@dataclass(slots=True)
class Compiling:
    """A grammar that a process is compiling."""

    digest: bytes
    tenant: str
    pid: int
    pipe: int  # its end closes when the process ends
    started_s: float
    answer: bytearray

    @classmethod
    def begin(cls, request: CompileRequest, tokenizer: LLTokenizer, tokens: AddedTokens) -> "Compiling":
        """Forks a process. The calling process must have no other threads."""
        ours, theirs = os.pipe()
        parent = os.getpid()
        if pid := os.fork():
            os.close(theirs)
            return cls(request.digest, request.tenant, pid, ours, time.monotonic(), bytearray())
        try:
            confine(parent, COMPILE_BYTES)
            with os.fdopen(theirs, "wb") as pipe:
                pipe.write(answer_to(request, tokenizer, tokens).SerializeToString())
        finally:
            os._exit(0)

    def receive(self) -> bool:
        """Takes what the process has written. Returns whether it has ended."""
        data = os.read(self.pipe, PIPE_BYTES)
        self.answer += data
        return not data

    def is_late(self, now_s: float) -> bool:
        return now_s > self.started_s + COMPILE_TIMEOUT_S

    def end(self) -> CompileAnswer:
        """Ends the process, if it has not ended. Returns its answer, or what its end means."""
        hung = time.monotonic() > self.started_s + COMPILE_TIMEOUT_S
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the id is its own
        usage = os.wait4(self.pid, 0)[2]
        if self.answer and not hung:
            answer = CompileAnswer.FromString(bytes(self.answer))
        elif not hung:
            refused = invalid("grammar", "compiling it takes too much memory, or breaks the compiler")
            answer = CompileAnswer(error=refused.to_proto(), poisonous=True)
        elif usage.ru_utime + usage.ru_stime > FAIR_SHARE * COMPILE_TIMEOUT_S:
            refused = invalid("grammar", f"compiling it takes longer than {COMPILE_TIMEOUT_S} s")
            answer = CompileAnswer(error=refused.to_proto(), poisonous=True)
        else:
            message = "this worker is too busy to compile the grammar"
            refused = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=1000)
            answer = CompileAnswer(error=refused.to_proto())
        answer.digest = self.digest
        return answer


def answer_to(request: CompileRequest, tokenizer: LLTokenizer, tokens: AddedTokens) -> CompileAnswer:
    """Compiles a grammar, and finds what may follow an empty output and the first tokens after it."""
    before = most_resident_bytes()
    chance = Random(0)  # the answer depends on the grammar alone
    try:
        grammar = llguidance_grammar(request.kind, request.text, tokens, partial(_compiles, tokenizer))
        mask = (ctypes.c_uint32 * ((tokenizer.vocab_size + 31) // 32))()
        before_s = time.process_time()
        matcher = compiled(tokenizer, grammar)
        begun_s = since_s = time.process_time()
        slow = begun_s - before_s > SLOW_TO_COMPILE_S
        matching = Matching(matcher, tokenizer)
        for _ in range(TRIED_TOKENS):
            if not matching.mask_into(ctypes.addressof(mask), ctypes.sizeof(mask)):
                break
            slow |= time.process_time() - since_s > SLOW_S
            since_s = time.process_time()
            token = drawn(int.from_bytes(mask, "little"), chance.randrange(tokenizer.vocab_size))
            if token in tokenizer.eos_tokens or since_s > begun_s + TRIED_S:
                break
            matching.advance([*matching.forced, token])
    except CannotMatch as error:
        return CompileAnswer(error=invalid("grammar", str(error)).to_proto())
    except RequestRefused as refused:
        return CompileAnswer(error=refused.to_proto())
    except MemoryError:
        raise  # the process ends without an answer
    except Exception as bug:
        internal = RequestRefused(CODE_INTERNAL, INTERNAL, f"grammar: {BUG}")
        return CompileAnswer(error=internal.to_proto(), trace=trace_of(bug))
    return CompileAnswer(grammar=grammar, memory_bytes=most_resident_bytes() - before, slow=slow)


def _compiles(tokenizer: LLTokenizer, grammar: str) -> bool:
    try:
        compiled(tokenizer, grammar)
    except CannotMatch:
        return False
    return True


def drawn(mask: int, start: int) -> int:
    """The first token from `start` on that a mask allows; its first token if there is none."""
    later = mask >> start << start or mask
    return (later & -later).bit_length() - 1


def confine(parent: int, more_bytes: int) -> None:
    """Prepares a forked process for hostile grammars. It ends with its parent. It prints nothing, because a panic of
    the library quotes outputs. Its address space may grow by so much (Linux); the library ends a process that needs
    more."""
    die_with(parent)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def most_resident_bytes() -> int:
    """The most memory that this process has had so far, which includes that of its parent when it was forked."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1024 if sys.platform == "linux" else 1)
