"""One request's news, on their way from the session to the client.

News that the client has not taken yet merge into one response, so a slow client costs memory only in proportion to its
own output, and never holds the session back.
"""

import asyncio

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo, Usage
from trunkline.v1.worker_pb2 import SequenceOutput


class RequestStream:
    """`prompt` is filled in by the first choice's report; until it is there, nothing goes out."""

    def __init__(self, request_id: str, choices: int, prompt: PromptInfo) -> None:
        self._request_id = request_id
        self._running = choices
        self._prompt = prompt
        self._prompt_known = False
        self._prompt_sent = False
        self._chunks: dict[int, OutputChunk] = {}  # by choice, not sent yet
        self._error: RequestRefused | None = None
        self._wake = asyncio.Event()
        self.completion_tokens = 0
        self.finish_reasons: dict[int, FinishReason.ValueType] = {}

    @property
    def has_output(self) -> bool:
        """Whether any news has come: from then on the request belongs to its worker."""
        return self._prompt_known or bool(self._chunks)

    @property
    def cached_tokens(self) -> int:
        return self._prompt.cached_tokens

    def put(self, output: SequenceOutput) -> None:
        """News of one choice."""
        if output.HasField("error"):
            self._error = self._error or RequestRefused.from_proto(output.error)
        else:
            if output.HasField("prompt") and output.chunk.index == 0:
                self._take_prompt(output.prompt)
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
        response = GenerateResponse(request_id=self._request_id, chunks=self._chunks.values())
        self._chunks = {}
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
            self._chunks[chunk.index] = chunk
            return
        text = waiting.text + chunk.text
        waiting.token_ids.extend(chunk.token_ids)
        waiting.logprobs.extend(chunk.logprobs)
        waiting.finish_reason = chunk.finish_reason
        if chunk.WhichOneof("matched") == "stop_token_id":
            waiting.stop_token_id = chunk.stop_token_id
        elif chunk.WhichOneof("matched") == "stop_string":
            waiting.stop_string = chunk.stop_string
        waiting.text = text
