"""Turns an engine's tokens into what the caller gets: text, stop strings, offsets, finish reason."""

from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.worker_pb2 import SequenceOutput, Submit
from trunkline_worker.front.text.detokenizer import Detokenizer
from trunkline_worker.front.text.stop_strings import StopSearch
from trunkline_worker.front.text.token_texts import TokenTexts

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH


class OutputStream:
    """The output of one choice. Its state is a function of submit and tokens, so another worker's ledger restores it.

    `eos`: the model's end-of-sequence tokens; `max_total`: most tokens of prompt and output together.
    Raises RequestRefused if the ledger contradicts itself.
    """

    def __init__(self, submit: Submit, texts: TokenTexts, *, eos: frozenset[int], max_total: int) -> None:
        self._params = params = submit.sampling
        self._caller_handle = submit.handle
        self._choice = submit.choice
        self._prompt_len = len(submit.prompt_token_ids)
        room = max_total - self._prompt_len
        self._max_tokens = min(params.max_tokens, room) if params.HasField("max_tokens") else room
        stop_ids = frozenset(params.stop_token_ids)
        self._end_ids = stop_ids if params.ignore_eos else stop_ids | eos
        self._detokenizer = Detokenizer(texts, submit.prompt_token_ids, keep_special=params.keep_special_tokens)
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

    def _advance(self, token_id: int) -> str:
        """Takes one more output token and returns the text that it releases. Sets `finish` if the output ends."""
        may_stop = self.num_tokens >= self._params.min_tokens
        if may_stop and token_id in self._end_ids:
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
