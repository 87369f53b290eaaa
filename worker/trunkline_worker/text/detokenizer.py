"""Turns tokens into text, one token at a time.

A token's text depends on its neighbours: leading blanks, bytes of one character, bytes that are not valid text. Text is
therefore released when no later token can change it. If the tokenizer spells rare characters as one-byte tokens
(SentencePiece's byte fallback), that is when the run of such tokens ends, because its decoder decodes a run as a whole
or not at all. An output of only such tokens has no text before its end. Other text is released at once, except the
bytes of an incomplete character.
"""

import copy
from collections.abc import Iterable, Sequence

from trunkline_worker.text.decoder_stages import AnyStage, ByteRuns
from trunkline_worker.text.token_texts import TokenTexts


class Detokenizer:
    """The text that one output adds to its prompt's text.

    This is the text of prompt and output, decoded together, without the longest beginning that it shares with the text
    of the prompt alone. A character that the prompt begins and the output completes thus belongs to the output. All
    state is a function of the tokens, so a ledger restores it. The cost of a token does not grow with the output.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], *, keep_special: bool) -> None:
        self._units = units = texts.units(keep_special=keep_special)
        opening = texts.opening(prompt, units)
        window = prompt[opening.start :]
        self._first, *self._others = texts.stages(begun=opening.begun)
        self._runs = self._first if isinstance(self._first, ByteRuns) else None
        self._shared = ""  # the end of the prompt's text that was not final; the output may repeat it
        if window:
            for token_id in window:
                self._push(token_id)
            self._shared = self.held()

    def settle(self, token_id: int) -> str:
        """Returns the text of the run of bytes that this token ends; call it before push(). The text belongs to the
        tokens before this one."""
        runs = self._runs
        if runs is None or not runs.is_open or not isinstance(self._units[token_id], str):
            return ""
        return self._added(self._passed(runs.end()))

    def push(self, token_id: int) -> str:
        """Returns the text that this token makes final. It may be empty, and may belong to earlier tokens too."""
        return self._added(self._push(token_id))

    def held(self) -> str:
        """Returns the text that is held back: what flush() would return now."""
        return _beyond(self._shared, _ended([copy.copy(stage) for stage in (self._first, *self._others)]))[0]

    def flush(self) -> str:
        """Returns the text that was held back. The output ends here."""
        return self._added(_ended((self._first, *self._others)))

    def _push(self, token_id: int) -> str:
        unit = self._units[token_id]
        return "" if unit is None else self._passed(self._first.push(unit))

    def _passed(self, pieces: Sequence[str]) -> str:
        """Returns the final text after the first stage's pieces have passed the other stages."""
        for stage in self._others:
            pieces = [text for piece in pieces for text in stage.push(piece)]
        return "".join(pieces)

    def _added(self, text: str) -> str:
        if self._shared and text:
            text, self._shared = _beyond(self._shared, text)
        return text


def _ended(stages: Iterable[AnyStage]) -> str:
    """Ends the stages in order, each after it has taken the rest of the one before it; returns the text."""
    pieces: list[str] = []
    for stage in stages:
        pieces = [text for piece in pieces for text in stage.push(piece)]
        pieces += stage.end()
    return "".join(pieces)


def _beyond(shared: str, text: str) -> tuple[str, str]:
    """Returns the text without its common beginning with `shared`, and the rest of `shared` that later text may still
    have in common with it."""
    pairs = enumerate(zip(shared, text, strict=False))
    common = next((index for index, (known, new) in pairs if known != new), min(len(shared), len(text)))
    return text[common:], shared[common:] if common == len(text) else ""
