"""A pool of processes that tokenize long texts, turn many tokens into text and inspect tokenizers.

The library releases the GIL while it encodes, but not while it returns the result, and it takes 300 bytes of memory
per byte of text. A separate process keeps both costs out of the router. A tokenizer that is not cheap
(tokenizer_traits.py) is read and run only in these processes. Tenants share the processes fairly (fair_turns.py):
tenants whose texts take long leave a process to the others.
"""

import asyncio
import signal
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256

from trunkline.status import RequestRefused, invalid
from trunkline.v1.generation_pb2 import RequestError
from trunkline_router.prompts.encode_process import (
    INSPECT,
    KEEPING,
    OFFSETS_PLAIN,
    OFFSETS_WITH_SPECIAL,
    PLAIN,
    SKIPPING,
    TOKEN_BYTES,
    TOKENIZER,
    TOKENIZER_FIELD,
    WITH_SPECIAL,
    packed,
)
from trunkline_router.prompts.fair_places import FairPlaces
from trunkline_router.prompts.fair_turns import Bounds
from trunkline_router.prompts.frame_process import FrameProcess, ProcessEnded
from trunkline_router.prompts.frames import REFUSED
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.prompts.tokenizer_traits import TokenizerTraits
from trunkline_runtime.log import get_logger

ENCODER = "trunkline_router.prompts.encode_process"
NONE = b""  # in place of a tokenizer's name
# A process takes the memory of its vocabulary, and up to 1.2 GiB while it works. A tenant uses one process at a time.
# All slow tenants together use two, so that another tenant finds a free process at once.
PROCESSES, PROCESSES_OF_ONE = 3, 1
SLICE_S = 0.5  # half a MiB of text with a core to itself; does not include loading a tokenizer
TIME_LIMIT_S = 60.0  # CPU time for one text; the largest takes some five seconds
# Short texts of tokenizers that are not cheap: each takes about a millisecond.
SHORT_SLICE_S, SHORT_OF_ONE = 0.1, 2
SHORT_TIME_LIMIT_S = 10.0  # CPU time, which may include loading a tokenizer
# Limits on queued and running texts, which are kept in the router's memory.
BOUNDS = Bounds(jobs_of_one=512, jobs_of_all=2048, bytes_of_one=32 << 20, bytes_of_all=128 << 20)


class EncoderSource:
    """A tokenizer.json as it is sent to the processes, and the digest that names it there."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.name = sha256(file).digest()


class EncodePool:
    """Encodes and decodes in at most PROCESSES processes at once, of which a tenant uses at most `of_one`."""

    def __init__(
        self,
        time_limit_s: float = TIME_LIMIT_S,
        bounds: Bounds = BOUNDS,
        *,
        of_one: int = PROCESSES_OF_ONE,
        slice_s: float = SLICE_S,
    ) -> None:
        self._time_limit_s = time_limit_s
        self._idle: list[_Encoder] = []
        self._places = FairPlaces(
            PROCESSES, of_one, bounds, slice_s=slice_s, refusal="too much text is waiting to be tokenized"
        )

    @property
    def is_idle(self) -> bool:
        """Whether no text is queued or being encoded."""
        return self._places.is_idle

    async def encode(
        self, source: EncoderSource, text: str | memoryview, *, special_tokens: bool, tenant: str, weight: float = 1.0
    ) -> "array[int]":
        """Returns the token ids of a text (str or UTF-8 bytes). Tenants share the processes by weight.

        Raises RequestRefused if the queue is full or the text cannot be encoded.
        """
        kind = WITH_SPECIAL if special_tokens else PLAIN
        utf8 = text.encode() if isinstance(text, str) else text
        return await self._encoded(source, kind, utf8, tenant, weight)

    async def offsets(
        self, source: EncoderSource, text: str, *, special_tokens: bool, tenant: str, weight: float = 1.0
    ) -> "array[int]":
        """Returns where the tokens that encode() returns begin in the text, in characters. Raises like encode()."""
        kind = OFFSETS_WITH_SPECIAL if special_tokens else OFFSETS_PLAIN
        return await self._encoded(source, kind, text.encode(), tenant, weight)

    async def _encoded(
        self, source: EncoderSource, kind: int, utf8: bytes | memoryview, tenant: str, weight: float
    ) -> "array[int]":
        numbers = array("i")
        work = partial(self._answer, source, kind, utf8, "text")
        numbers.frombytes(await self._places.run(tenant, work, num_bytes=len(utf8), weight=weight))
        return numbers

    async def decode(
        self, source: EncoderSource, ids: "array[int]", *, keep_special: bool, tenant: str, weight: float = 1.0
    ) -> bytes:
        """Returns the text of token ids in UTF-8.

        Raises RequestRefused if the queue is full or the ids cannot be decoded.
        """
        kind = KEEPING if keep_special else SKIPPING
        work = partial(self._answer, source, kind, ids.tobytes(), "token_ids")
        return await self._places.run(tenant, work, num_bytes=len(ids) * ids.itemsize, weight=weight)

    async def inspect(self, files: Mapping[str, bytes], *, worker: str) -> TokenizerTraits:
        """Returns the traits about a worker's tokenizer files. Workers take turns with each other and with tenants.

        Raises RequestRefused if the queue is full, or if the files are damaged or take too much time or memory.
        """
        body = await asyncio.to_thread(packed, files)
        work = partial(self._answer, None, INSPECT, body, TOKENIZER_FIELD)
        return TokenizerTraits.from_json(await self._places.run(("worker", worker), work, num_bytes=0))

    async def token_bytes(self, source: EncoderSource) -> TokenBytes:
        """Returns the bytes of all tokens of a tokenizer, which takes its turn like a tenant.

        Raises RequestRefused if the queue is full, or if the table takes too much time or memory.
        """
        work = partial(self._answer, source, TOKEN_BYTES, b"", TOKENIZER_FIELD)
        return TokenBytes.from_wire(await self._places.run(("tokenizer", source.name), work, num_bytes=0))

    async def load(self, source: EncoderSource, *, worker: str) -> None:
        """Makes a process load a worker's tokenizer ahead of its first text. Raises RequestRefused if it cannot."""
        work = partial(self._answer, source, PLAIN, b"", TOKENIZER_FIELD)
        await self._places.run(("worker", worker), work, num_bytes=0)

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            await self._idle.pop().end()

    async def _answer(
        self,
        source: EncoderSource | None,
        kind: int,
        body: bytes | memoryview,
        field: str,
        begins: Callable[[], None],
    ) -> bytes:
        try:
            return await self._attempt(source, kind, body, begins)
        except ProcessEnded as ended:
            get_logger().warning("a tokenizer process ended", status=ended.status)
            if ended.status == -signal.SIGPROF:
                problem = f"the model's tokenizer takes longer than {self._time_limit_s:g} s for this input"
                raise invalid(field, problem) from None
        try:  # again, because the process may have been killed from outside
            return await self._attempt(source, kind, body, begins)
        except ProcessEnded as ended:
            raise invalid(field, f"the model's tokenizer ends the process that runs it: {ended}") from None

    async def _attempt(
        self, source: EncoderSource | None, kind: int, body: bytes | memoryview, begins: Callable[[], None]
    ) -> bytes:
        encoder = await self._encoder(source)
        try:
            if source is not None:
                await encoder.load(source)
            begins()
            answer = await encoder.answer(kind, body)
        except RequestRefused:
            self._idle.append(encoder)
            raise
        except BaseException:  # including a cancellation: the next request must not read this one's answer
            await encoder.end()
            raise
        self._idle.append(encoder)
        return answer

    async def _encoder(self, source: EncoderSource | None) -> "_Encoder":
        """An idle process, preferably one that has loaded this tokenizer (or none), else a new one."""
        name = NONE if source is None else source.name
        self._idle.sort(key=lambda encoder: encoder.tokenizer_name == name)
        while self._idle:
            encoder = self._idle.pop()
            if encoder.is_alive:
                return encoder
            await encoder.end()
        return await _Encoder.start(ENCODER, str(self._time_limit_s))


def short_texts() -> EncodePool:
    """A pool for the short texts of tokenizers that are not run in the router. They never wait for long texts."""
    return EncodePool(SHORT_TIME_LIMIT_S, of_one=SHORT_OF_ONE, slice_s=SHORT_SLICE_S)


class _Encoder(FrameProcess):
    """One process, which handles one text at a time."""

    tokenizer_name = NONE  # of the tokenizer that it has loaded

    async def load(self, source: EncoderSource) -> None:
        """Makes the process load the tokenizer if it has another one. Raises RequestRefused or ProcessEnded."""
        if self.tokenizer_name != source.name:
            self.tokenizer_name = NONE
            await self._request(TOKENIZER, source.name, source.file)
            self.tokenizer_name = source.name

    async def answer(self, kind: int, body: bytes | memoryview) -> bytes:
        """Returns the body of the process's answer. Raises RequestRefused or ProcessEnded."""
        return await self._request(kind, self.tokenizer_name, body)

    async def _request(self, kind: int, name: bytes, body: bytes | memoryview) -> bytes:
        answered, answer = await self.ask(kind, name, body)
        if answered == REFUSED:
            raise RequestRefused.from_proto(RequestError.FromString(answer))
        return answer
