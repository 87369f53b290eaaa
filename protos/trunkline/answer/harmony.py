"""gpt-oss: Harmony's messages, each with a header, such as
<|start|>assistant to=functions.name<|channel|>commentary json<|message|>{…}<|call|>.

The prompt ends in a header, after its role.
"""

import re
from collections.abc import Sequence

from trunkline.answer.answer_items import BETWEEN_RUNS
from trunkline.answer.json_calls import JsonParser
from trunkline.answer.output_reader import Malformed, Marks, Reading, Write, leave_out

_START = "<|start|>assistant"
_HEADER_END = Marks("<|message|>", "<|end|>", "<|call|>", "<|return|>", _START)
_MESSAGE_END = Marks("<|end|>", "<|return|>", _START)
_CALL_END = Marks("<|call|>", "<|end|>", "<|return|>", _START)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony(JsonParser):
    """The channel `analysis` is reasoning, every other one is text. What the model sends to tools of its own, such as
    `python`, is left out. A message without a header is text. A line break stands between messages of text."""

    strips = (False, False)
    thinks = ()
    inner = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    _follows_text = False  # whether the last message, but for those that are left out, is text

    def read(self) -> Reading[None]:
        begins: Sequence[str] = ("<|channel|>", "to=", "<|constrain|>", "<|message|>", _START)
        while True:
            self.attempt()
            begin = yield from self.sees(*begins)
            if begin:
                yield from self._message(begin)
            else:
                self.again()
                self._follows_text = True
                yield from self._body(_MESSAGE_END, self.prose.write)
            begins = ("<|channel|>", _START)

    def _message(self, begin: str) -> Reading[None]:
        try:
            header, end = yield from self.head(_HEADER_END, stay=True)
            if end != "<|message|>":
                raise Malformed
            self.skip(end)
            yield from self._content(begin + header)
        except Malformed:
            if self.attempted_is_text():
                yield from self._body(_MESSAGE_END, self.prose.write)
            else:
                yield from self.rest_of_call(_CALL_END)

    def _content(self, header: str) -> Reading[None]:
        """Reads the content of a message after its header."""
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] != "assistant" and self.context.tools:
            if recipient[1].startswith("functions."):
                self._follows_text = False
                yield from self.arguments(recipient[1].removeprefix("functions."))
            self.decided()
            yield from self._body(_CALL_END, leave_out)
            return
        self.decided()
        is_reasoning = _CHANNEL.findall(header)[-1:] == ["analysis"]
        if not is_reasoning and self._follows_text and not self.prose.is_blank:
            self.prose.write(BETWEEN_RUNS)
        self._follows_text = not is_reasoning
        yield from self._body(_MESSAGE_END, self.put_reasoning if is_reasoning else self.prose.write)

    def _body(self, ends: Marks, write: Write) -> Reading[None]:
        end = yield from self.until(ends, write, stay=True)
        if end != _START:
            self.skip(end)
