"""The processes that tokenize long texts, turn many tokens into text and read tokenizers, as the router sees them.

The library lets go of the GIL while it encodes, but not while it hands over what it has made, and it takes 300 bytes of
memory for a byte of text. In a process of its own neither holds up or outlives anything here. A tokenizer that
is not tame (tokenizer_facts.py) is read and run in these processes alone. Tenants share the
processes fairly (fair_turns.py): those whose texts take long leave a process to the others.
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
    KEEPING,
    PLAIN,
    SKIPPING,
    SURVEY,
    TOKENIZER,
    TOKENIZER_FIELD,
    WITH_SPECIAL,
    packed,
)
from trunkline_router.prompts.fair_places import FairPlaces
from trunkline_router.prompts.fair_turns import Bounds
from trunkline_router.prompts.frame_process import FrameProcess, ProcessEnded
from trunkline_router.prompts.frames import REFUSED
from trunkline_router.prompts.tokenizer_facts import TokenizerFacts
from trunkline_runtime.log import get_logger

ENCODER = "trunkline_router.prompts.encode_process"
NONE = b""  # a tokenizer's name
# Of as much memory as their vocabularies take, and of up to 1.2 GiB while they work. A tenant uses one at a time. Slow
# tenants use two together, so that a third one finds a process at once.
PROCESSES, PROCESSES_OF_ONE = 3, 1
SLICE_S = 0.5  # with a core to itself: half a MiB; a tokenizer that has to be loaded first does not count
TIME_LIMIT_S = 60.0  # of CPU, for one text; the largest one takes some five seconds
# Short texts of tokenizers that this process does not run itself take about a millisecond.
SHORT_SLICE_S, SHORT_OF_ONE = 0.1, 2
SHORT_TIME_LIMIT_S = 10.0  # of CPU: a tokenizer may have to be loaded first
# Texts that wait or are encoded; they lie in this process.
BOUNDS = Bounds(jobs_of_one=512, jobs_of_all=2048, bytes_of_one=32 << 20, bytes_of_all=128 << 20)


class EncoderSource:
    """A model's tokenizer as a file, as processes are told it, and its name among them."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.name = sha256(file).digest()


class EncodePool:
    """Encodes and decodes in at most PROCESSES processes at once, of which a tenant uses `of_one`."""

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
            PROCESSES, of_one, bounds, slice_s=slice_s, refusal="too much text waits to be tokenized"
        )

    @property
    def is_idle(self) -> bool:
        """Whether no text waits or is encoded."""
        return self._places.is_idle

    async def encode(
        self, source: EncoderSource, text: str | memoryview, *, special_tokens: bool, tenant: str, weight: float = 1.0
    ) -> "array[int]":
        """Token ids of a text, which may be UTF-8 already. A tenant's share of the processes is by weight.

        Raises RequestRefused: too much waits, or the text cannot be encoded.
        """
        kind = WITH_SPECIAL if special_tokens else PLAIN
        ids = array("i")
        utf8 = text.encode() if isinstance(text, str) else text
        work = partial(self._answer, source, kind, utf8, "text")
        ids.frombytes(await self._places.run(tenant, work, num_bytes=len(utf8), weight=weight))
        return ids

    async def decode(
        self, source: EncoderSource, ids: "array[int]", *, keep_special: bool, tenant: str, weight: float = 1.0
    ) -> bytes:
        """The text of token ids, in UTF-8. Raises RequestRefused likewise."""
        kind = KEEPING if keep_special else SKIPPING
        work = partial(self._answer, source, kind, ids.tobytes(), "token_ids")
        return await self._places.run(tenant, work, num_bytes=len(ids) * ids.itemsize, weight=weight)

    async def survey(self, files: Mapping[str, bytes], *, worker: str) -> TokenizerFacts:
        """What a worker's tokenizer files come to. Workers take turns with one another and with tenants.

        Raises RequestRefused: the files are damaged, or take too much time or memory.
        """
        body = await asyncio.to_thread(packed, files)
        work = partial(self._answer, None, SURVEY, body, TOKENIZER_FIELD)
        return TokenizerFacts.from_json(await self._places.run(("worker", worker), work, num_bytes=0))

    async def load(self, source: EncoderSource, *, worker: str) -> None:
        """Has a process load a worker's tokenizer, so that its first text does not wait for that. Raises RequestRefused
        where it cannot."""
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
            return await self._try(source, kind, body, begins)
        except ProcessEnded as ended:
            get_logger().warning("a process that tokenizes ended", status=ended.status)
            if ended.status == -signal.SIGPROF:
                problem = f"the model's tokenizer takes longer than {self._time_limit_s:g} s for so much"
                raise invalid(field, problem) from None
        try:  # it may have been ended from outside
            return await self._try(source, kind, body, begins)
        except ProcessEnded as ended:
            raise invalid(field, f"the model's tokenizer ends with it: {ended}") from None

    async def _try(
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
        except BaseException:  # a cancellation too: the next request must not read this one's answer
            await encoder.end()
            raise
        self._idle.append(encoder)
        return answer

    async def _encoder(self, source: EncoderSource | None) -> "_Encoder":
        """One that knows this tokenizer, or none where none is asked for, if there is one."""
        name = NONE if source is None else source.name
        self._idle.sort(key=lambda encoder: encoder.knows == name)
        while self._idle:
            encoder = self._idle.pop()
            if encoder.is_alive:
                return encoder
            await encoder.end()
        return await _Encoder.start(ENCODER, str(self._time_limit_s))


def short_texts() -> EncodePool:
    """A pool for the short texts of tokenizers that are not run in this process: they wait for no long ones."""
    return EncodePool(SHORT_TIME_LIMIT_S, of_one=SHORT_OF_ONE, slice_s=SHORT_SLICE_S)


class _Encoder(FrameProcess):
    """One process, for one text at a time."""

    knows = NONE  # the tokenizer that it has

    async def load(self, source: EncoderSource) -> None:
        """Has the process read the tokenizer, unless it has it already. Raises RequestRefused or ProcessEnded."""
        if self.knows != source.name:
            self.knows = NONE
            await self._asked(TOKENIZER, source.name, source.file)
            self.knows = source.name

    async def answer(self, kind: int, body: bytes | memoryview) -> bytes:
        """Raises RequestRefused or ProcessEnded."""
        return await self._asked(kind, self.knows, body)

    async def _asked(self, kind: int, name: bytes, body: bytes | memoryview) -> bytes:
        answered, answer = await self.ask(kind, name, body)
        if answered == REFUSED:
            raise RequestRefused.from_proto(RequestError.FromString(answer))
        return answer
