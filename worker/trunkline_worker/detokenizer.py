"""Tokens to text, one at a time, as they come.

A token's text depends on its neighbours (leading spaces, bytes of one character), so a window is decoded with and
without the new tokens and the difference is emitted, once it does not end inside a character. The prompt's tail opens
the window, so that the first output token continues it. The method is that of text-generation-inference and vLLM.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

PROMPT_TAIL = 8  # tokens of the prompt that open the window; enough for any character and its leading space
MOST_PENDING = 8  # tokens held back for a character that never completes; a character has at most 4 bytes
REPLACEMENT = "\ufffd"  # what incomplete bytes decode to


class Detokenizer:
    """The text of one output. All state is a function of the tokens, so a ledger restores it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, keep_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = not keep_special
        self._window = list(prompt[-PROMPT_TAIL:])
        self._emitted = len(self._window)  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty, or belong to tokens before it too."""
        self._window.append(token_id)
        before = self._decode(self._window[: self._emitted])
        now = self._decode(self._window)
        pending = len(self._window) - self._emitted
        if pending < MOST_PENDING and (len(now) <= len(before) or now.endswith(REPLACEMENT)):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return now[len(before) :]

    def flush(self) -> str:
        """What was held back, incomplete characters included, at the end of the output."""
        before = self._decode(self._window[: self._emitted])
        now = self._decode(self._window)
        self._emitted = len(self._window)
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
