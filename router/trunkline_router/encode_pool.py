"""The processes that tokenize long texts and turn many tokens into text, as the router sees them.

The library lets go of the GIL while it encodes, but not while it hands over what it has made, and it takes 300 bytes of
memory for a byte of text. In a process of its own neither holds up or outlives anything here.
"""

import asyncio
import signal
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline.v1.generation_pb2 import RequestError
from trunkline_router.encode_process import KEEPING, PLAIN, SKIPPING, TOKENIZER, WITH_SPECIAL
from trunkline_router.frame_process import FrameProcess, ProcessEnded
from trunkline_router.frames import REFUSED
from trunkline_runtime.log import get_logger

ENCODER = "trunkline_router.encode_process"
PROCESSES = 2  # of as much memory as their vocabularies take; a tenant uses one of them at a time
TIME_LIMIT_S = 60.0  # of CPU, for one text; the largest one takes some five seconds
# What waits, of one tenant and of all: past it requests are refused. It lies in this process.
MAX_TENANT_BYTES, MAX_BYTES = 32 << 20, 128 << 20
RETRY_MS = 1000


class EncoderSource:
    """A model's tokenizer as a file, as processes are told it, and its name among them."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.name = sha256(file).digest()


@dataclass(slots=True)
class _Account:
    """A tenant's texts."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_bytes: int = 0


class EncodePool:
    """Encodes and decodes in at most PROCESSES processes at once, for each tenant one text after the other."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._idle: list[_Encoder] = []
        self._places = asyncio.Semaphore(PROCESSES)
        self._accounts: dict[str, _Account] = {}
        self._num_bytes = 0

    async def encode(
        self, source: EncoderSource, text: str | memoryview, *, special_tokens: bool, tenant: str
    ) -> "array[int]":
        """Token ids of a text, which may be UTF-8 already. Raises RequestRefused: too much waits, or the text cannot be
        encoded."""
        kind = WITH_SPECIAL if special_tokens else PLAIN
        ids = array("i")
        utf8 = text.encode() if isinstance(text, str) else text
        ids.frombytes(await self._ask(source, kind, utf8, tenant, "text"))
        return ids

    async def decode(self, source: EncoderSource, ids: "array[int]", *, keep_special: bool, tenant: str) -> bytes:
        """The text of token ids, in UTF-8. Raises RequestRefused likewise."""
        kind = KEEPING if keep_special else SKIPPING
        return await self._ask(source, kind, ids.tobytes(), tenant, "token_ids")

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            await self._idle.pop().end()

    async def _ask(
        self, source: EncoderSource, kind: int, body: bytes | memoryview, tenant: str, field_name: str
    ) -> bytes:
        with self._counted(tenant, len(body)) as account:
            async with account.turn, self._places:
                try:
                    return await self._try(source, kind, body)
                except ProcessEnded as ended:
                    get_logger().warning("a process that tokenizes ended", status=ended.status)
                    if ended.status == -signal.SIGPROF:
                        problem = f"the model's tokenizer takes longer than {self._time_limit_s:g} s for so much"
                        raise invalid(field_name, problem) from None
                try:  # it may have been ended from outside
                    return await self._try(source, kind, body)
                except ProcessEnded as ended:
                    raise invalid(field_name, f"the model's tokenizer ends with it: {ended}") from None

    @contextmanager
    def _counted(self, tenant: str, num_bytes: int) -> Iterator[_Account]:
        account = self._accounts.get(tenant) or _Account()
        if account.num_bytes + num_bytes > MAX_TENANT_BYTES or self._num_bytes + num_bytes > MAX_BYTES:
            raise RequestRefused(
                CODE_RESOURCE_EXHAUSTED,
                OVERLOADED,
                "too much text waits to be tokenized",
                retry_delay_ms=RETRY_MS,
            )
        self._accounts[tenant] = account
        account.num_bytes += num_bytes
        self._num_bytes += num_bytes
        try:
            yield account
        finally:
            account.num_bytes -= num_bytes
            self._num_bytes -= num_bytes
            if not account.num_bytes:
                del self._accounts[tenant]

    async def _try(self, source: EncoderSource, kind: int, body: bytes | memoryview) -> bytes:
        encoder = await self._encoder(source)
        try:
            answer = await encoder.answer(source, kind, body)
        except RequestRefused:
            self._idle.append(encoder)
            raise
        except BaseException:  # a cancellation too: the next request must not read this one's answer
            await encoder.end()
            raise
        self._idle.append(encoder)
        return answer

    async def _encoder(self, source: EncoderSource) -> "_Encoder":
        """One that knows this tokenizer, if there is one."""
        self._idle.sort(key=lambda encoder: encoder.knows == source.name)
        while self._idle:
            encoder = self._idle.pop()
            if encoder.is_alive:
                return encoder
            await encoder.end()
        return await _Encoder.start(ENCODER, str(self._time_limit_s))


class _Encoder(FrameProcess):
    """One process, for one text at a time."""

    knows = b""  # the tokenizer that it has

    async def answer(self, source: EncoderSource, kind: int, body: bytes | memoryview) -> bytes:
        """Raises RequestRefused or ProcessEnded."""
        if self.knows != source.name:
            self.knows = source.name
            self.tell(TOKENIZER, source.name, source.file)
        answered, answer = await self.ask(kind, source.name, body)
        if answered == REFUSED:
            raise RequestRefused.from_proto(RequestError.FromString(answer))
        return answer
