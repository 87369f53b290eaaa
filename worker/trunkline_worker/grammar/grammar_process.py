"""The grammar process: compiles grammars for an engine, and forks the matching processes.

Grammars come from clients, and the library that compiles them can be made to crash, hang and fill the memory. So this
process only loads the tokenizer. It forks a process for each grammar that is compiled, and a few for the matchers. Any
of them may end at any time, and the tokenizer need not be loaded again. It ends with its engine.
"""

import argparse
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections import Counter, deque

from llguidance import LLTokenizer

from trunkline.engine.v1.grammar_pb2 import CompileRequest, GrammarRequest
from trunkline_worker.grammar.compiling import Compiling, confine
from trunkline_worker.grammar.mask_memory import MaskMemory
from trunkline_worker.grammar.matching_process import MatchingProcess
from trunkline_worker.grammar.structural_literals import AddedTokens
from trunkline_worker.link.channel import FrameReader, frame
from trunkline_worker.link.lifeline import die_with

MATCHING_BYTES = 4 << 30  # of address space of a matching process, beside that of this one
RECEIVE_BYTES = 1 << 20
MOST_COMPILING = max(4, len(os.sched_getaffinity(0)) // 2) if sys.platform == "linux" else 4
TICK_S = 0.02  # between two looks at how long grammars have been compiled
PATIENCE_S = (
    0.1  # a grammar that takes longer to compile lets its tenant's next one begin, and others have more of the CPU
)
SLOW_NICENESS = 5  # little, because it must still get its share beside an engine that computes on the CPU


class GrammarProcess:
    """Answers an engine."""

    def __init__(
        self, connection: socket.socket, tokenizer: LLTokenizer, tokens: AddedTokens, memory: MaskMemory
    ) -> None:
        self._socket = connection
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._memory = memory
        self._frames = FrameReader()
        self._waiting: deque[CompileRequest] = deque()
        self._compiling: dict[int, Compiling] = {}  # by pipe
        self._sockets: deque[int] = deque()  # of matching processes that are about to start
        self._matching: dict[int, int] = {}  # process ids, by index

    def run(self) -> None:
        """Answers until the engine closes the socket."""
        while True:
            watched = [self._socket.fileno(), *self._compiling]
            readable, _, _ = select.select(watched, [], [], TICK_S if self._compiling else None)
            if self._socket.fileno() in readable and not self._receive():
                return
            for pipe, compiling in list(self._compiling.items()):
                if (pipe in readable and compiling.receive()) or compiling.is_late(time.monotonic()):
                    del self._compiling[pipe]
                    self._socket.sendall(frame(compiling.end()))
            for slow in filter(_is_slow, self._compiling.values()):
                os.setpriority(os.PRIO_PROCESS, slow.pid, SLOW_NICENESS)
            while (request := self._next()) is not None:
                compiling = Compiling.begin(request, self._tokenizer, self._tokens)
                self._compiling[compiling.pipe] = compiling

    def _receive(self) -> bool:
        """Takes what the engine has sent. Returns whether it is still there."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, RECEIVE_BYTES, 1)
        self._sockets.extend(descriptors)
        for payload in self._frames.feed(data):
            request = GrammarRequest.FromString(payload)
            if request.HasField("compile"):
                self._waiting.append(request.compile)
            elif request.HasField("start_matching"):
                self._start_matching(request.start_matching, socket.socket(fileno=self._sockets.popleft()))
            elif pid := self._matching.get(request.kill_matching):
                os.kill(pid, signal.SIGKILL)
        return bool(data)

    def _next(self) -> CompileRequest | None:
        """Takes the first request of a tenant of which least is being compiled. A grammar that may be quick delays only
        its own tenant's. One tenant leaves a place to others, which then need not wait for its slow grammars."""
        compiling = self._compiling.values()
        if not self._waiting or len(compiling) >= MOST_COMPILING:
            return None
        running = Counter(one.tenant for one in compiling)
        full = {tenant for tenant, count in running.items() if count >= MOST_COMPILING - 1}
        full.update(one.tenant for one in compiling if not _is_slow(one))
        waiting = [request for request in self._waiting if request.tenant not in full]
        if not waiting:
            return None
        request = min(waiting, key=lambda request: running[request.tenant])
        self._waiting.remove(request)
        return request

    def _start_matching(self, index: int, connection: socket.socket) -> None:
        """Forks a matching process in place of the one before."""
        if (before := self._matching.get(index)) is not None:
            os.kill(before, signal.SIGKILL)  # not reaped yet, so the id is its own
            os.waitpid(before, 0)
        self._memory.end_work(index)
        parent = os.getpid()
        if pid := os.fork():
            self._matching[index] = pid
            connection.close()
            return
        try:
            confine(parent, MATCHING_BYTES)
            self._socket.close()
            for pipe in self._compiling:
                os.close(pipe)
            MatchingProcess(connection, self._tokenizer, self._memory, index).run()
        finally:
            os._exit(0)


def _is_slow(compiling: Compiling) -> bool:
    return compiling.started_s < time.monotonic() - PATIENCE_S


def leave_a_core() -> None:
    """Keeps this process, and those that it forks, off one core, so that an engine which wakes finds a free one."""
    if sys.platform == "linux" and len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(0, cores[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Trunkline's grammar process; started by the engine process.")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--tokenizer", required=True, help="path of a tokenizer.json")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--eos", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    leave_a_core()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal reaches the whole process group
    die_with(arguments.parent)
    try:
        tokenizer = LLTokenizer(arguments.tokenizer, n_vocab=arguments.vocab_size, eos_token=arguments.eos)
    except ValueError as error:
        sys.exit(f"llguidance cannot read {arguments.tokenizer}: {error}")
    with open(arguments.tokenizer, "rb") as file:
        tokens = AddedTokens.of(json.load(file), arguments.eos)
    memory = MaskMemory(arguments.memory_fd, arguments.vocab_size, arguments.slots)
    gc.freeze()  # so that forked processes go on sharing the memory of what is there
    try:
        GrammarProcess(socket.socket(fileno=arguments.socket_fd), tokenizer, tokens, memory).run()
    except ConnectionError:
        sys.exit(0)  # the engine is gone


if __name__ == "__main__":
    main()
