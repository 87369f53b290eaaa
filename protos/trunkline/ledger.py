"""The output of a request so far: all that another worker needs to continue it."""

import sys
from array import array
from collections.abc import Iterator, Sequence

from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import PromptInfo, Usage
from trunkline.v1.worker_pb2 import Resume

UNFINISHED = FinishReason.FINISH_REASON_UNSPECIFIED  # once: the enum looks up each name that it is asked for
TOKEN_BYTES = array("i").itemsize


class OutOfOrder(Exception):
    """A worker's output does not continue the earlier output: tokens are missing or repeated."""


class Ledger:
    """The output tokens of one choice, at four bytes per token, and the length of its text."""

    __slots__ = ("finish_reason", "finished", "num_tokens", "text_bytes", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] | None = array("i")  # None once forgotten
        self.num_tokens = 0
        self.text_bytes = 0  # of UTF-8
        self.finished = False
        self.finish_reason = UNFINISHED  # as reported by its worker

    @classmethod
    def claimed(cls, token_ids: Sequence[int], text_bytes: int, *, finished: bool) -> "Ledger":
        """The ledger of a choice's output as claimed by a client."""
        ledger = cls()
        ledger.tokens = None if finished else array("i", token_ids)
        ledger.num_tokens, ledger.text_bytes, ledger.finished = len(token_ids), text_bytes, finished
        return ledger

    def add(self, chunk: OutputChunk) -> int:
        """Adds a chunk; returns its token count. Raises OutOfOrder, and adds nothing, if it is not the next one."""
        if self.finished or chunk.first_token_index != self.num_tokens or chunk.text_offset != self.text_bytes:
            raise OutOfOrder(
                f"output came from token {chunk.first_token_index} and byte {chunk.text_offset} on, "
                f"expected {self.num_tokens} and {self.text_bytes}"
            )
        token_ids = chunk.token_ids
        num_tokens = len(token_ids)
        self.num_tokens += num_tokens
        self.text_bytes += len(chunk.text.encode())
        if finish_reason := chunk.finish_reason:
            self.finished = True
            self.finish_reason = finish_reason
            self.tokens = None  # a finished choice is never continued
        elif self.tokens is not None:
            self.tokens.fromlist(token_ids[:])  # three times as fast as extend(token_ids)
        return num_tokens

    def forget(self) -> None:
        """Frees the tokens' memory. The choice can no longer be continued on another worker."""
        self.tokens = None

    def resume(self) -> Resume | None:
        """The output for another worker to continue; None if there is none yet."""
        assert self.tokens is not None, "forget() was called"
        if not self.num_tokens and not self.text_bytes:
            return None
        return Resume(output_token_ids=self.tokens, text_bytes_sent=self.text_bytes)


class AnswerLedger:
    """The ledgers of a request's choices.

    max_bytes: beyond it the tokens are dropped, and the answer can no longer move to another worker; None: no limit.
    """

    __slots__ = ("_most_tokens", "can_resume", "completion_tokens", "ledgers", "num_unfinished", "prompt_known")

    def __init__(self, choices: int, max_bytes: int | None = None) -> None:
        self.ledgers = [Ledger() for _ in range(choices)]
        self.completion_tokens = 0  # of all choices
        self.num_unfinished = choices
        self.prompt_known = False  # the prompt's report has arrived
        self.can_resume = True  # another worker could continue the answer
        self._most_tokens = sys.maxsize if max_bytes is None else max_bytes // TOKEN_BYTES

    @property
    def has_output(self) -> bool:
        """Whether any part of the answer has arrived. If so, only an equal worker may continue it."""
        return self.prompt_known or self.completion_tokens > 0 or self.num_unfinished < len(self.ledgers)

    @property
    def progress(self) -> int:
        """How far the answer is: grows with every token, and with every choice that ends."""
        return self.completion_tokens + len(self.ledgers) - self.num_unfinished

    @property
    def num_output(self) -> int:
        """Tokens of the longest unfinished choice: a worker needs room for them in addition to the prompt."""
        return max([ledger.num_tokens for ledger in self.ledgers if not ledger.finished], default=0)

    def longest_output(self) -> "array[int] | None":
        """The output tokens of the longest unfinished choice; None if it has none."""
        if not self.completion_tokens:
            return None
        longest = max((ledger for _, ledger in self.unfinished()), key=lambda ledger: ledger.num_tokens)
        return longest.tokens or None

    def unfinished(self) -> Iterator[tuple[int, Ledger]]:
        """The unfinished choices, as (choice, ledger) pairs."""
        return ((choice, ledger) for choice, ledger in enumerate(self.ledgers) if not ledger.finished)

    def add(self, chunk: OutputChunk) -> int:
        """Adds a chunk; returns its token count. Raises OutOfOrder, and adds nothing, if it is not the next one."""
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
        """Replaces a choice's ledger by the output that a client claims to have."""
        known = self.ledgers[choice]
        ledger = self.ledgers[choice] = Ledger.claimed(token_ids, text_bytes, finished=finished)
        # The claim may leave out the tokens of a finished choice, so the count must not fall.
        ledger.num_tokens = max(known.num_tokens, ledger.num_tokens)
        self.completion_tokens += ledger.num_tokens - known.num_tokens
        self.num_unfinished += known.finished - finished
        if self.completion_tokens > self._most_tokens:
            self.forget()

    def forget(self) -> None:
        """Frees the tokens' memory. The answer can no longer be continued on another worker."""
        if self.can_resume:
            self.can_resume = False
            for ledger in self.ledgers:
                ledger.forget()

    def usage(self, prompt: PromptInfo, resumptions: int) -> Usage:
        """Token counts for billing."""
        return Usage(
            prompt_tokens=prompt.prompt_tokens,
            cached_tokens=prompt.cached_tokens,
            completion_tokens=self.completion_tokens,
            resumptions=resumptions,
        )
