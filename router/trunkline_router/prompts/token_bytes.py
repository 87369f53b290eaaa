"""The bytes of each token of a model, for log-probabilities that name tokens by text and by bytes."""

from array import array
from collections.abc import Iterable
from typing import Self

from tokenizers import Tokenizer

from trunkline_router.prompts.vocabulary.piece_bytes import leading_blanks, piece_bytes, single_bytes

MAX_BYTES = 16 << 20  # what a router holds for one tokenizer; 128,000 tokens of a published one have a megabyte
PREFIX = "bytes:"
BACKSLASH = ord("\\")


class TokenBytes:
    """The bytes of each token by token id: `table[token_id]`, empty for an id that the tokenizer does not have.

    The bytes of a text's tokens, joined, are the text in UTF-8, except that many tokenizers add a blank at its
    beginning. Special tokens and other added tokens have the bytes of their own text.
    """

    __slots__ = ("_bytes", "_ends", "leading_blanks", "single_bytes", "special")

    def __init__(
        self,
        ends: "array[int]",
        joined: bytes,
        *,
        special: Iterable[int] = (),
        single_bytes: Iterable[int] = (),
        leading_blanks: int = 0,
    ) -> None:
        """`joined` holds the bytes of all tokens in order of id, `ends[token_id]` where a token's bytes end.

        special: the special tokens, which a decoder may leave out
        single_bytes: the tokens of byte fallback, of which a decoder takes a run as a whole
        leading_blanks: number of blanks that the decoder removes at the beginning of a text
        """
        self._ends, self._bytes = ends, joined
        self.special, self.single_bytes = frozenset(special), frozenset(single_bytes)
        self.leading_blanks = leading_blanks

    def __len__(self) -> int:
        """The largest id plus one."""
        return len(self._ends)

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._ends):
            return b""
        return self._bytes[self._ends[token_id - 1] if token_id else 0 : self._ends[token_id]]

    def text(self, token_id: int) -> str:
        r"""Returns the token as text, as OpenAI's completions write it: `bytes:\xe2\x80` if it is not UTF-8 by itself.

        U+FFFD in place of such bytes, as in vLLM, would give all parts of characters the same name, so that in
        `top_logprobs`, which has tokens for keys, one would overwrite another.
        """
        return _text(self[token_id], PREFIX)

    def chat_text(self, token_id: int) -> str:
        r"""Returns the token as text, as OpenAI's chat completions write it beside its bytes: `\xe2\x80`, without a
        prefix, if it is not UTF-8 by itself."""
        return _text(self[token_id], "")

    def to_wire(self) -> bytes:
        """The table for from_wire() in another process on this machine."""
        ids = array("I", [*sorted(self.special), *sorted(self.single_bytes)])
        head = array("I", [len(self._ends), len(self.special), len(self.single_bytes), self.leading_blanks])
        return b"".join((head.tobytes(), self._ends.tobytes(), ids.tobytes(), self._bytes))

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The inverse of to_wire()."""

        def numbers(start: int, count: int) -> "array[int]":
            read = array("I")
            read.frombytes(data[start * read.itemsize : (start + count) * read.itemsize])
            return read

        num_ends, num_special, num_single, leading_blanks = head = numbers(0, 4)
        ends = numbers(len(head), num_ends)
        special = numbers(len(head) + num_ends, num_special)
        single_bytes = numbers(len(head) + num_ends + num_special, num_single)
        joined = data[(len(head) + num_ends + num_special + num_single) * ends.itemsize :]
        return cls(ends, joined, special=special, single_bytes=single_bytes, leading_blanks=leading_blanks)


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Returns the table of a tokenizer. Takes seconds for a large vocabulary.

    Raises ValueError if the table would exceed MAX_BYTES or the decoder MAX_STEPS steps, and whatever the library
    raises: a bare Exception or a panic.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    largest_id = max(max(vocabulary.values(), default=-1), max(added, default=-1))
    # Some vocabularies list pieces of their model as added tokens, such as Gemma's "▁▁" for two blanks.
    own = {token_id: token for token_id, token in added.items() if token.special or token.content not in vocabulary}
    bytes_of = piece_bytes(tokenizer)
    pieces: list[str | None] = [None] * (largest_id + 1)
    for name, token_id in vocabulary.items():
        pieces[token_id] = name
    ends, joined = array("I"), bytearray()
    for token_id, piece in enumerate(pieces):
        if token_id in own:
            joined += own[token_id].content.encode()
        elif piece is not None:
            joined += bytes_of(piece)
        if len(joined) > MAX_BYTES:
            raise ValueError(f"its tokens have more than {MAX_BYTES} bytes")
        ends.append(len(joined))
    return TokenBytes(
        ends,
        bytes(joined),
        special=(token_id for token_id, token in added.items() if token.special),
        single_bytes=single_bytes(tokenizer, pieces) - own.keys(),
        leading_blanks=leading_blanks(tokenizer),
    )


def _text(data: bytes, prefix: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(map(_escaped, data))


def _escaped(byte: int) -> str:
    """Printable ASCII as it is; Python's unicode_escape codec reads the rest."""
    return chr(byte) if 0x20 <= byte < 0x7F and byte != BACKSLASH else f"\\x{byte:02x}"
