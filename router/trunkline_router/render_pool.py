"""The processes that render conversations, as the router sees them: started when needed, replaced when they end.

A template that loops for ever costs its own request, and for two seconds one of a few processes.
"""

import asyncio
import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256

from trunkline.status import RequestRefused, invalid
from trunkline.v1.generation_pb2 import RequestError
from trunkline.v1.inference_pb2 import ChatMessages
from trunkline_router.chat_template import FIELD
from trunkline_router.encode_pool import EncodePool
from trunkline_router.frame_process import FrameProcess, ProcessEnded
from trunkline_router.render_process import CHAT, TEMPLATE, TEXT
from trunkline_runtime.log import get_logger

RENDERER = "trunkline_router.render_process"
PROCESSES = 4  # of some 30 MiB; a rendering takes about a millisecond
PROCESSES_PER_TEMPLATE = PROCESSES - 1  # a model's template that hangs leaves one to the other models
TIME_LIMIT_S = 2.0  # of CPU, for one conversation; a long one takes some tens of milliseconds
# A process that is stopped, or so short of memory that it stands still, uses no CPU time.
STALLED_FACTOR = 10.0


class TemplateSource:
    """A model's chat template as text, as processes are told it, and its name among them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.told = json.dumps({"source": source, "special_tokens": dict(special_tokens)}).encode()
        self.name = sha256(self.told).digest()


class RenderPool:
    """Renders in at most PROCESSES processes at once. `encoders` tokenize what is long."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.encoders = EncodePool()
        self._time_limit_s = time_limit_s
        self._idle: list[_Renderer] = []
        self._places = asyncio.Semaphore(PROCESSES)
        self._places_of: defaultdict[bytes, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PROCESSES_PER_TEMPLATE)
        )

    async def render(self, template: TemplateSource, chat: ChatMessages) -> str:
        """The prompt's text. Raises RequestRefused where the template refuses the conversation, or does not end."""
        async with self._places_of[template.name], self._places:
            try:
                return await self._try(template, chat)
            except ProcessEnded as ended:
                get_logger().warning("a chat template's process ended", status=ended.status)
                if ended.status == -signal.SIGPROF:
                    raise self._too_slow() from None
            try:  # it may have been ended from outside
                return await self._try(template, chat)
            except ProcessEnded as ended:
                raise invalid(FIELD, f"the model's chat template ends the process that renders it: {ended}") from None

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            await self._idle.pop().end()
        await self.encoders.close()

    async def _try(self, template: TemplateSource, chat: ChatMessages) -> str:
        renderer = await self._renderer()
        try:
            async with asyncio.timeout(self._time_limit_s * STALLED_FACTOR):
                text = await renderer.render(template, chat)
        except RequestRefused:
            self._idle.append(renderer)
            raise
        except TimeoutError:
            await renderer.end()
            raise self._too_slow() from None
        except BaseException:  # also a cancelled request: whoever comes next must not read its answer
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
    """One process, for one conversation at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter
    ) -> None:
        super().__init__(process, stdout, stdin)
        self._known: set[bytes] = set()  # templates

    async def render(self, template: TemplateSource, chat: ChatMessages) -> str:
        """Raises RequestRefused or ProcessEnded."""
        if template.name not in self._known:
            self._known.add(template.name)
            self.tell(TEMPLATE, template.name, template.told)
        kind, answer = await self.ask(CHAT, template.name, chat.SerializeToString())
        if kind == TEXT:
            return answer.decode()
        raise RequestRefused.from_proto(RequestError.FromString(answer))
