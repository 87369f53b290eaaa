"""Converts text to tokens and back with the tokenizer files of a worker."""

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

from trunkline.status import OVERLOADED, RequestRefused, context_exceeded, invalid
from trunkline.v1.inference_pb2 import ChatMessages
from trunkline.validation import context_words
from trunkline_router.prompts.conversation import check_conversation
from trunkline_router.prompts.helper_pool import SHORT_PROCESSES, Helpers, TokenizerSource
from trunkline_router.prompts.helper_process import EncodedText, Jobs, no_room, one_line, refusal, template_source
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.prompts.tokenizer_files import TOKENIZER, TokenizerTraits, described, read_tokenizer_config
from trunkline_runtime.template_syntax import syntax_problem

# Encoding this many characters, or decoding this many tokens, takes about a millisecond. More is done in a process.
INLINE = 4096
# Characters that are encoded in one job with others. A job takes a fraction of a millisecond beside its work.
GROUP = 16 << 10
# Groups of a request that are converted at the same time: as many as an account has places for short jobs. The others
# take no memory of the account, so a request of any size fits.
GROUPS_AT_ONCE = SHORT_PROCESSES // 2
# Listing the bytes of this many tokens takes some milliseconds.
INLINE_VOCABULARY = 2048
MAX_CHAT_BYTES = 4 << 20
MAX_TEXT_BYTES = 4 << 20  # a million tokens of prose; takes seconds and up to a GiB


class TokenizerError(Exception):
    """A worker's tokenizer files cannot be used. The message is one line for people."""


class InputText(NamedTuple):
    """A text to encode.

    pair: the second one of a pair of texts; None: it is one text
    head, tail: texts before and after it, which are never cut off; inputs may share them, so they are no copies
    """

    text: str
    pair: str | None = None
    head: str = ""
    tail: str = ""

    def num_characters(self) -> int:
        return len(self.head) + len(self.text) + len(self.pair or "") + len(self.tail)


class EncodedInput(NamedTuple):
    """The token ids of an input.

    first_segment: how many of them belong to the first segment of a pair of texts; 0: the tokenizer tells no segments
    num_cut: tokens that were cut off
    """

    ids: "array[int]"
    first_segment: int = 0
    num_cut: int = 0


class PromptTokenizer:
    """A model's tokenizer and chat template. With `traits`, which a helper process has found, the tokenizer is run only
    in helper processes; otherwise it is read here, and short texts are converted here.

    encoding: identifies how text becomes tokens
    rendering: identifies how a conversation becomes text; empty without a chat template
    template: the source of the chat template, of that for tools if there are two; empty without one
    template_problem: why the model's chat template cannot be used, or empty
    largest_id: of its tokens; -1 if there are none
    """

    def __init__(self, files: Mapping[str, bytes], helpers: Helpers, traits: TokenizerTraits | None = None) -> None:
        """Raises TokenizerError if the files cannot be used."""
        self._jobs: Jobs | None = None  # in this process
        try:
            if traits is None:
                tokenizer, traits = described(files)
                self._jobs = Jobs(tokenizer)
            config = read_tokenizer_config(files, padding_token=traits.padding_token)
        except BaseException as error:  # the library raises bare Exception, or panics
            if not _is_failure(error):
                raise
            raise damaged(one_line(error)) from None
        self._source = TokenizerSource(files[TOKENIZER])
        self._prefix, self._suffix = traits.prefix, traits.suffix
        self._characters_per_token = traits.characters_per_token
        self.largest_id, self.encoding = traits.largest_id, bytes.fromhex(traits.encoding)
        self._helpers = helpers
        self._template, self.rendering, self.template_problem = b"", b"", config.template_problem
        self.template = config.template_for_tools or config.template or ""
        if config.template is not None:
            if problem := syntax_problem(config.template) or syntax_problem(config.template_for_tools or ""):
                self.template_problem = f"the chat template cannot be used: {problem}"
            else:
                self._template = template_source(config.template, config.special_tokens, config.template_for_tools)
                self.rendering = sha256(self._template).digest()
        self._model = (self._source.name, self.rendering)  # of a tenant's account at the helper processes
        self._token_bytes: TokenBytes | RequestRefused | None = None
        self._listing = asyncio.Lock()
        self._marks = dict[str, int | None]()  # tokens of the answer format's marks

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template)

    async def encode(self, text: str, *, special_tokens: bool = True, tenant: str = "") -> "array[int]":
        """Returns the token ids of a text, by default with the model's special tokens, such as BOS. Raises
        RequestRefused."""
        ids = array("i", await self._converted("encode", text, special_tokens, tenant))
        return array("i", self._prefix) + ids + array("i", self._suffix) if special_tokens else ids

    async def encode_inputs(
        self, inputs: Sequence[InputText], *, special_tokens: bool, most_tokens: int | None, tenant: str = ""
    ) -> list[EncodedInput]:
        """Returns the token ids of several texts, cut to `most_tokens` each, special tokens included; None: uncut.
        Raises RequestRefused."""
        prefix, suffix = (self._prefix, self._suffix) if special_tokens else ((), ())
        if most_tokens is not None:
            most_tokens -= len(prefix) + len(suffix)
            if most_tokens < 1:
                raise no_room()

        async def encoded(group: Sequence[InputText]) -> bytes:
            num_characters = sum(map(InputText.num_characters, group))
            texts: list[EncodedText] = [(one.head, one.text, one.pair, one.tail) for one in group]
            arguments = (texts, special_tokens, most_tokens)
            if self._jobs is None or num_characters > INLINE:
                account = (tenant, self._model)
                return await self._helpers.encode_inputs(self._source, account, num_characters, *arguments)
            try:
                return self._jobs.encode_inputs(*arguments)
            except BaseException as error:
                raise _refused("encode_inputs", error) from None

        found: dict[int, list[EncodedInput]] = {}
        waiting = enumerate(_groups(inputs))

        async def encode_waiting() -> None:
            for number, group in waiting:
                found[number] = read_encoded(await encoded(group), len(group), prefix, suffix)

        try:
            async with asyncio.TaskGroup() as tasks:  # the first refusal cancels the rest
                for _ in range(GROUPS_AT_ONCE):
                    tasks.create_task(encode_waiting())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [one for number in sorted(found) for one in found[number]]

    async def token_of(self, mark: str) -> int | None:
        """Returns the token that a mark of the model's answer format is; None if it is several. Raises
        RequestRefused."""
        if mark not in self._marks:
            ids = await self.encode(mark, special_tokens=False)
            self._marks[mark] = ids[0] if len(ids) == 1 else None
        return self._marks[mark]

    async def offsets(self, text: str, *, special_tokens: bool = True, tenant: str = "") -> "array[int]":
        """Returns where the tokens that encode() returns begin in the text, in characters. Raises RequestRefused."""
        starts = array("i", await self._converted("offsets", text, special_tokens, tenant))
        if not special_tokens:
            return starts
        return array("i", [0] * len(self._prefix)) + starts + array("i", [len(text)] * len(self._suffix))

    def check_fits(self, text: str, most_tokens: int | None = None) -> None:
        """Raises RequestRefused if the text is too long for `most_tokens`, or exceeds the limit for all texts."""
        if most_tokens is not None and len(text) > most_tokens * self._characters_per_token:
            raise context_exceeded(f"{context_words(most_tokens)}; {len(text)} characters of text cannot fit")
        # A character has at most four bytes, so short texts need not be counted.
        if 4 * len(text) > MAX_TEXT_BYTES and (len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES):
            raise invalid("text", f"text of more than {MAX_TEXT_BYTES} bytes is not tokenized")

    def check_chat(self, chat: ChatMessages) -> None:
        """Raises RequestRefused if it is clear without rendering that the conversation cannot be tokenized."""
        check_conversation(chat)
        if not self._template:
            problem = "this model has no chat template: send a text or token ids instead"
            raise invalid("chat", self.template_problem or problem)

    async def encode_chat(
        self, chat: ChatMessages, most_tokens: int | None = None, *, tenant: str = ""
    ) -> "array[int]":
        """Returns the token ids of the rendered conversation. Raises RequestRefused."""
        text = await self.render_chat(chat, most_tokens, tenant=tenant)
        return await self.encode_rendered(text, tenant=tenant)

    async def encode_rendered(self, text: str, *, tenant: str = "") -> "array[int]":
        """Returns the token ids of a text that the template rendered: it has written the special tokens itself. Raises
        RequestRefused."""
        return await self.encode(text, special_tokens=False, tenant=tenant)

    async def render_chat(self, chat: ChatMessages, most_tokens: int | None = None, *, tenant: str = "") -> str:
        """Returns the conversation as the template renders it. Raises RequestRefused."""
        self.check_chat(chat)
        body = chat.SerializeToString()  # takes three milliseconds for the largest conversation
        if len(body) > MAX_CHAT_BYTES:
            raise invalid("chat", f"a conversation of more than {MAX_CHAT_BYTES} bytes is not rendered")
        num_parts = sum(1 + len(message.parts) for message in chat.messages)
        text = await self._helpers.render(self._template, body, num_parts=num_parts, account=(tenant, self._model))
        self.check_fits(text, most_tokens)
        return text

    async def decode(self, token_ids: "array[int]", *, keep_special: bool, tenant: str = "") -> bytes:
        """Returns the text of the token ids in UTF-8. Raises RequestRefused."""
        return await self._converted("decode", token_ids, keep_special, tenant)

    async def token_bytes(self) -> TokenBytes:
        """Returns the bytes of all tokens. They are listed once. Raises RequestRefused if the tokenizer's tokens cannot
        be listed, or cannot be listed now (OVERLOADED)."""
        async with self._listing:
            if self._token_bytes is None:
                self._token_bytes = await self._listed()
        if isinstance(self._token_bytes, RequestRefused):  # a copy, because raising it adds to its traceback
            raise RequestRefused.from_proto(self._token_bytes.to_proto())
        return self._token_bytes

    async def _converted(self, job: str, converted: "str | array[int]", flag: bool, tenant: str) -> bytes:
        if self._jobs is None or len(converted) > INLINE:
            return await self._helpers.convert(self._source, (tenant, self._model), job, converted, flag)
        try:
            result: bytes = getattr(self._jobs, job)(converted, flag)
        except BaseException as error:
            raise _refused(job, error) from None
        return result

    async def _listed(self) -> TokenBytes | RequestRefused:
        """Raises RequestRefused if there may be a better answer later."""
        try:
            if self._jobs is None or self.largest_id >= INLINE_VOCABULARY:
                return await self._helpers.token_bytes(self._source)
            return TokenBytes.from_wire(self._jobs.token_bytes())
        except RequestRefused as refused:
            if refused.reason == OVERLOADED:
                raise
            return refused
        except BaseException as error:
            return _refused("token_bytes", error)


def _groups(inputs: Sequence[InputText]) -> Iterator[Sequence[InputText]]:
    """Yields the inputs in groups, each of which a short job can encode unless one of its inputs is long."""
    start = num_characters = 0
    for index, one in enumerate(inputs):
        num_characters += one.num_characters()
        if num_characters > GROUP and start < index:
            yield inputs[start:index]
            start, num_characters = index, one.num_characters()
    if inputs:
        yield inputs[start:]


def read_encoded(
    answer: bytes, num_inputs: int, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
) -> list[EncodedInput]:
    """Returns what the job encode_inputs answers, each between a prefix and a suffix. Raises RequestRefused if that
    cannot be an answer: it is a process's that ran a worker's tokenizer."""
    found, at = list[EncodedInput](), 0
    try:
        numbers = array("i", answer)
        for _ in range(num_inputs):
            num_ids, first_segment, num_cut = numbers[at : at + 3]
            if not 0 <= first_segment <= num_ids or num_cut < 0:
                raise ValueError
            at += 3 + num_ids
            ids = array("i", prefix) + numbers[at - num_ids : at] + array("i", suffix)
            found.append(EncodedInput(ids, first_segment and first_segment + len(prefix), num_cut))
        if at != len(numbers):
            raise ValueError
    except ValueError:
        raise refusal("encode_inputs", ValueError("it gives a damaged answer")) from None
    return found


def damaged(problem: str) -> TokenizerError:
    """The error for a worker's files that cannot be used."""
    return TokenizerError(f"the worker's tokenizer files are damaged: {problem}")


def _refused(job: str, error: BaseException) -> RequestRefused:
    """The refusal for a failure of the library, as helper processes word it. Raises any other error."""
    if not _is_failure(error):
        raise error
    return refusal(job, error)


def _is_failure(error: BaseException) -> bool:
    """Whether the library failed. Its panics are not an Exception, and their class cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
