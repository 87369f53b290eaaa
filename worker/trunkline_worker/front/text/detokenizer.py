"""Turns tokens into text, one token at a time.

A token's text depends on its neighbours: leading blanks, bytes of one character, bytes that are not valid text. Text is
therefore final when no later token can change it. If the tokenizer spells rare characters as one-byte tokens
(SentencePiece's byte fallback), that is when the run of such tokens ends, because its decoder decodes a run as a whole
or not at all. Until then, the text of the run is undecided. Other text is final at once, except the bytes of an
incomplete character.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trunkline_worker.front.text.decoder_stages import REPLACEMENT, AnyStage, ByteRun
from trunkline_worker.front.text.token_texts import TokenTexts


class NewText(NamedTuple):
    """What a token does to the text of the output so far."""

    text: str  # follows the text so far
    is_final: bool = True  # no later token changes the text so far; else it is undecided since it was last final
    withdraws: bool = False  # the undecided text is not part of the output; `text` follows the text before it


class Detokenizer:
    """The text that one output adds to its prompt's text.

    This is the text of prompt and output, decoded together, without the longest beginning that it shares with the text
    of the prompt alone. A character that the prompt begins and the output completes thus belongs to the output. All
    state is a function of the tokens, so a ledger restores it. The cost of a token does not grow with the output.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], *, keep_special: bool) -> None:
        self._units = units = texts.units(keep_special=keep_special)
        self._fuses_runs = texts.fuses_runs
        opening = texts.opening(prompt, units)
        window = prompt[opening.start :]
        self._path = _Path(texts.stages(begun=opening.begun))
        self._run: ByteRun | None = None  # the run of byte tokens in which the tokens so far end
        self._before_run = self._path  # as it was before the undecided text; the same object if there is none
        self._early = ""  # text of the prompt's last run that is the output's if the run becomes text
        if window:
            self._share(window)

    def push(self, token_id: int) -> NewText:
        """Returns the new text of this token."""
        new = self._push(token_id)
        if self._early:
            early, self._early = self._early, ""
            return new if new.withdraws else new._replace(text=early + new.text)
        return new

    def held(self) -> NewText:
        """Returns what flush() would return now."""
        return copy.copy(self).flush()

    def flush(self) -> NewText:
        """Returns the text that only the end of the output makes final. The output ends here."""
        ended = self._end_run()
        return NewText(ended.text + self._path.end(), withdraws=ended.withdraws)

    def __copy__(self) -> "Detokenizer":
        other = object.__new__(Detokenizer)
        other.__dict__.update(self.__dict__)
        other._path = copy.copy(self._path)
        other._before_run = other._path if self._before_run is self._path else copy.copy(self._before_run)
        return other

    def _share(self, window: Sequence[int]) -> None:
        """Takes the end of the prompt. The output may repeat the part of its text that is not final."""
        undecided = ""
        for token_id in window:
            new = self._push(token_id)
            undecided = "" if new.is_final else undecided + new.text
        held = self.held()
        shared = held.text if held.withdraws else undecided + held.text
        self._path.shared = self._before_run.shared = shared
        self._early = self._path.beyond_shared(undecided)

    def _push(self, token_id: int) -> NewText:
        unit = self._units[token_id]
        if unit is None:
            return NewText("", is_final=self._before_run is self._path)
        if isinstance(unit, int):
            return self._push_byte(unit)
        if self._run is None:
            return NewText(self._path.push(unit))
        ended = self._end_run()
        return NewText(ended.text + self._path.push(unit), withdraws=ended.withdraws)

    def _push_byte(self, byte: int) -> NewText:
        if self._run is None:
            self._run = ByteRun()
            self._before_run = copy.copy(self._path)
        elif not self._run.is_text:
            return NewText(self._path.push(REPLACEMENT))
        text = self._run.push(byte)
        if not self._run.is_text:
            return self._decide()
        return NewText(self._path.push(text) if self._fuses_runs and text else "", is_final=False)

    def _end_run(self) -> NewText:
        """Ends the run of byte tokens. Returns the text that this makes final."""
        new = NewText("") if self._before_run is self._path else self._decide()
        self._run = None
        return new

    def _decide(self) -> NewText:
        """Decides whether the run of byte tokens is text. Returns what this makes final."""
        assert self._run is not None
        stands = self._fuses_runs and self._run.is_complete
        if not stands:
            self._path = self._before_run
        text = "" if stands else "".join(map(self._path.push, self._run.pieces()))
        self._before_run = self._path
        return NewText(text, withdraws=not stands)


class _Path:
    """The stages of the decoder after the runs of byte tokens, and what the output shares with its prompt."""

    def __init__(self, stages: Iterable[AnyStage]) -> None:
        self._first, *self._others = stages
        self.shared = ""  # the end of the prompt's text that was not final; the output may repeat it

    def __copy__(self) -> "_Path":
        other = _Path(copy.copy(stage) for stage in (self._first, *self._others))
        other.shared = self.shared
        return other

    def push(self, unit: str | bytes) -> str:
        """Returns the text that no later unit can change."""
        pieces = self._first.push(unit)
        for stage in self._others:
            pieces = [text for piece in pieces for text in stage.push(piece)]
        text = "".join(pieces)
        return self.beyond_shared(text) if self.shared else text

    def end(self) -> str:
        """Returns the text that was held back. No unit may follow."""
        pieces: list[str] = []
        for stage in (self._first, *self._others):
            pieces = [text for piece in pieces for text in stage.push(piece)]
            pieces += stage.end()
        return self.beyond_shared("".join(pieces))

    def beyond_shared(self, text: str) -> str:
        """Returns the text without what it repeats of the prompt's text."""
        if not text:
            return ""
        pairs = enumerate(zip(self.shared, text, strict=False))
        length = min(len(self.shared), len(text))
        common = next((index for index, (known, new) in pairs if known != new), length)
        self.shared = self.shared[common:] if common == len(text) else ""
        return text[common:]
