"""The bytes that a piece of a vocabulary adds to a text when it stands between other tokens.

A vocabulary writes pieces in its decoder's notation: GPT-2's alphabet of bytes, `<0xE2>` for a byte, "▁" for a blank.
The steps of the decoder translate them. Steps that change only a text's ends do nothing to a piece between others, so
a text's bytes differ from those of its tokens at most in a blank at one end.
"""

import json
import re
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders

from trunkline_router.prompts.vocabulary.components import Part, parts_of

# A piece before and after it has become bytes.
Piece = str | bytes
Step = Callable[[Piece], Piece]
PieceBytes = Callable[[str], bytes]

MAX_STEPS = 16  # of a decoder; published ones have at most five
NEIGHBOUR = "\ue000"  # a private-use character that stands for the tokens before and after a piece
ABSENT = 0xFFFD  # any character that is not in Latin-1
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_bytes(tokenizer: Tokenizer) -> PieceBytes:
    """Returns the function from a piece to its bytes. The function raises what the library raises: an Exception or a
    panic. Raises ValueError if the decoder has more than MAX_STEPS steps."""
    parts = parts_of(tokenizer.decoder, "decoders")
    if parts is None:  # the library joins tokens with blanks
        return lambda piece: b" " + piece.encode()
    if len(parts) > MAX_STEPS:
        raise ValueError(f"its decoder has {len(parts)} steps; at most {MAX_STEPS} are supported")
    steps = _steps(parts)

    def bytes_of(piece: str) -> bytes:
        result: Piece = piece
        for step in steps:
            result = step(result)
        return result.encode() if isinstance(result, str) else result

    return bytes_of


def single_bytes(tokenizer: Tokenizer, pieces: Sequence[str | None]) -> set[int]:
    """Returns the ids of the pieces that are one byte of a run, which the decoder takes as a whole (ByteFallback)."""
    if all(part["type"] != "ByteFallback" for part in parts_of(tokenizer.decoder, "decoders") or ()):
        return set()
    return {token_id for token_id, piece in enumerate(pieces) if piece is not None and BYTE_PIECE.fullmatch(piece)}


def leading_blanks(tokenizer: Tokenizer) -> int:
    """Returns the number of blanks that the decoder removes at the beginning of a text."""
    parts = parts_of(tokenizer.decoder, "decoders")
    if parts is None:  # the library joins tokens with blanks
        return 1
    is_whole = False
    for part in parts:
        is_whole |= part["type"] == "Fuse"
        if part["type"] == "Strip" and is_whole and part["content"] == " ":
            return int(part["start"])
        if part["type"] == "WordPiece" or (part["type"] == "Metaspace" and part["prepend_scheme"] != "never"):
            return 1
    return 0


def _steps(parts: list[Part]) -> list[Step]:
    """The steps of a decoder for one piece. After Fuse or ByteLevel, a step takes the whole text as one piece."""
    steps: list[Step] = []
    is_whole = False
    for part in parts:
        if part["type"] == "Fuse":
            is_whole = True
        elif part["type"] == "ByteLevel":
            steps.append(_from_alphabet)
            is_whole = True
        elif part["type"] == "ByteFallback":
            steps.append(_from_byte_piece)
        elif part["type"] == "Replace" and (pattern := part["pattern"].get("String")):
            steps.append(_on_text(_replace(pattern, part["content"])))
        elif part["type"] == "Strip" and is_whole:
            continue  # changes only the text's ends
        else:
            steps.append(_on_text(_within_text(part) if is_whole else _among_pieces(part)))
    return steps


def _on_text(change: Callable[[str], str]) -> Step:
    """A step that changes text. It leaves bytes alone, because they may be a part of a character."""
    return lambda piece: change(piece) if isinstance(piece, str) else piece


def _replace(pattern: str, content: str) -> Callable[[str], str]:
    """The library's own takes ten times longer for a short piece."""
    return lambda text: text.replace(pattern, content)


def _within_text(part: Part) -> Callable[[str], str]:
    decode = _library(part)
    return lambda text: decode([f"{NEIGHBOUR}{text}{NEIGHBOUR}"]).removeprefix(NEIGHBOUR).removesuffix(NEIGHBOUR)


def _among_pieces(part: Part) -> Callable[[str], str]:
    decode = _library(part)
    if part["type"] in ("WordPiece", "Metaspace"):  # the first piece gets no blank
        return lambda piece: decode([NEIGHBOUR, piece]).removeprefix(NEIGHBOUR)
    if part["type"] == "BPEDecoder":  # the last piece gets no blank
        return lambda piece: decode([piece, NEIGHBOUR]).removesuffix(NEIGHBOUR)
    return lambda piece: decode([piece])


def _library(part: Part) -> Callable[[list[str]], str]:
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": [part]}).encode())
    decode: Callable[[list[str]], str] = decoder.decode
    return decode


def _from_byte_piece(piece: Piece) -> Piece:
    found = BYTE_PIECE.fullmatch(piece) if isinstance(piece, str) else None
    return piece if found is None else bytes([int(found[1], 16)])


def _alphabet() -> dict[int, int]:
    """The inverse of GPT-2's alphabet, for str.translate(). Visible characters of Latin-1 are their own bytes. The
    other bytes, in order, are written as the characters from U+0100 on; their own characters do not occur."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in visible]
    return dict.fromkeys(others, ABSENT) | {0x100 + place: byte for place, byte in enumerate(others)}


ALPHABET = _alphabet()


def _from_alphabet(piece: Piece) -> Piece:
    if isinstance(piece, bytes):
        return piece
    try:
        return piece.translate(ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # as in the library, a piece with any other character is plain text
        return piece.encode()
