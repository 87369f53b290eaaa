"""One request's news, on their way from the session to the client.

News that the client has not taken yet merge into one response, so a slow client never holds the session back. What
merges is bounded: a client that falls too far behind its output loses its request, before others lose their memory.
"""

import asyncio
from collections.abc import Callable

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo, Usage
from trunkline.v1.worker_pb2 import SequenceOutput

MAX_WAITING_BYTES = 8 << 20  # of one request, as they travel: hours of text, or minutes of it with 20 logprobs each
COME_BACK_MS = 1000


class _Unsent:
    """What one choice has produced since the client last took something.

    The first chunk is passed on as it came. Only when a second one joins it is it copied: by then the client is slow,
    and the step's whole message, of which the chunk is a part, should not be kept in memory for it.
    """

    __slots__ = ("_chunk", "_texts")

    def __init__(self, chunk: OutputChunk) -> None:
        self._chunk = chunk
        self._texts: list[str] | None = None  # joined in the end: strings that grow in a message are never freed

    def extend(self, chunk: OutputChunk) -> int:
        """The choice's next chunk, contiguous with what is there. Returns by how many bytes more is waiting now."""
        more_bytes = chunk.ByteSize()
        if self._texts is None:
            more_bytes += self._chunk.ByteSize()  # not counted before: most chunks leave before another one comes
            first, self._chunk = self._chunk, OutputChunk()
            self._chunk.CopyFrom(first)
            self._texts = [first.text]
        mine = self._chunk
        self._texts.append(chunk.text)
        mine.token_ids.extend(chunk.token_ids)
        mine.logprobs.extend(chunk.logprobs)
        mine.finish_reason = chunk.finish_reason
        if chunk.WhichOneof("matched") == "stop_token_id":
            mine.stop_token_id = chunk.stop_token_id
        elif chunk.WhichOneof("matched") == "stop_string":
            mine.stop_string = chunk.stop_string
        return more_bytes

    def merged(self) -> OutputChunk:
        if self._texts is not None:
            self._chunk.text = "".join(self._texts)
        return self._chunk


class RequestStream:
    """`prompt` is filled in by the first choice's report; until it is there, nothing goes out.

    `on_overflow` is called when the client has let too much wait: the request ends then, and the worker should know
    at once, not only when the client reads on.
    """

    def __init__(self, request_id: str, choices: int, prompt: PromptInfo) -> None:
        self._request_id = request_id
        self._running = choices
        self._prompt = prompt
        self._prompt_known = False
        self._prompt_sent = False
        self._chunks: dict[int, _Unsent] = {}  # by choice
        self._waiting_bytes = 0
        self._error: RequestRefused | None = None
        self._wake = asyncio.Event()
        self.has_output = False  # whether any news has come: from then on the request belongs to its worker
        self.on_overflow: Callable[[], None] = lambda: None
        self.completion_tokens = 0
        self.finish_reasons: dict[int, FinishReason.ValueType] = {}

    @property
    def cached_tokens(self) -> int:
        return self._prompt.cached_tokens

    def put(self, output: SequenceOutput) -> None:
        """News of one choice."""
        if self._error is not None:
            return
        if output.HasField("error"):
            self._error = RequestRefused.from_proto(output.error)
        else:
            self.has_output = True
            if output.chunk.index == 0 and not self._prompt_known:
                self._take_prompt(output.prompt)  # an empty one where the choice ended before it began
            self._take_chunk(output.chunk)
        self._wake.set()

    async def take(self) -> GenerateResponse | None:
        """Everything new in one response; None after the last one. Raises RequestRefused if a choice broke off."""
        while not (self._error or (self._chunks and self._prompt_known)):
            if not self._running and not self._chunks:
                return None
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            raise self._error
        response = GenerateResponse(
            request_id=self._request_id, chunks=[unsent.merged() for unsent in self._chunks.values()]
        )
        self._chunks = {}
        self._waiting_bytes = 0
        if not self._prompt_sent:
            self._prompt_sent = True
            response.prompt.CopyFrom(self._prompt)
        if not self._running:
            response.usage.CopyFrom(
                Usage(
                    prompt_tokens=self._prompt.prompt_tokens,
                    cached_tokens=self._prompt.cached_tokens,
                    completion_tokens=self.completion_tokens,
                )
            )
        return response

    def _take_prompt(self, report: PromptReport) -> None:
        self._prompt_known = True
        self._prompt.cached_tokens = report.cached_tokens
        self._prompt.logprobs.extend(report.logprobs)

    def _take_chunk(self, chunk: OutputChunk) -> None:
        self.completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason:
            self._running -= 1
            self.finish_reasons[chunk.index] = chunk.finish_reason
        waiting = self._chunks.get(chunk.index)
        if waiting is None:
            self._chunks[chunk.index] = _Unsent(chunk)
            return
        self._waiting_bytes += waiting.extend(chunk)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._chunks = {}
            self._error = RequestRefused(
                CODE_RESOURCE_EXHAUSTED,
                OVERLOADED,
                f"the client reads too slowly: more than {MAX_WAITING_BYTES} bytes of output waited for it",
                retry_delay_ms=COME_BACK_MS,
            )
            self.on_overflow()
