"""Helper processes: what may take long, or runs a worker's chat template or tokenizer, is done outside of the router.

The tokenizers library holds the GIL while it returns a result and takes 300 bytes of memory per byte of text. A chat
template or a pattern of a tokenizer may never end. A process keeps this out of the router and can be killed.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid, no_worker
from trunkline.v1.generation_pb2 import RequestError
from trunkline_router.prompts.helper_process import ANSWER, ANSWER_HEADER, LENGTH, PROBLEMS, READY
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.prompts.tokenizer_files import TOKENIZER, TokenizerTraits
from trunkline_runtime.log import get_logger

PROGRAM = "trunkline_router.prompts.helper_process"
START_TIMEOUT_S = 30.0
AUTOGROUP_TRIES, AUTOGROUP_PAUSE_S = 10, 0.1
# Short jobs take about a millisecond.
SHORT_PROCESSES, SHORT_NICENESS = 4, 0
# A long text takes seconds and up to 1.2 GiB, a long conversation a fifth of a second. The router's event loop goes
# before these processes.
LONG_PROCESSES, LONG_NICENESS = 3, 10
LONG = 32 << 10  # more characters or tokens than this are a long job
LONG_CHAT = 512  # and so are more messages and parts: each takes 50 us
# Limits on CPU time. For short texts the limit includes loading a tokenizer; the longest text takes some five seconds.
RENDER_LIMIT_S, SHORT_LIMIT_S, LONG_LIMIT_S = 2.0, 10.0, 30.0
# Wall-clock limit, because a stopped or thrashing process uses no CPU time. Beside busy processes one with a niceness
# of 10 gets about a tenth of a core, and less if it shares that with others.
STALLED_FACTOR, LEAST_STALLED_S = 10.0, 60.0
# What waits and runs is kept in the router's memory. A job counts its text and this many bytes.
JOB_BYTES = 16 << 10
MAX_BYTES = 128 << 20
RETRY_MS = 1000
# The longest text has 16 MiB of token ids, the longest conversation becomes 32 MiB of text.
MAX_ANSWER_BYTES = 64 << 20


class ProcessEnded(Exception):
    """The process ended instead of answering. `status` is its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class AnswerTooLong(Exception):
    """The process answers with more than MAX_ANSWER_BYTES. They are not read, so the process must be ended."""


class TokenizerSource:
    """A tokenizer.json as it is sent to helper processes, and the digest that names it there."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.name = sha256(file).digest()


class Helper:
    """One process, which does one job at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter
    ) -> None:
        self._process, self._stdin, self._stdout = process, stdin, stdout
        self.tokenizer = b""  # name of the tokenizer that it has loaded

    @classmethod
    async def start(cls, niceness: int) -> Self:
        """Starts a process. Raises RuntimeError if it does not become ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                stdout, stdin = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            # Not asyncio's own subprocess call: uvloop forks, and because of gRPC's threads and fork handlers the child
            # sometimes hangs before exec. Popen uses vfork and takes a millisecond.
            try:
                process = subprocess.Popen(  # noqa: ASYNC220
                    [sys.executable, "-m", PROGRAM],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,  # it may quote clients' text, which must not be logged
                    # Ctrl-C in a terminal reaches the router alone. _lower_priority() takes a session.
                    process_group=None if niceness else 0,
                    start_new_session=niceness > 0,
                )
            except OSError:
                stdin.close()
                raise
        started = cls(process, stdout, stdin)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if niceness:
                    await _lower_priority(process.pid, niceness)
                kind, _ = await started._read()
            assert kind == READY
        except BaseException as error:
            await started.end()
            if isinstance(error, ProcessEnded | TimeoutError):
                raise RuntimeError(f"a helper process did not start: {error!r}") from None
            raise
        return started

    async def load(self, tokenizer: TokenizerSource, limit_s: float) -> None:
        """Loads the tokenizer if the process has another one. Raises as do()."""
        if self.tokenizer != tokenizer.name:
            self.tokenizer = b""
            await self.do("load", limit_s, tokenizer.file)
            self.tokenizer = tokenizer.name

    async def do(self, job: str, limit_s: float, *arguments: Any) -> bytes:
        """Returns what the job (a method of helper_process.Jobs) returns. Raises RequestRefused, ProcessEnded,
        AnswerTooLong or TimeoutError, after which the process must be ended."""
        message = pickle.dumps((job, limit_s, arguments))
        self._stdin.write(LENGTH.pack(len(message)))
        self._stdin.write(message)
        async with asyncio.timeout(max(LEAST_STALLED_S, STALLED_FACTOR * limit_s)):
            with contextlib.suppress(ConnectionError):  # _read() reports how it ended
                await self._stdin.drain()
            kind, answer = await self._read()
        if kind == ANSWER:
            return answer
        raise RequestRefused.from_proto(RequestError.FromString(answer))

    async def end(self) -> None:
        self._process.kill()
        self._stdin.close()
        await asyncio.to_thread(self._process.wait)

    async def _read(self) -> tuple[int, bytes]:
        try:
            size, kind = ANSWER_HEADER.unpack(await self._stdout.readexactly(ANSWER_HEADER.size))
            if size > MAX_ANSWER_BYTES:
                raise AnswerTooLong
            return kind, await self._stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessEnded(await asyncio.to_thread(self._process.wait)) from None


@dataclass(slots=True, eq=False)
class Account:
    """The jobs of one account, such as a tenant's with one model."""

    places: asyncio.Semaphore
    num_bytes: int = 0  # of all its jobs


class HelperPool:
    """At most `places` processes, started on demand and replaced when they end.

    An account has at most half of the places, and only as many of its jobs stand in the queue for them. So an account
    that uses less than that waits for at most as many jobs of each other account. Its jobs may take at most half of the
    memory that the other accounts leave; what is beyond that is refused at once.
    """

    def __init__(self, places: int, *, niceness: int = 0, max_bytes: int = MAX_BYTES) -> None:
        self._num_places, self._places = places, asyncio.Semaphore(places)
        self._niceness = niceness
        self._max_bytes = max_bytes
        self._idle: list[Helper] = []
        self._num_busy = 0  # places
        self._num_bytes = 0
        self._accounts: dict[Hashable, Account] = {}

    async def run(
        self,
        account: Hashable,
        job: str,
        *arguments: Any,
        limit_s: float,
        num_bytes: int = 0,
        tokenizer: TokenizerSource | None = None,
    ) -> bytes:
        """Returns what the job (a method of helper_process.Jobs) returns. A process that has the tokenizer does it.

        Raises RequestRefused if the queue is full or processes stand still (OVERLOADED), if no process starts
        (NO_WORKER), if the job takes more than `limit_s` of CPU time, ends its process or fails.
        """
        own = self._accounts.get(account) or Account(asyncio.Semaphore(max(1, self._num_places // 2)))
        num_bytes += JOB_BYTES
        if 2 * (own.num_bytes + num_bytes) > self._max_bytes - (self._num_bytes - own.num_bytes):
            raise _overloaded("too many texts and conversations are waiting to be converted to tokens")
        self._accounts[account] = own
        own.num_bytes += num_bytes
        self._num_bytes += num_bytes
        try:
            async with own.places, self._places:
                self._num_busy += 1
                try:
                    return await self._done(job, arguments, limit_s, tokenizer)
                finally:
                    self._num_busy -= 1
        finally:
            own.num_bytes -= num_bytes
            self._num_bytes -= num_bytes
            if not own.num_bytes:
                del self._accounts[account]

    async def _done(
        self, job: str, arguments: tuple[Any, ...], limit_s: float, tokenizer: TokenizerSource | None
    ) -> bytes:
        field, tool, problem = PROBLEMS[job][0], "chat template" if job == "render" else "tokenizer", ""
        for is_first in (True, False):  # a second time, because the process may have been killed from outside
            helper = (self._idle_helper(tokenizer) if is_first else None) or await self._started()
            is_usable = False
            try:
                if tokenizer is not None:
                    await helper.load(tokenizer, limit_s)
                answer = await helper.do(job, limit_s, *arguments)
                is_usable = True
                return answer
            except RequestRefused:
                is_usable = True
                raise
            except ProcessEnded as ended:
                get_logger().warning("a helper process ended", job=job, status=ended.status)
                if ended.status == -signal.SIGPROF:
                    raise invalid(field, f"the model's {tool} takes longer than {limit_s:g} s for this input") from None
                problem = f"the model's {tool} ends the process that runs it: {ended}"
            except TimeoutError:
                get_logger().warning("a helper process stands still", job=job)
                if not is_first:  # it got no core, which is not the input's fault
                    problem = f"the process that runs the model's {tool} stands still"
                    raise _overloaded(problem) from None
            except AnswerTooLong:
                problem = f"the model's {tool} makes more than {MAX_ANSWER_BYTES >> 20} MiB of this input"
                raise invalid(field, problem) from None
            finally:
                if is_usable:
                    self._idle.append(helper)
                else:  # after a cancellation too: the next job must not read this one's answer
                    await helper.end()
        raise invalid(field, problem)

    async def _started(self) -> Helper:
        """A new process. If the caller is cancelled meanwhile, the next job gets it."""
        starting = asyncio.create_task(Helper.start(self._niceness))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, RuntimeError):  # it did not start
                self._idle.append(await starting)
            raise
        except (OSError, RuntimeError) as error:
            get_logger().error("a helper process did not start", error=repr(error))
            raise no_worker("the process that tokenizes texts does not start") from None

    def _idle_helper(self, tokenizer: TokenizerSource | None) -> Helper | None:
        """A process that has this tokenizer or none, or the one that is idle for longest if no more may be started."""
        fits = (b"", tokenizer.name if tokenizer else b"")
        helper = next((one for one in reversed(self._idle) if not tokenizer or one.tokenizer in fits), None)
        if helper is None and len(self._idle) + self._num_busy > self._num_places:
            helper = self._idle[0]
        if helper is not None:
            self._idle.remove(helper)
        return helper

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            await self._idle.pop().end()


async def _lower_priority(leader: int, niceness: int) -> None:
    """Lowers the priority of a session's process, also relative to other sessions, such as the router's: Linux may
    share the processor between sessions, each with a niceness of its own (sched(7), "The autogroup feature")."""
    with contextlib.suppress(OSError):  # it has ended, or has the lowest priority
        os.setpriority(os.PRIO_PROCESS, leader, os.getpriority(os.PRIO_PROCESS, leader) + niceness)
    for _ in range(AUTOGROUP_TRIES):
        try:
            Path(f"/proc/{leader}/autogroup").write_text(str(niceness))  # noqa: ASYNC240 (no disk is read)
        except BlockingIOError:  # the system sets the priority of one session at a time
            await asyncio.sleep(AUTOGROUP_PAUSE_S)
        except OSError:
            return  # it has ended, or the system has no such sessions
        else:
            return


def _overloaded(problem: str) -> RequestRefused:
    return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, problem, retry_delay_ms=RETRY_MS)


class Helpers:
    """The helper processes of a router: a pool for short jobs, which a chat waits for, and one for long jobs. All
    methods raise RequestRefused like HelperPool.run(). An account is a tenant's work with one model."""

    def __init__(self, *, render_limit_s: float = RENDER_LIMIT_S, long_limit_s: float = LONG_LIMIT_S) -> None:
        self.short = HelperPool(SHORT_PROCESSES, niceness=SHORT_NICENESS)
        self.long = HelperPool(LONG_PROCESSES, niceness=LONG_NICENESS)
        self._render_limit_s, self._long_limit_s = render_limit_s, long_limit_s

    async def render(self, template: bytes, chat: bytes, *, num_parts: int = 1, account: Hashable = "") -> str:
        """Returns a prompt's text. `template` is template_source(), `chat` a serialized ChatMessages.

        num_parts: of messages and their parts
        """
        pool = self.long if num_parts > LONG_CHAT else self.short
        utf8 = await pool.run(account, "render", template, chat, limit_s=self._render_limit_s, num_bytes=len(chat))
        return utf8.decode()

    async def convert(
        self, tokenizer: TokenizerSource, account: Hashable, job: str, converted: "str | array[int]", flag: bool
    ) -> bytes:
        """Returns what a job on a text or on token ids returns: encode, offsets or decode."""
        is_long = len(converted) > LONG
        return await (self.long if is_long else self.short).run(
            account,
            job,
            converted,
            flag,
            limit_s=self._long_limit_s if is_long else SHORT_LIMIT_S,
            num_bytes=sys.getsizeof(converted),
            tokenizer=tokenizer,
        )

    async def encode_inputs(
        self, tokenizer: TokenizerSource, account: Hashable, num_characters: int, *arguments: Any
    ) -> bytes:
        """Returns what the job encode_inputs returns."""
        is_long = num_characters > LONG
        return await (self.long if is_long else self.short).run(
            account,
            "encode_inputs",
            *arguments,
            limit_s=self._long_limit_s if is_long else SHORT_LIMIT_S,
            num_bytes=4 * num_characters,
            tokenizer=tokenizer,
        )

    async def token_bytes(self, tokenizer: TokenizerSource) -> TokenBytes:
        """Returns the bytes of all tokens of a tokenizer."""
        account = ("tokenizer", tokenizer.name)
        wire = await self.long.run(account, "token_bytes", limit_s=self._long_limit_s, tokenizer=tokenizer)
        return TokenBytes.from_wire(wire)

    async def inspect(self, files: Mapping[str, bytes], *, worker: str) -> TokenizerTraits:
        """Returns the traits of a worker's tokenizer files, with which a short process is ready for its first text."""
        account = ("worker", worker)
        traits = await self.long.run(account, "inspect", dict(files), limit_s=self._long_limit_s)
        tokenizer = TokenizerSource(files[TOKENIZER])
        await self.short.run(account, "encode", "", False, limit_s=SHORT_LIMIT_S, tokenizer=tokenizer)
        return TokenizerTraits.from_json(traits)

    async def close(self) -> None:
        """Ends the processes."""
        await self.short.close()
        await self.long.close()
