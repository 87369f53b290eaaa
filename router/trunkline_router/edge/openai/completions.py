"""POST /v1/completions: each of its prompts is a request of its own."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from functools import partial
from typing import TypeVar

from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, SamplingParams
from trunkline.v1.inference_pb2 import GenerateResponse, Usage
from trunkline_router.edge.http.json_body import packed
from trunkline_router.edge.http_call import CollectedAnswer, HttpCall, answer_of
from trunkline_router.edge.openai.completion_details import CompletionDetails, TextOffsets, completion_logprobs
from trunkline_router.edge.openai.completion_request import CompletionRequest, Prompt
from trunkline_router.edge.openai.openai_answer import Json, OpenAiAnswer
from trunkline_router.edge.openai.token_details import LogprobsBound
from trunkline_router.request.request_call import MAX_REQUEST_ID

AT_ONCE = 32  # prompts of one request that are answered at the same time

Item = TypeVar("Item")


async def completions(call: HttpCall) -> None:
    """POST /v1/completions."""
    request = await call.body(CompletionRequest)
    call.edge.inference.preparer.check_choices(request.n or 1)
    sampling = request.sampling_params()
    prompts = await _prompts(call, request)
    ids = [call.request_id]
    if len(prompts) > 1:  # room for a number within the longest request id
        ids = [f"{call.request_id[: MAX_REQUEST_ID - 4]}-{number}" for number in range(len(prompts))]
    details = _details(request, prompts)
    parts = [partial(_answer_to, call, request, one, name, sampling) for one, name in zip(details, ids, strict=True)]
    await call.answer(merged(parts), CompletionAnswer(call, request, details), streams=request.stream)


async def _prompts(call: HttpCall, request: CompletionRequest) -> list[Prompt]:
    """Returns texts as they are and token ids as arrays, and empties the body's list of them: a request may run for
    minutes, and must not keep a million objects for so long. Raises RequestRefused (INVALID_REQUEST, and as
    check_lengths() before an id is looked at)."""
    given = request.prompts()
    if not isinstance(given[0], str):
        await call.edge.inference.check_lengths(request.model, call.caller, map(len, given))
    prompts = [prompt if isinstance(prompt, str) else packed(prompt, "prompt") for prompt in given]
    if isinstance(request.prompt, list):
        request.prompt.clear()
    return prompts


def _details(request: CompletionRequest, prompts: Sequence[Prompt]) -> list[CompletionDetails]:
    """Returns what holds the details of each prompt. In a stream each prompt has an event of its own."""
    bounds: list[LogprobsBound | None] = [None] * len(prompts)
    if request.prompt_top is not None:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        per_token = (request.n or 1) * (request.prompt_top + 1)
        bounds = [LogprobsBound(field, per_token)] * len(prompts)
        if request.stream:
            bounds = [LogprobsBound(field, per_token) for _ in prompts]
    return [CompletionDetails(request, prompt, bound) for prompt, bound in zip(prompts, bounds, strict=True)]


def _answer_to(
    call: HttpCall, request: CompletionRequest, details: CompletionDetails, request_id: str, sampling: SamplingParams
) -> AsyncGenerator[GenerateResponse, None]:
    """Returns the answer to one of the prompts, whose message is made only when its turn comes: 256 copies of large
    sampling parameters would hold the event loop."""
    generate = request.generate_request(details.prompt, request_id, sampling)
    responses = answer_of(call, generate, request.field_names, details.extras(call))
    if request.prompt_top is not None:
        responses = details.scored(responses)
    return _without_output(responses) if request.max_tokens == 0 else responses


async def _without_output(
    responses: AsyncGenerator[GenerateResponse, None],
) -> AsyncGenerator[GenerateResponse, None]:
    """Leaves out the token that is computed although none is wanted."""
    async with aclosing(responses):
        async for response in responses:
            ends = [chunk.index for chunk in response.chunks if chunk.finish_reason]
            del response.chunks[:]
            for index in ends:
                response.chunks.add(index=index, finish_reason=FinishReason.FINISH_REASON_LENGTH)
            if response.HasField("usage"):
                response.usage.completion_tokens = 0
            yield response


async def merged(
    answers: Sequence[Callable[[], AsyncGenerator[Item, None]]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields the items of all answers as they come, each with the index of its answer. At most AT_ONCE run at a time,
    and each waits until its item is taken. The first error ends them all, and is raised."""
    if len(answers) == 1:  # most requests: without tasks
        async with aclosing(answers[0]()) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue(maxsize=1)
    places = asyncio.Semaphore(AT_ONCE)
    door = asyncio.Lock()  # one begins in a round of the event loop: the first step of each may take a millisecond

    async def run(index: int) -> None:
        async with places:
            async with door:
                await asyncio.sleep(0)
            end: BaseException | None = None
            try:
                async with aclosing(answers[index]()) as items:
                    async for item in items:
                        await queue.put((index, item))
            except Exception as error:
                end = error
            await queue.put(end)  # in its place: after an error no other answer begins

    tasks = [asyncio.create_task(run(index)) for index in range(len(answers))]
    try:
        num_running = len(tasks)
        while num_running:
            event = await queue.get()
            if event is None:
                num_running -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CompletionAnswer(OpenAiAnswer):
    """The answer, as a whole or as events. Each response comes with the number of its prompt."""

    id_prefix, whole_object, event_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, call: HttpCall, request: CompletionRequest, prompts: Sequence[CompletionDetails]) -> None:
        super().__init__(call, request)
        self._prompts = prompts
        self._num_choices = request.n or 1  # of each prompt
        self._num_top = request.logprobs
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._collected = [CollectedAnswer() for _ in prompts]

    def take(self, item: tuple[int, GenerateResponse]) -> None:
        prompt, response = item
        self._collected[prompt].take(response)

    async def whole(self) -> bytes:
        choices: list[Json] = []
        usage = Usage()
        for answer, details in zip(self._collected, self._prompts, strict=True):
            usage.prompt_tokens += answer.usage.prompt_tokens
            usage.cached_tokens += answer.usage.cached_tokens
            usage.completion_tokens += answer.usage.completion_tokens
            for output in answer.choices:
                if choices:
                    await asyncio.sleep(0)  # the log-probabilities of a choice may take long
                logprobs = self._logprobs(len(choices), details, output) or {}
                columns = {name: [*details.columns.get(name, ()), *logprobs[name]] for name in logprobs}
                text = details.text + output.text
                choice = {"index": len(choices), "text": text, "logprobs": columns or None}
                choices.append(choice | self._ending(output) | details.fields())
        return self._whole(self._collected[0].prompt.model, choices, usage)

    def events(self, item: tuple[int, GenerateResponse]) -> bytes:
        """Returns the events for the next response; empty if it has nothing to tell."""
        prompt, response = item
        details, first = self._prompts[prompt], prompt * self._num_choices
        if self._has_usage:
            self._count(response)
        events = []
        if response.HasField("prompt"):
            self._begin(response.prompt.model)
            events = self._echoes(details, first)
        for chunk in response.chunks:
            text, index = chunk.text, first + chunk.index
            if text or chunk.finish_reason or chunk.token_ids:
                logprobs = self._logprobs(index, details, chunk)
                choice: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
                events.append(self._event(choice | self._ending(chunk)))
        return b"".join(events)

    def _echoes(self, details: CompletionDetails, first: int) -> list[bytes]:
        """Returns the events before the output of a prompt, if they have anything to tell."""
        fields = details.fields()
        if not (fields or details.text or details.columns):
            return []
        start = {"text": details.text, "logprobs": details.columns or None, "finish_reason": None, **fields}
        return [self._event({"index": first + number, **start}) for number in range(self._num_choices)]

    def _logprobs(self, index: int, details: CompletionDetails, output: OutputChunk) -> Json | None:
        """Returns the log-probabilities of tokens; None: the request does not want them."""
        if self._num_top is None or details.names is None or details.output_offsets is None:
            return None
        if index not in self._offsets:
            self._offsets[index] = copy(details.output_offsets)
        offsets = self._offsets[index].of_output(output.token_ids)
        return completion_logprobs(
            details.names, output.token_ids, output.logprobs, num_top=self._num_top, offsets=offsets
        )
