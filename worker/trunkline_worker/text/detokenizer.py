"""Tokens to text, one at a time, as they come.

A token's text depends on its neighbours: leading blanks, bytes of one character, bytes that turn out to be no text. So
text leaves when nothing that may follow can change it. Where the tokenizer spells rare characters as tokens of one byte
(SentencePiece's byte fallback), that is when the run of such tokens ends: its decoder makes text of a whole run or of
nothing in it. An output of nothing but such tokens therefore has no text before its end. Other text leaves at once, but
for the bytes of an incomplete character.
"""

import copy
from collections.abc import Iterable, Sequence

from trunkline_worker.text.decoder_stages import AnyStage, ByteRuns
from trunkline_worker.text.token_texts import TokenTexts


class Detokenizer:
    """The text of one output: what it adds to its prompt's.

    That is the text of prompt and output, decoded in one piece, without the longest beginning that it shares with the
    text of the prompt alone. So a character that the prompt begins and the output completes belongs to the output.
    All state is a function of the tokens, so a ledger restores it. A token takes the same time whatever came before it.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], *, keep_special: bool) -> None:
        self._units = units = texts.units(keep_special=keep_special)
        opening = texts.opening(prompt, units)
        window = prompt[opening.start :]
        self._first, *self._others = texts.stages(begun=opening.begun)
        self._runs = self._first if isinstance(self._first, ByteRuns) else None
        self._shared = ""  # what the prompt's text has beyond what is certain of it, as far as output has repeated it
        if window:
            for token_id in window:
                self._push(token_id)
            self._shared = self.held()

    def settle(self, token_id: int) -> str:
        """To be asked before the token is pushed: the text of a run of bytes that this token ends. It belongs to the
        tokens before it."""
        runs = self._runs
        if runs is None or not runs.is_open or not isinstance(self._units[token_id], str):
            return ""
        return self._added(self._passed(runs.end()))

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; may be empty, or belong to tokens before it too."""
        return self._added(self._push(token_id))

    def held(self) -> str:
        """What is held back: the text that the output gets beside what has left, if it ends here."""
        return _beyond(self._shared, _ended([copy.copy(stage) for stage in (self._first, *self._others)]))[0]

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        return self._added(_ended((self._first, *self._others)))

    def _push(self, token_id: int) -> str:
        unit = self._units[token_id]
        return "" if unit is None else self._passed(self._first.push(unit))

    def _passed(self, pieces: Sequence[str]) -> str:
        """What the other stages make of the first one's pieces."""
        for stage in self._others:
            pieces = [text for piece in pieces for text in stage.push(piece)]
        return "".join(pieces)

    def _added(self, text: str) -> str:
        if self._shared and text:
            text, self._shared = _beyond(self._shared, text)
        return text


def _ended(stages: Iterable[AnyStage]) -> str:
    """What stages hold back, each given the rest of the one before it."""
    pieces: list[str] = []
    for stage in stages:
        pieces = [text for piece in pieces for text in stage.push(piece)]
        pieces += stage.end()
    return "".join(pieces)


def _beyond(shared: str, text: str) -> tuple[str, str]:
    """The text without the beginning that it has in common with `shared`, and what of that may yet be in common with
    the text that follows."""
    pairs = enumerate(zip(shared, text, strict=False))
    common = next((index for index, (known, new) in pairs if known != new), min(len(shared), len(text)))
    return text[common:], shared[common:] if common == len(text) else ""
