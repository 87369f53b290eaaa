"""The output of one choice so far: all that another worker needs to continue it."""

from array import array
from collections.abc import Sequence

from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
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
