"""Converts text to tokens and back with the tokenizer files of a worker."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tokenizers import Encoding, Tokenizer

from trunkline.status import OVERLOADED, RequestRefused, context_exceeded, invalid
from trunkline.v1.inference_pb2 import ChatMessages
from trunkline.validation import context_words
from trunkline_router.prompts.chat_template import check_conversation
from trunkline_router.prompts.encode_pool import EncodePool, EncoderSource
from trunkline_router.prompts.encode_process import TOKENIZER_FIELD
from trunkline_router.prompts.render_pool import RenderPool, TemplateSource
from trunkline_router.prompts.token_bytes import TokenBytes, token_bytes
from trunkline_router.prompts.tokenizer_config import TokenizerConfig, read_tokenizer_config
from trunkline_router.prompts.tokenizer_traits import FILE, TokenizerTraits, described
from trunkline_runtime.template_syntax import syntax_problem

# Encoding this many characters, or decoding this many tokens, takes about a millisecond. More is done in a thread, and
# beyond the second limit in a process, because a thread would still delay the event loop.
INLINE_CHARACTERS = INLINE_TOKENS = 4096
THREAD_CHARACTERS = THREAD_TOKENS = 32 << 10
# Listing the bytes of this many tokens takes some milliseconds.
INLINE_VOCABULARY = 2048
# A conversation with more bytes than this per character that fits is not rendered. A character has at most four bytes,
# and a template that leaves parts out, such as earlier thoughts, is assumed to keep at least an eighth.
BYTES_PER_CHARACTER = 32
MAX_CHAT_BYTES = 4 << 20
MAX_TEXT_BYTES = 4 << 20  # a million tokens of prose; takes seconds and up to a GiB


class TokenizerError(Exception):
    """A worker's tokenizer files cannot be used. The message is one line for people."""


class PromptTokenizer:
    """A model's tokenizer and chat template. With `traits`, which a helper process has found, the tokenizer is run only
    in helper processes; otherwise it is read and run here. Raises TokenizerError if the files cannot be used.

    encoding: identifies how text becomes tokens
    rendering: identifies how a conversation becomes text; empty without a chat template
    largest_id: of its tokens; -1 if there are none
    """

    def __init__(
        self, files: Mapping[str, bytes], renderers: RenderPool, traits: TokenizerTraits | None = None
    ) -> None:
        self._tokenizer: Tokenizer | None = None
        try:
            if traits is None:
                self._tokenizer, traits = described(files)
            config = read_tokenizer_config(files, padding_token=traits.padding_token)
        except BaseException as error:  # the library raises bare Exception, or panics
            if not _is_failure(error):
                raise
            raise damaged(_one_line(error)) from None
        self._source = EncoderSource(files[FILE])
        self._prefix, self._suffix = traits.prefix, traits.suffix
        self._characters_per_token = traits.characters_per_token
        self.largest_id, self.encoding = traits.largest_id, bytes.fromhex(traits.encoding)
        self._renderers = renderers
        self._template, self.template_problem = _template_of(config)
        self.rendering = b"" if self._template is None else self._template.name
        self._token_bytes: asyncio.Task[TokenBytes | RequestRefused] | None = None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    async def encode(
        self, text: str, *, special_tokens: bool = True, tenant: str = "", weight: float = 1.0
    ) -> Sequence[int]:
        """Returns the token ids of a text, by default with the model's special tokens, such as BOS. Tenants take turns
        with long texts, one at a time. Raises RequestRefused."""
        tokenizer = self._tokenizer
        if tokenizer is None or len(text) > THREAD_CHARACTERS:
            return await self._encode_in_process(text, special_tokens=special_tokens, tenant=tenant, weight=weight)
        if len(text) <= INLINE_CHARACTERS:
            ids = _ids(lambda: tokenizer.encode(text, add_special_tokens=special_tokens))
        else:
            # The one encode function of the library that releases the GIL and keeps no offsets.
            encode = partial(tokenizer.encode_batch_fast, [text], add_special_tokens=special_tokens)
            ids = await asyncio.to_thread(_ids, lambda: encode()[0])
        return [*self._prefix, *ids, *self._suffix] if special_tokens else ids

    async def offsets(
        self, text: str, *, special_tokens: bool = True, tenant: str = "", weight: float = 1.0
    ) -> "array[int]":
        """Returns where the tokens that encode() returns begin in the text, in characters. Always runs in a helper
        process. Raises RequestRefused."""
        starts = await self._encoders(len(text) > THREAD_CHARACTERS).offsets(
            self._source, text, special_tokens=special_tokens, tenant=tenant, weight=weight
        )
        if not special_tokens:
            return starts
        return array("i", [0] * len(self._prefix)) + starts + array("i", [len(text)] * len(self._suffix))

    def check_fits(self, text: str, most_tokens: int | None = None) -> None:
        """Raises RequestRefused if it is clear without tokenizing that the text exceeds `most_tokens` or the size
        limit for all texts."""
        num_bytes = len(text) if text.isascii() or len(text) > MAX_TEXT_BYTES else len(text.encode())
        self._check_fits(len(text), num_bytes, most_tokens)

    def check_chat(self, chat: ChatMessages) -> None:
        """Raises RequestRefused if it is clear without rendering that the conversation cannot be tokenized."""
        check_conversation(chat)
        if self._template is None:
            problem = "this model has no chat template: send a text or token ids instead"
            raise invalid("chat", self.template_problem or problem)

    async def encode_chat(
        self, chat: ChatMessages, most_tokens: int | None = None, *, tenant: str = "", weight: float = 1.0
    ) -> Sequence[int]:
        """Returns the token ids of the rendered conversation. The template writes the special tokens itself. Tenants
        take turns to render according to their weights. Raises RequestRefused."""
        self.check_chat(chat)
        body = chat.SerializeToString()  # takes three milliseconds for the largest conversation
        self._check_can_fit(len(body), most_tokens)
        assert self._template is not None
        rendered = await self._renderers.render(self._template, body, tenant=tenant, weight=weight)
        self._check_fits(rendered.num_characters, len(rendered.utf8), most_tokens)
        if rendered.num_characters > THREAD_CHARACTERS:
            return await self._encode_in_process(rendered.utf8, special_tokens=False, tenant=tenant, weight=weight)
        return await self.encode(rendered.text, special_tokens=False, tenant=tenant, weight=weight)

    async def decode(
        self, token_ids: "array[int]", *, keep_special: bool, tenant: str = "", weight: float = 1.0
    ) -> bytes:
        """Returns the text of the token ids in UTF-8. Raises RequestRefused."""
        skip, tokenizer = not keep_special, self._tokenizer
        if tokenizer is None or len(token_ids) > THREAD_TOKENS:
            return await self._encoders(len(token_ids) > THREAD_TOKENS).decode(
                self._source, token_ids, keep_special=keep_special, tenant=tenant, weight=weight
            )
        try:
            if len(token_ids) <= INLINE_TOKENS:
                return tokenizer.decode(token_ids, skip_special_tokens=skip).encode()
            # The one decode function of the library that releases the GIL.
            decode = partial(tokenizer.decode_batch, [token_ids], skip_special_tokens=skip)
            return (await asyncio.to_thread(decode))[0].encode()
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise invalid("token_ids", f"the model's tokenizer cannot decode them: {_one_line(error)}") from None

    async def token_bytes(self) -> TokenBytes:
        """Returns the bytes of all tokens. They are listed once, at the first call. Raises RequestRefused if the
        tokenizer's tokens cannot be listed, or cannot be listed now (OVERLOADED)."""
        made = self._token_bytes
        if made is None or (made.done() and _may_be_tried_again(made)):
            made = self._token_bytes = asyncio.create_task(self._listed())
        outcome = await asyncio.shield(made)  # other requests wait for it, too
        if isinstance(outcome, RequestRefused):  # a copy, because raising it adds to its traceback
            raise RequestRefused.from_proto(outcome.to_proto())
        return outcome

    async def _listed(self) -> TokenBytes | RequestRefused:
        if self._tokenizer is None or self.largest_id >= INLINE_VOCABULARY:
            try:
                return await self._renderers.encoders.token_bytes(self._source)
            except RequestRefused as refused:
                return refused
        try:
            return token_bytes(self._tokenizer)
        except BaseException as error:
            if not _is_failure(error):
                raise
            return invalid(TOKENIZER_FIELD, f"its tokens cannot be listed: {_one_line(error)}")

    def _check_fits(self, num_characters: int, num_bytes: int, most_tokens: int | None) -> None:
        width = self._characters_per_token
        if most_tokens is not None and width is not None and num_characters > most_tokens * width:
            raise context_exceeded(f"{context_words(most_tokens)}; {num_characters} characters of text cannot fit")
        if num_bytes > MAX_TEXT_BYTES:
            raise invalid("text", f"text of more than {MAX_TEXT_BYTES} bytes is not tokenized")

    def _check_can_fit(self, num_bytes: int, most_tokens: int | None) -> None:
        """Raises RequestRefused if a conversation is too long to be rendered."""
        width = self._characters_per_token
        if most_tokens is not None and width is not None and num_bytes > BYTES_PER_CHARACTER * most_tokens * width:
            raise context_exceeded(f"{context_words(most_tokens)}; {num_bytes} bytes of conversation cannot fit")
        if num_bytes > MAX_CHAT_BYTES:
            raise invalid("chat", f"a conversation of more than {MAX_CHAT_BYTES} bytes is not rendered")

    async def _encode_in_process(
        self, text: str | memoryview, *, special_tokens: bool, tenant: str, weight: float
    ) -> "array[int]":
        encoders = self._encoders(len(text) > THREAD_CHARACTERS)
        ids = await encoders.encode(self._source, text, special_tokens=special_tokens, tenant=tenant, weight=weight)
        return array("i", self._prefix) + ids + array("i", self._suffix) if special_tokens else ids

    def _encoders(self, is_long: bool) -> EncodePool:
        return self._renderers.encoders if is_long else self._renderers.short_encoders


def _ids(encode: Callable[[], Encoding]) -> list[int]:
    try:
        return encode().ids
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise invalid("text", f"the model's tokenizer cannot encode it: {_one_line(error)}") from None


def _may_be_tried_again(made: "asyncio.Task[TokenBytes | RequestRefused]") -> bool:
    if made.cancelled() or made.exception() is not None:
        return True
    outcome = made.result()
    return isinstance(outcome, RequestRefused) and outcome.reason == OVERLOADED


def damaged(problem: str) -> TokenizerError:
    """The error for a worker's files that cannot be used."""
    return TokenizerError(f"the worker's tokenizer files are damaged: {problem}")


def _template_of(config: TokenizerConfig) -> tuple[TemplateSource | None, str]:
    """The template, or None and the reason if there is one that cannot be used."""
    if config.template is None:
        return None, config.template_problem
    if problem := syntax_problem(config.template):
        return None, f"the chat template cannot be used: {problem}"
    return TemplateSource(config.template, config.special_tokens), ""


def _is_failure(error: BaseException) -> bool:
    """Whether the library failed. Its panics are not an Exception, and their class cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
