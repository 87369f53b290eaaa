"""How far an answer has come: all choices of one request, whichever workers they came from."""

import sys
from array import array
from collections.abc import Iterator, Sequence

from trunkline.ledger import TOKEN_BYTES, Ledger, OutOfOrder
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.inference_pb2 import PromptInfo, Usage


class AnswerLedger:
    """`max_bytes`: past it tokens are kept no longer, and the answer stays with its worker; None: they always are."""

    __slots__ = ("_most_tokens", "can_resume", "completion_tokens", "ledgers", "num_unfinished", "prompt_known")

    def __init__(self, choices: int, max_bytes: int | None = None) -> None:
        self.ledgers = [Ledger() for _ in range(choices)]
        self.completion_tokens = 0  # of all choices
        self.num_unfinished = choices
        self.prompt_known = False  # what is to be told of the prompt has come
        self.can_resume = True  # all that another worker needs is there
        self._most_tokens = sys.maxsize if max_bytes is None else max_bytes // TOKEN_BYTES

    @property
    def has_output(self) -> bool:
        """Whether any news has come: from then on only an equal worker may go on."""
        return self.prompt_known or any(ledger.num_tokens or ledger.finished for ledger in self.ledgers)

    @property
    def num_output(self) -> int:
        """Tokens of the longest unfinished choice: what a worker must have room for beside the prompt."""
        return max((ledger.num_tokens for _, ledger in self.unfinished()), default=0)

    def longest_output(self) -> "array[int] | None":
        """The longest unfinished choice; None where there is nothing yet."""
        longest = max((ledger for _, ledger in self.unfinished()), key=lambda ledger: ledger.num_tokens)
        return longest.tokens or None

    def unfinished(self) -> Iterator[tuple[int, Ledger]]:
        """The choices that a worker has to bring to their end."""
        return ((choice, ledger) for choice, ledger in enumerate(self.ledgers) if not ledger.finished)

    def add(self, chunk: OutputChunk) -> int:
        """News of one choice; returns its tokens. Raises OutOfOrder, and takes nothing, where it does not follow."""
        try:
            ledger = self.ledgers[chunk.index]
        except IndexError:
            raise OutOfOrder(f"output came for choice {chunk.index} of {len(self.ledgers)}") from None
        num_tokens = ledger.add(chunk)
        self.completion_tokens += num_tokens
        if ledger.finished:
            self.num_unfinished -= 1
        if self.completion_tokens > self._most_tokens:
            self.forget()
        return num_tokens

    def claim(self, choice: int, token_ids: Sequence[int], text_bytes: int, *, finished: bool) -> None:
        """What a client says that it has of a choice takes the place of what was known of it."""
        known = self.ledgers[choice]
        ledger = self.ledgers[choice] = Ledger.claimed(token_ids, text_bytes, finished=finished)
        # The tokens of a finished choice may be left out: what it once had it still has.
        ledger.num_tokens = max(known.num_tokens, ledger.num_tokens)
        self.completion_tokens += ledger.num_tokens - known.num_tokens
        self.num_unfinished += known.finished - finished
        if self.completion_tokens > self._most_tokens:
            self.forget()

    def forget(self) -> None:
        """Gives the memory back: the answer cannot be continued elsewhere any more."""
        if self.can_resume:
            self.can_resume = False
            for ledger in self.ledgers:
                ledger.forget()

    def usage(self, prompt: PromptInfo, resumptions: int) -> Usage:
        """What is billed for it."""
        return Usage(
            prompt_tokens=prompt.prompt_tokens,
            cached_tokens=prompt.cached_tokens,
            completion_tokens=self.completion_tokens,
            resumptions=resumptions,
        )
