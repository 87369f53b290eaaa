"""A direct client's answer: the output that has arrived, from whichever workers, as responses of a router."""

from trunkline.answer.answer_parser import AnswerParsers
from trunkline.client.worker_streams import Lost
from trunkline.ledger import AnswerLedger, OutOfOrder
from trunkline.v1.generation_pb2 import RequestError
from trunkline.v1.inference_pb2 import (
    ChoiceLedger,
    DirectLost,
    GenerateResponse,
    GrantResponse,
    PromptInfo,
)
from trunkline.v1.worker_pb2 import Resume, WorkerServiceGenerateResponse


class DirectAnswer:
    """Joins the output of several workers into the responses that a router would send.

    choices: the request's n
    parsers: find the parts of the answer; None: it is text
    """

    def __init__(self, choices: int, parsers: AnswerParsers | None = None) -> None:
        self._ledger = AnswerLedger(choices)
        self._parsers = parsers
        self._waiting: list[WorkerServiceGenerateResponse] = []  # until the prompt's report, which goes first, is there
        self._prompt = PromptInfo()
        self._request_id = ""
        self._prompt_sent = False
        self.resumptions = 0

    @property
    def is_complete(self) -> bool:
        return not self._ledger.num_unfinished

    @property
    def has_output(self) -> bool:
        return self._ledger.has_output

    def begin(self, granted: GrantResponse) -> None:
        """Starts an attempt on the granted worker."""
        self._request_id = granted.request_id
        if not self._ledger.prompt_known:
            self._prompt.CopyFrom(granted.prompt)

    def take(self, item: WorkerServiceGenerateResponse) -> list[GenerateResponse]:
        """Adds a worker's item; returns the responses for the caller, one chunk each, or none while they wait for the
        prompt's report. Raises Lost if the item does not continue the output."""
        chunk = item.chunk
        try:
            self._ledger.add(chunk)
        except OutOfOrder as error:
            raise Lost(f"the worker lost its place: {error}") from None
        if chunk.index == 0 and not self._ledger.prompt_known:
            self._ledger.prompt_known = True
            self._prompt.cached_tokens = item.prompt.cached_tokens
            self._prompt.logprobs.extend(item.prompt.logprobs)
        self._waiting.append(item)
        if not self._ledger.prompt_known:
            return []
        responses = [GenerateResponse(request_id=self._request_id, chunks=[waiting.chunk]) for waiting in self._waiting]
        self._waiting = []
        if self._parsers is not None:
            for response in responses:
                [chunk] = response.chunks
                self._parsers.parse({chunk.index: chunk}, response)
        if not self._prompt_sent:
            self._prompt_sent = True
            responses[0].prompt.CopyFrom(self._prompt)
        if self.is_complete:
            responses[-1].usage.CopyFrom(self._ledger.usage(self._prompt, self.resumptions))
        return responses

    def claims(self, refusal: RequestError | None = None) -> DirectLost:
        """The output so far, as a message to the router."""
        ledgers = []
        for choice, ledger in enumerate(self._ledger.ledgers):
            if ledger.finished:
                ledgers.append(ChoiceLedger(choice=choice, finished=True))
            elif ledger.num_tokens or ledger.text_bytes:
                output = Resume(output_token_ids=ledger.tokens, text_bytes_sent=ledger.text_bytes)
                ledgers.append(ChoiceLedger(choice=choice, output=output))
        return DirectLost(ledgers=ledgers, prompt_known=self._ledger.prompt_known, refusal=refusal)
