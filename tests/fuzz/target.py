"""The router that is fuzzed, as its fuzzer sees it."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from tests.fuzz.fuzzed_router import State
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub

REPOSITORY = Path(__file__).parents[2]
GOOD_S = 60.0  # for a request that takes milliseconds, on a busy machine
QUIET_S = 60.0  # until nothing is left of requests whose clients have gone
MORE_FILES = 2  # that a router may have open than before: pools of the event loop's threads come late
BODY = b'{"model":"tiny","prompt":"hi","max_tokens":2}'
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
GOOD = HEAD % len(BODY) + BODY


class Target:
    """A router in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        ports = json.loads(self._line())
        self.http_port: int = ports["http_port"]
        self.grpc_port: int = ports["grpc_port"]
        self.check_good_requests()  # what is made once is made now
        self.first = self.state()

    def state(self) -> State:
        """What the router says of itself. Fails if it has crashed."""
        assert self._process.stdin is not None
        assert self._process.poll() is None, f"the router ended with {self._process.poll()}"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return State(**json.loads(self._line()))

    def connect(self) -> socket.socket:
        """A connection to the HTTP port."""
        return socket.create_connection(("127.0.0.1", self.http_port), timeout=GOOD_S)

    def check_good_requests(self) -> None:
        """Fails unless a good request over each protocol is answered at its usual speed."""
        with self.connect() as connection:
            connection.sendall(GOOD)
            got = b""
            while b"total_tokens" not in got:
                more = connection.recv(1 << 16)
                assert more, f"a good request was cut: {got!r}"
                got += more
        assert got.startswith(b"HTTP/1.1 200 "), got
        with grpc.insecure_channel(
            f"127.0.0.1:{self.grpc_port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            request = GenerateRequest(text="hi", sampling=SamplingParams(max_tokens=2))
            stub: Any = InferenceServiceStub(channel)
            assert list(stub.Generate(request, timeout=GOOD_S))

    def check_unharmed(self) -> State:
        """Fails if the router has crashed, hangs, has logged an error, or keeps anything of clients that have gone."""
        self.check_good_requests()
        due_s = time.monotonic() + QUIET_S
        state = self.state()
        problems = state.problems
        while self._remains(state) and time.monotonic() < due_s:
            time.sleep(0.02)
            state = self.state()
            problems += state.problems
        assert not problems, "\n\n".join(problems)
        assert not self._remains(state), (state, self.first)
        return state

    def _remains(self, state: State) -> bool:
        return bool(
            state.open_requests
            or state.held_bytes
            or state.http_connections
            or state.open_choices
            or state.queued_tokens
            or state.files > self.first.files + MORE_FILES
        )

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the router ended with {self._process.wait()}"
        return line


@contextmanager
def running_target() -> Iterator[Target]:
    """A router before a worker without a model, ready."""
    command = (sys.executable, "-m", "tests.fuzz.fuzzed_router")
    process = subprocess.Popen(
        command, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Target(process)
    finally:
        process.stdin.close()
        try:
            process.wait(GOOD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
