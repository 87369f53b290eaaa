"""Turns an engine's tokens into what the caller gets: text, stop strings, offsets, finish reason.

A token's text depends on its neighbours: leading blanks, bytes of one character, bytes that are not valid text. Text is
therefore final when no later token can change it. If the tokenizer spells rare characters as one-byte tokens
(SentencePiece's byte fallback), that is when the run of such tokens ends, because its decoder decodes a run as a whole
or not at all. Until then, the text of the run is undecided. Other text is final at once, except the bytes of an
incomplete character.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.worker_pb2 import PoolingActivation, SequenceOutput, Submit
from trunkline.validation import WHOLE_OUTPUTS
from trunkline_worker.front.text.decoder_stages import REPLACEMENT, AnyStage, ByteRun
from trunkline_worker.front.text.token_texts import TokenTexts
from trunkline_worker.front.text.whole_output import finished

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH


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

    def __init__(
        self, texts: TokenTexts, prompt: Sequence[int], *, keep_special: bool, keep_marks: bool = False
    ) -> None:
        self._units = units = texts.units(keep_special=keep_special, keep_marks=keep_marks)
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


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be sent, and the stop string that ended the stream, or None."""

    text: str
    matched: str | None = None


class StopSearch:
    """A streaming search for stop strings.

    The output ends at the first token after which its text contains a stop string. That text is the text of its tokens
    so far, decoded as if the output ended there, without a character that later tokens may complete. What later tokens
    would do to the text does not matter: newlines in a run of byte tokens stop the output as they come, although an
    invalid byte after them would turn the whole run into U+FFFD. The token after which a match is first there decides
    whether the match counts (min_tokens). The match that ends first wins; of several with one end, the longest.

    Exception: text that the tokenizer's decoder holds back is searched when the decoder releases it. If a step other
    than Fuse directly follows ByteFallback, the decoder releases a run of byte tokens only when the run ends.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include_stop
        self._held = ""  # the end of the text, in which a stop string may begin
        self._final_held = ""  # the same, for the text without its undecided end
        self._undecided: list[str] = []  # text before `_held` that cannot leave yet because later tokens may change it

    def push(self, new: NewText, *, may_stop: bool) -> Released:
        """Takes new text and returns what it releases. Unless `may_stop`, no match may end in it."""
        if new.withdraws:
            self._held = self._final_held
            self._undecided.clear()
        buffer = self._held + new.text
        match = self._first_match(buffer) if may_stop else None
        if match is not None:
            start, stop = match
            self._held = ""
            return Released(self._decided(buffer[: start + len(stop) * self._include_stop]), stop)
        num_released = len(buffer) - self._longest_beginning(buffer)
        self._held = buffer[num_released:]
        if not new.is_final:
            self._undecided.append(buffer[:num_released])
            return Released("")
        self._final_held = self._held
        return Released(self._decided(buffer[:num_released]))

    def flush(self) -> str:
        """Returns the text that was held back. The output ends here, and its text is final."""
        held, self._held = self._held, ""
        return held

    def peek(self, new: NewText, *, may_stop: bool) -> Released:
        """Returns what push() and, without a match, flush() would return now."""
        copied = copy.deepcopy(self)
        released = copied.push(new, may_stop=may_stop)
        return Released(released.text + copied.flush(), released.matched)

    def _decided(self, text: str) -> str:
        """Returns the undecided text, which is part of the output, and the text after it."""
        if self._undecided:
            text = "".join((*self._undecided, text))
            self._undecided.clear()
        return text

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            # A match must end in the new text.
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _longest_beginning(self, buffer: str) -> int:
        """Returns the length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._firsts:  # rules out most positions, for any number and length of stop strings
                tail = buffer[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0


class OutputStream:
    """The output of one choice. Its state is a function of submit and tokens, so another worker's ledger restores it.

    `eos`: the model's end-of-sequence tokens; `max_total`: most tokens of prompt and output together; `activation`: of
    a vector or a score.
    Raises RequestRefused if the ledger contradicts itself.
    """

    def __init__(
        self,
        submit: Submit,
        texts: TokenTexts,
        *,
        eos: frozenset[int],
        max_total: int,
        activation: "PoolingActivation.ValueType" = PoolingActivation.POOLING_ACTIVATION_NONE,
    ) -> None:
        self._work, self._activation = submit.work, activation
        self._params = params = submit.sampling
        self._caller_handle = submit.handle
        self._choice = submit.choice
        self._prompt_len = len(submit.prompt_token_ids)
        room = max_total - self._prompt_len
        self._whole = WHOLE_OUTPUTS.get(submit.work.output, "")  # its name, if the output is no tokens
        self._max_tokens = min(params.max_tokens, room) if params.HasField("max_tokens") else room
        stop_ids = frozenset(params.stop_token_ids)
        is_guided = submit.work.HasField("grammar")
        self._end_ids = stop_ids if params.ignore_eos and not is_guided else stop_ids | eos
        # An end token of a grammar ends the choice wherever it comes; its masks see to min_tokens.
        self._least_to_end = 0 if is_guided else params.min_tokens
        self._detokenizer = Detokenizer(
            texts,
            submit.prompt_token_ids,
            keep_special=params.keep_special_tokens,
            keep_marks=params.keep_marks,
        )
        self._stops = StopSearch(params.stop, include_stop=params.include_stop)
        self.num_tokens = 0
        self.cached_tokens = 0
        self._text_bytes = 0
        self.finish = FinishReason.FINISH_REASON_UNSPECIFIED
        self._matched: int | str | None = None  # what ended the choice: a token or a stop string
        self._unsent = ""  # the part of the ledger's text that the caller does not have
        self._num_ahead = 0  # characters that the caller already has, although they are held back here
        if submit.HasField("resume"):
            self._restore(submit)

    @property
    def finished(self) -> bool:
        """Whether the output has ended: no later engine output may be taken."""
        return self.finish != FinishReason.FINISH_REASON_UNSPECIFIED

    def ledger_output(self) -> SequenceOutput | None:
        """Returns the whole answer if the ledger is already complete, so that nothing is computed; else None."""
        if not self.finished:
            return None
        chunk = OutputChunk(
            index=self._choice,
            first_token_index=self.num_tokens,
            text=self._unsent,
            text_offset=self._text_bytes,
            finish_reason=self.finish,
        )
        self._set_matched(chunk, self._matched)
        return SequenceOutput(handle=self._caller_handle, chunk=chunk)

    def take(self, output: EngineOutput) -> SequenceOutput:
        """Returns the caller's output for this engine output. Tokens past a stop string are neither sent nor billed."""
        assert not self.finished, "output after the end"
        result = SequenceOutput(handle=self._caller_handle)
        if output.HasField("error"):
            result.error.CopyFrom(output.error)
            return result
        if output.HasField("prompt"):
            self.cached_tokens = output.prompt.cached_tokens
            result.prompt.CopyFrom(output.prompt)
        if self._whole:
            self._set_whole(result, output)
            return result
        chunk = result.chunk
        chunk.index, chunk.first_token_index = self._choice, self.num_tokens
        text, self._unsent = self._unsent, ""
        for token_id in output.token_ids:
            num_before = self.num_tokens
            text += self._advance(token_id)
            if self.num_tokens > num_before:
                chunk.token_ids.append(token_id)
            if self.finished:
                break
        chunk.logprobs.extend(output.logprobs[: len(chunk.token_ids)])
        if output.finish_reason and not self.finished:
            self.finish = output.finish_reason
            text += self._flush(may_stop=self.num_tokens > self._params.min_tokens)
        if self._num_ahead:
            text, self._num_ahead = text[self._num_ahead :], max(0, self._num_ahead - len(text))
        chunk.text, chunk.text_offset = text, self._text_bytes
        self._text_bytes += len(text.encode())
        chunk.finish_reason = self.finish
        self._set_matched(chunk, self._matched)
        return result

    def _set_whole(self, result: SequenceOutput, output: EngineOutput) -> None:
        """Sets an output that is no tokens, which ends the choice."""
        self.finish = output.finish_reason
        values = finished(output.values, self._work, self._activation)
        if self._whole == "vector":
            result.vector.values = values.astype("<f4").tobytes()
        else:
            result.score.values.extend(values.tolist())

    def _advance(self, token_id: int) -> str:
        """Takes one more output token and returns the text that it releases. Sets `finish` if the output ends."""
        may_stop = self.num_tokens >= self._params.min_tokens
        if token_id in self._end_ids and self.num_tokens >= self._least_to_end:
            return self._end_at(token_id)
        self.num_tokens += 1
        released = self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop)
        text = released.text
        if released.matched is not None:
            self.finish, self._matched = STOP, released.matched
        elif self.num_tokens >= self._max_tokens:
            self.finish = LENGTH
            text += self._flush(may_stop=may_stop)
        return text

    def _end_at(self, token_id: int) -> str:
        """Ends the output at an end token and returns its remaining text.

        A stop string in text that only the end makes final comes before the end token, which is then not counted.
        """
        rest = self._detokenizer.held()
        if rest.text:
            before = self._stops.peek(rest, may_stop=self.num_tokens > self._params.min_tokens)
            if before.matched is not None:
                self.finish, self._matched = STOP, before.matched
                return before.text
        self.num_tokens += 1
        self.finish, self._matched = STOP, token_id
        text = ""
        if self._params.include_stop:
            text = self._stops.push(self._detokenizer.push(token_id), may_stop=False).text
        return text + self._flush(may_stop=False)

    def _flush(self, *, may_stop: bool) -> str:
        """Returns the text that was held back. It may still contain a stop string."""
        released = self._stops.push(self._detokenizer.flush(), may_stop=may_stop)
        if released.matched is not None:
            self.finish, self._matched = STOP, released.matched
            return released.text
        return released.text + self._stops.flush()

    def _restore(self, submit: Submit) -> None:
        ledger = submit.resume.output_token_ids
        text = ""
        for index, token_id in enumerate(ledger):
            text += self._advance(token_id)
            if self.finished and (index + 1 < len(ledger) or self.num_tokens <= index):
                raise invalid(
                    "resume.output_token_ids", f"the output had ended after {self.num_tokens} of {len(ledger)} tokens"
                )
        # A worker of another version may have sent text that is held back here.
        held = "" if self.finished else self._stops.peek(self._detokenizer.held(), may_stop=False).text
        encoded, sent = (text + held).encode(), submit.resume.text_bytes_sent
        if sent > len(encoded):
            raise invalid(
                "resume.text_bytes_sent", f"{sent} is more than the {len(encoded)} bytes that the tokens make"
            )
        try:
            num_sent = len(encoded[:sent].decode())
        except UnicodeDecodeError:
            raise invalid("resume.text_bytes_sent", f"{sent} is inside a character") from None
        self._unsent = text[num_sent:]
        self._num_ahead = max(0, num_sent - len(text))
        self._text_bytes = sent

    @staticmethod
    def _set_matched(chunk: OutputChunk, matched: int | str | None) -> None:
        if isinstance(matched, int):
            chunk.stop_token_id = matched
        elif matched is not None:
            chunk.stop_string = matched
