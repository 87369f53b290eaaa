"""The bytes of each token of a model, for log-probabilities that name tokens by text and by bytes."""

from array import array
from typing import Self

from tokenizers import Tokenizer

from trunkline_router.prompts.vocabulary.piece_bytes import piece_bytes

MAX_BYTES = 16 << 20  # what a router holds for one tokenizer; 128,000 tokens of a published one have a megabyte
PREFIX = "bytes:"
BACKSLASH = ord("\\")


class TokenBytes:
    """The bytes of each token by token id: `table[token_id]`, empty for an id that the tokenizer does not have.

    The bytes of a text's tokens, joined, are the text in UTF-8, except that many tokenizers add a blank at its
    beginning. Special tokens and other added tokens have the bytes of their own text.
    """

    __slots__ = ("_bytes", "_ends")

    def __init__(self, ends: "array[int]", joined: bytes) -> None:
        """`joined` holds the bytes of all tokens in order of id, `ends[token_id]` where a token's bytes end."""
        self._ends, self._bytes = ends, joined

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
        return b"".join((array("I", [len(self._ends)]).tobytes(), self._ends.tobytes(), self._bytes))

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The inverse of to_wire()."""
        counts, ends = array("I"), array("I")
        size = counts.itemsize
        counts.frombytes(data[:size])
        begin = size + counts[0] * size
        ends.frombytes(data[size:begin])
        return cls(ends, data[begin:])


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
    return TokenBytes(ends, bytes(joined))


def _text(data: bytes, prefix: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(map(_escaped, data))


def _escaped(byte: int) -> str:
    """Printable ASCII as it is; Python's unicode_escape codec reads the rest."""
    return chr(byte) if 0x20 <= byte < 0x7F and byte != BACKSLASH else f"\\x{byte:02x}"
