"""A pool of processes that render conversations. They are started on demand and replaced when they end.

A template that loops forever costs only its own request. Tenants share the processes fairly (fair_turns.py): tenants
whose conversations take long leave a process to the others.
"""

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

from trunkline.status import RequestRefused, invalid
from trunkline.v1.generation_pb2 import RequestError
from trunkline_router.prompts.chat_template import FIELD
from trunkline_router.prompts.encode_pool import EncodePool, short_texts
from trunkline_router.prompts.fair_places import FairPlaces
from trunkline_router.prompts.fair_turns import Bounds
from trunkline_router.prompts.frame_process import FrameProcess, ProcessEnded
from trunkline_router.prompts.render_process import CHAT, NUM_CHARACTERS, TEMPLATE, TEXT
from trunkline_runtime.log import get_logger

RENDERER = "trunkline_router.prompts.render_process"
PROCESSES = 4  # of some 30 MiB each; a rendering takes about a millisecond
PROCESSES_OF_ONE = 2  # at a time, for one tenant's conversations with one model
SLICE_S = 0.1  # the longest conversation takes some tens of milliseconds
TIME_LIMIT_S = 2.0  # CPU time for one conversation
# Wall-clock limit in multiples of the CPU limit: a stopped or thrashing process uses no CPU time.
STALLED_FACTOR = 10.0
# Limits on queued and running conversations, which are kept in the router's memory.
BOUNDS = Bounds(jobs_of_one=2048, jobs_of_all=8192, bytes_of_one=32 << 20, bytes_of_all=128 << 20)


class TemplateSource:
    """A model's chat template as it is sent to the processes, and the digest that names it there."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.serialized = json.dumps({"source": source, "special_tokens": dict(special_tokens)}).encode()
        self.name = sha256(self.serialized).digest()


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A prompt's text in UTF-8, because a long text goes on to another process."""

    num_characters: int
    utf8: memoryview

    @property
    def text(self) -> str:
        return str(self.utf8, "utf-8")


class RenderPool:
    """Renders in at most PROCESSES processes at once. Also has the pools that tokenize: `encoders` for long texts,
    `short_encoders` for short texts of tokenizers that are not run in the router."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.encoders, self.short_encoders = EncodePool(), short_texts()
        self._time_limit_s = time_limit_s
        self._idle: list[_Renderer] = []
        self._places = FairPlaces(
            PROCESSES,
            PROCESSES_OF_ONE,
            BOUNDS,
            slice_s=SLICE_S,
            refusal="too many conversations are waiting to be rendered",
        )

    async def render(
        self, template: TemplateSource, chat: bytes, *, tenant: str = "", weight: float = 1.0
    ) -> RenderedText:
        """Returns the prompt's text. `chat` is a serialized ChatMessages. Tenants share the processes by weight.

        Raises RequestRefused if the queue is full, or if the template refuses the conversation or takes too long.
        """
        work = partial(self._rendered, template, chat)
        return await self._places.run((tenant, template.name), work, num_bytes=len(chat), weight=weight)

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            await self._idle.pop().end()
        await self.encoders.close()
        await self.short_encoders.close()

    async def _rendered(self, template: TemplateSource, chat: bytes, begins: Callable[[], None]) -> RenderedText:
        try:
            return await self._attempt(template, chat, begins)
        except ProcessEnded as ended:
            get_logger().warning("a chat template process ended", status=ended.status)
            if ended.status == -signal.SIGPROF:
                raise self._too_slow() from None
        try:  # again, because the process may have been killed from outside
            return await self._attempt(template, chat, begins)
        except ProcessEnded as ended:
            raise invalid(FIELD, f"the model's chat template ends the process that renders it: {ended}") from None

    async def _attempt(self, template: TemplateSource, chat: bytes, begins: Callable[[], None]) -> RenderedText:
        renderer = await self._renderer()
        begins()
        try:
            async with asyncio.timeout(self._time_limit_s * STALLED_FACTOR):
                text = await renderer.render(template, chat)
        except RequestRefused:
            self._idle.append(renderer)
            raise
        except TimeoutError:
            await renderer.end()
            raise self._too_slow() from None
        except BaseException:  # including a cancellation: the next request must not read this one's answer
            await renderer.end()
            raise
        self._idle.append(renderer)
        return text

    async def _renderer(self) -> "_Renderer":
        while self._idle:
            renderer = self._idle.pop()
            if renderer.is_alive:
                return renderer
            await renderer.end()
        return await _Renderer.start(RENDERER, str(self._time_limit_s))

    def _too_slow(self) -> RequestRefused:
        return invalid(FIELD, f"the model's chat template takes longer than {self._time_limit_s:g} s")


class _Renderer(FrameProcess):
    """One process, which handles one conversation at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter
    ) -> None:
        super().__init__(process, stdout, stdin)
        self._known: set[bytes] = set()  # names of templates that the process has

    async def render(self, template: TemplateSource, chat: bytes) -> RenderedText:
        """Returns the prompt's text. Raises RequestRefused or ProcessEnded."""
        if template.name not in self._known:
            self._known.add(template.name)
            self.tell(TEMPLATE, template.name, template.serialized)
        kind, answer = await self.ask(CHAT, template.name, chat)
        if kind == TEXT:
            (num_characters,) = NUM_CHARACTERS.unpack_from(answer)
            return RenderedText(num_characters, memoryview(answer)[NUM_CHARACTERS.size :])
        raise RequestRefused.from_proto(RequestError.FromString(answer))
