"""What has come of a direct client's answer, whichever worker it came from."""

from trunkline.ledger import Ledger, OutOfOrder
from trunkline.v1.generation_pb2 import RequestError
from trunkline.v1.inference_pb2 import (
    ChoiceLedger,
    DirectLost,
    GenerateResponse,
    GrantResponse,
    PromptInfo,
    Usage,
)
from trunkline.v1.worker_pb2 import Resume, WorkerServiceGenerateResponse
from trunkline.worker_streams import Lost


class DirectAnswer:
    """See the module. `choices`: how many were asked for."""

    def __init__(self, choices: int) -> None:
        self._ledgers = [Ledger() for _ in range(choices)]
        self._waiting: list[WorkerServiceGenerateResponse] = []  # for the prompt, which is told first
        self._prompt = PromptInfo()
        self._request_id = ""
        self._prompt_known = self._prompt_sent = False
        self.resumptions = 0

    @property
    def is_complete(self) -> bool:
        return all(ledger.finished for ledger in self._ledgers)

    @property
    def has_output(self) -> bool:
        return self._prompt_known or any(ledger.num_tokens or ledger.finished for ledger in self._ledgers)

    def begin(self, granted: GrantResponse) -> None:
        """Another attempt begins."""
        self._request_id = granted.request_id
        if not self._prompt_known:
            self._prompt.CopyFrom(granted.prompt)

    def take(self, item: WorkerServiceGenerateResponse) -> list[GenerateResponse]:
        """What the caller hears, a chunk each; nothing where that has to wait. Raises Lost where it does not follow
        what came."""
        chunk = item.chunk
        try:
            self._ledgers[chunk.index].add(chunk)
        except (OutOfOrder, IndexError) as error:
            raise Lost(f"the worker lost its place: {error}") from None
        if chunk.index == 0 and not self._prompt_known:
            self._prompt_known = True
            self._prompt.cached_tokens = item.prompt.cached_tokens
            self._prompt.logprobs.extend(item.prompt.logprobs)
        self._waiting.append(item)
        if not self._prompt_known:
            return []
        responses = [GenerateResponse(request_id=self._request_id, chunks=[waiting.chunk]) for waiting in self._waiting]
        self._waiting = []
        if not self._prompt_sent:
            self._prompt_sent = True
            responses[0].prompt.CopyFrom(self._prompt)
        if self.is_complete:
            responses[-1].usage.CopyFrom(
                Usage(
                    prompt_tokens=self._prompt.prompt_tokens,
                    cached_tokens=self._prompt.cached_tokens,
                    completion_tokens=sum(ledger.num_tokens for ledger in self._ledgers),
                    resumptions=self.resumptions,
                )
            )
        return responses

    def claims(self, refusal: RequestError | None = None) -> DirectLost:
        """How far it has come, for the router."""
        ledgers = []
        for choice, ledger in enumerate(self._ledgers):
            if ledger.finished:
                ledgers.append(ChoiceLedger(choice=choice, finished=True))
            elif ledger.num_tokens or ledger.text_bytes:
                output = Resume(output_token_ids=ledger.tokens, text_bytes_sent=ledger.text_bytes)
                ledgers.append(ChoiceLedger(choice=choice, output=output))
        return DirectLost(ledgers=ledgers, prompt_known=self._prompt_known, refusal=refusal)
