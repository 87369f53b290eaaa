"""Where the tokens of a completion begin in its text."""

import asyncio
import codecs
from array import array
from collections.abc import Iterable

from trunkline_router.edge.long_lists import PIECE
from trunkline_router.edge.openai.logprobs import TokenNames

REPLACEMENT = "\ufffd"  # stands for bytes that are not valid UTF-8
CHARACTER_BYTES = 4  # most bytes of a character in UTF-8


class TextOffsets:
    """The offsets of tokens in the text that a decoder makes of them, in characters.

    The offset of a token is the number of characters before it. A token within a character has the offset of that
    character, and a token without text, such as a special token that is left out, that of the text after it. Offsets
    are computed as tokens come: a byte that makes its run of byte tokens invalid UTF-8 turns the whole run into U+FFFD,
    one for each byte. Offsets are right from that byte on, and earlier ones are not corrected. Text that a stop string
    cuts off counts.
    """

    def __init__(self, names: TokenNames, *, keeps_special: bool) -> None:
        self._names = names
        self._keeps_special = keeps_special
        self._blanks = names.leading_blanks  # that the decoder still removes
        self._offset = 0  # number of characters that are complete
        self._incomplete = b""  # the bytes after them
        self._run_start = 0  # offset of the byte tokens that the tokens so far end in
        self._run_length = 0  # their number
        self._is_text = True  # whether they may be valid UTF-8

    async def pass_prompt(self, token_ids: "array[int]", offset: int) -> None:
        """Takes a prompt. The output begins at this offset, and may complete a character that the prompt has begun."""
        beginning = 0
        while self._blanks and beginning < len(token_ids):
            self._next(token_ids[beginning])
            beginning += 1
            if beginning % PIECE == 0:
                await asyncio.sleep(0)
        self.of_output(token_ids[max(beginning, len(token_ids) - CHARACTER_BYTES) :])
        self._offset = offset
        self._run_length = len(self._incomplete) if self._names.single_bytes else 0
        self._run_start, self._is_text = offset - self._run_length, True

    def of_output(self, token_ids: Iterable[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        return [self._next(token_id) for token_id in token_ids]

    def _next(self, token_id: int) -> int:
        names = self._names
        if not self._keeps_special and token_id in names.special:
            return self._offset
        data = names[token_id]
        if self._blanks and data:
            num_blanks = min(self._blanks, len(data) - len(data.lstrip(b" ")))
            data = data[num_blanks:]
            self._blanks = 0 if data else self._blanks - num_blanks
        if token_id in names.single_bytes:
            return self._next_byte(data)
        if self._run_length and self._incomplete:
            self._end_invalid_run()
        self._run_length, self._is_text = 0, True
        at, joined = self._offset, self._incomplete + data
        text, used = codecs.utf_8_decode(joined, "replace", False)
        if self._incomplete and text.startswith(REPLACEMENT) and not joined.startswith(REPLACEMENT.encode()):
            at += len(self._incomplete.decode(errors="replace"))  # the token does not complete that character
        self._offset += len(text)
        self._incomplete = joined[used:]
        return at

    def _next_byte(self, data: bytes) -> int:
        """Returns the offset of a byte token, which the decoder takes together with those beside it."""
        if not self._run_length:
            self._run_start = self._offset
        self._run_length += 1
        if self._is_text:
            joined = self._incomplete + data
            try:
                text, used = codecs.utf_8_decode(joined, "strict", False)
            except UnicodeDecodeError:
                self._is_text = False
            else:
                at = self._offset
                self._offset += len(text)
                self._incomplete = joined[used:]
                return at
        self._end_invalid_run()
        return self._offset - 1

    def _end_invalid_run(self) -> None:
        """Each byte token of the run so far is one U+FFFD."""
        self._offset, self._incomplete = self._run_start + self._run_length, b""
