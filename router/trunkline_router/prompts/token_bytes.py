"""The bytes of each token of a model, for log-probabilities that name tokens by text and by bytes.

A vocabulary writes pieces in its decoder's notation: GPT-2's alphabet of bytes, `<0xE2>` for a byte, "▁" for a blank.
The decoder translates them. What it changes only at a text's ends does not change a piece between others, so a text's
bytes differ from those of its tokens at most in a blank at one end.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from tokenizers import Tokenizer

MAX_BYTES = 16 << 20  # what a router holds for one tokenizer; 128,000 tokens of a published one have a megabyte
PREFIX = "bytes:"
BACKSLASH = ord("\\")
Part = dict[str, Any]  # of a component, as tokenizer.json describes it
NO_DECODER = {"type": "None"}  # the library joins tokens with blanks
BEFORE, AFTER = "\ue000", "\ue001"  # private-use characters that stand for the tokens before and after a piece
ABSENT = 0xFFFD  # any character that is not in Latin-1
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token by token id: `table[token_id]`, empty for an id that the tokenizer does not have.

    The bytes of a text's tokens, joined, are the text in UTF-8, except that many tokenizers add a blank at its
    beginning. Special tokens and other added tokens have the bytes of their own text.
    """

    __slots__ = ("_bytes", "_ends", "leading_blanks", "special")

    def __init__(
        self,
        ends: "array[int]",
        joined: bytes,
        *,
        special: Iterable[int] = (),
        leading_blanks: int = 0,
    ) -> None:
        """`joined` holds the bytes of all tokens in order of id, `ends[token_id]` where a token's bytes end.

        special: the special tokens, which a decoder may leave out
        leading_blanks: number of blanks that the decoder removes at the beginning of a text
        """
        self._ends, self._bytes = ends, joined
        self.special = frozenset(special)
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
        special = array("I", sorted(self.special))
        head = array("I", [len(self._ends), len(special), self.leading_blanks])
        return b"".join((head.tobytes(), self._ends.tobytes(), special.tobytes(), self._bytes))

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The inverse of to_wire()."""
        words = memoryview(data)[: len(data) // 4 * 4].cast("I")
        num_ends, num_special, leading_blanks = words[:3]
        special_at = 3 + num_ends
        joined_at = special_at + num_special
        return cls(
            array("I", words[3:special_at]),
            data[4 * joined_at :],
            special=words[special_at:joined_at],
            leading_blanks=leading_blanks,
        )


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Returns the table of a tokenizer. Takes seconds for a large vocabulary.

    Raises ValueError if the table would exceed MAX_BYTES, and whatever the library raises: a bare Exception or a panic.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    largest_id = max(max(vocabulary.values(), default=-1), max(added, default=-1))
    # Some vocabularies list pieces of their model as added tokens, such as Gemma's "▁▁" for two blanks.
    own = {token_id: token for token_id, token in added.items() if token.special or token.content not in vocabulary}
    parts = decoder_parts(tokenizer)
    bytes_of = piece_bytes(tokenizer, parts)
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
        leading_blanks=leading_blanks(parts),
    )


def _text(data: bytes, prefix: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(map(_escaped, data))


def _escaped(byte: int) -> str:
    """Printable ASCII as it is; Python's unicode_escape codec reads the rest."""
    return chr(byte) if 0x20 <= byte < 0x7F and byte != BACKSLASH else f"\\x{byte:02x}"


def decoder_parts(tokenizer: Tokenizer) -> list[Part]:
    """Returns the parts of a tokenizer's decoder, in order and with sequences flattened."""

    def flat(part: Part) -> Iterator[Part]:
        if part["type"] != "Sequence":
            yield part
            return
        for inside in part["decoders"]:
            yield from flat(inside)

    decoder: Any = tokenizer.decoder
    return [NO_DECODER] if decoder is None else list(flat(json.loads(decoder.__getstate__())))


def piece_bytes(tokenizer: Tokenizer, parts: list[Part]) -> Callable[[str], bytes]:
    """Returns the function from a piece to its bytes: what the decoder writes for it between two other pieces. The
    function raises what the library raises: an Exception or a panic."""
    if parts == [NO_DECODER]:
        return lambda piece: b" " + piece.encode()
    types = {part["type"] for part in parts}
    if "ByteLevel" in types:
        return _from_alphabet
    decode: Callable[[list[str]], str] = tokenizer.decoder.decode
    after = decode([BEFORE, AFTER]).removeprefix(BEFORE)  # with a blank, if the decoder puts one before words

    def bytes_of(piece: str) -> bytes:
        if "ByteFallback" in types and (found := BYTE_PIECE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        return decode([BEFORE, piece, AFTER]).removeprefix(BEFORE).removesuffix(after).encode()

    return bytes_of


def leading_blanks(parts: list[Part]) -> int:
    """Returns the number of blanks that the decoder removes at the beginning of a text."""
    is_whole = False
    for part in parts:
        kind = part["type"]
        is_whole |= kind == "Fuse"
        if kind == "Strip" and is_whole and part["content"] == " ":
            return int(part["start"])
        if kind == "WordPiece" or part == NO_DECODER or (kind == "Metaspace" and part["prepend_scheme"] != "never"):
            return 1
    return 0


def _alphabet() -> dict[int, int]:
    """The inverse of GPT-2's alphabet, for str.translate(). Visible characters of Latin-1 are their own bytes. The
    other bytes, in order, are written as the characters from U+0100 on; their own characters do not occur."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in visible]
    return dict.fromkeys(others, ABSENT) | {0x100 + place: byte for place, byte in enumerate(others)}


ALPHABET = _alphabet()


def _from_alphabet(piece: str) -> bytes:
    try:
        return piece.translate(ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # as in the library, a piece with any other character is plain text
        return piece.encode()
