"""What each token of a tokenizer says, and how its decoder makes a text of that: read once, used by every stream.

What a decoder does to one piece alone is left to the library, and remembered. What depends on other pieces is done in
decoder_stages.py.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from tokenizers import Tokenizer, decoders

from trunkline_worker.text.decoder_stages import (
    AnyStage,
    ByteRuns,
    Changed,
    Characters,
    FirstDiffers,
    LastDiffers,
    Replaced,
    TextMap,
    Whole,
    WithoutEnd,
    WithoutRepeats,
    WithoutStart,
)

Step = dict[str, Any]  # of a decoder, as tokenizer.json describes it
# A token's piece, or its byte, or its bytes, as the decoder's first stage takes them; None: the token says nothing.
Unit = str | int | bytes | None
Decode = Callable[[list[str]], str]  # all pieces to their text
MakeStage = Callable[[bool], AnyStage]  # told whether text has begun

MAX_REMEMBERED = 1 << 16  # changed pieces; many vocabularies have as many
MAX_REMEMBERED_LENGTH = 64  # characters; a piece that is longer is a run of bytes, and hardly ever comes again
CHARACTER_BYTES = 4  # of UTF-8, at most
FIRST_OF_SEVERAL = 0x80  # bytes below are characters by themselves
PLAIN = ("Replace", "Strip")  # steps that change each piece by itself, before Fuse
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f+][0-9A-Fa-f]>")  # the library's parser takes a plus sign
PANIC = "PanicException"  # how the library fails inside; it is no Exception, and cannot be imported
STAND_IN = "\ue000"  # a piece of no tokenizer


class DecodeError(Exception):
    """The library cannot decode these tokens. One line for a person."""


class Units(dict[int, Unit]):
    """By token id, worked out when first asked for."""

    def __init__(self, read: Callable[[int], Unit]) -> None:
        self._read = read

    def __missing__(self, token_id: int) -> Unit:
        unit = self[token_id] = self._read(token_id)
        return unit


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a stream has to begin to be right at the end of its prompt: at the prompt's token `start`. `begun`: some
    token before that one has a text."""

    start: int
    begun: bool


class TokenTexts:
    """One tokenizer, for all streams."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._special = frozenset(special)
        self._plan = _plan_of(_steps(tokenizer))
        self._with_special = Units(partial(self._unit, skipped=frozenset()))
        self._without_special = Units(partial(self._unit, skipped=self._special))

    def units(self, *, keep_special: bool) -> Units:
        """By token id. Ids that the tokenizer does not have say nothing."""
        return self._with_special if keep_special else self._without_special

    def stages(self, *, begun: bool) -> list[AnyStage]:
        """New ones, for one stream, in their order."""
        return [make(begun) for make in self._plan.stages]

    def opening(self, prompt: Sequence[int], units: Units) -> Opening:
        """As near to the prompt's end as the decoder allows: usually its last token or two, whatever its length."""
        plan = self._plan
        if plan.lead is None:
            return Opening(0, begun=False)
        if plan.is_bytes:
            return Opening(_start_of_bytes(prompt, units), begun=True)
        lead, start = plan.lead, len(prompt)
        has_run_ended = False
        for index in range(len(prompt) - 1, -1, -1):
            unit = units[prompt[index]]
            if isinstance(unit, str):
                has_run_ended = True
                lead -= bool(unit)
                if lead <= 0:
                    return Opening(start, begun=True)
            elif unit is not None and not has_run_ended:
                start = index
        return Opening(0, begun=False)

    def _unit(self, token_id: int, *, skipped: frozenset[str]) -> Unit:
        token = self._tokenizer.id_to_token(token_id)
        return None if token is None or token in skipped else self._plan.read(token)


def _start_of_bytes(prompt: Sequence[int], units: Units) -> int:
    """Where the tokens begin that hold the prompt's last character; its end, where nothing can be added to that one."""
    num_bytes = 0
    for index in range(len(prompt) - 1, -1, -1):
        unit = units[prompt[index]] or b""
        assert isinstance(unit, bytes), "units of a decoder of bytes"
        if unit and not num_bytes and unit[-1] < FIRST_OF_SEVERAL:
            return len(prompt)
        num_bytes += len(unit)
        if num_bytes >= CHARACTER_BYTES:
            return index
    return 0


@dataclass(slots=True)
class _Plan:
    """A decoder taken apart: `read` makes a token's unit, `stages` make the stages, told whether text has begun.

    `lead`: how many pieces that are not empty have to come before a run of bytes for the text to have begun; None where
    a stage remembers more than that, so that a stream has to read its prompt from the beginning.
    """

    read: Callable[[str], Unit]
    stages: list[MakeStage] = field(default_factory=list)
    lead: int | None = 1
    is_bytes: bool = False  # units are
    has_runs: bool = False  # of byte tokens


def _plan_of(steps: list[Step] | None) -> _Plan:
    """`steps`: None where the tokenizer has no decoder; the library joins tokens with blanks then."""
    if steps is None:
        return _Plan(str, [lambda begun: FirstDiffers(str, " {}".format, begun=begun)])
    num_plain = next((index for index, step in enumerate(steps) if step["type"] not in PLAIN), len(steps))
    change = _alone(_library(steps[:num_plain])) if num_plain else str
    kind = steps[num_plain]["type"] if num_plain < len(steps) else ""
    if kind == "ByteLevel":
        to_byte = _byte_of_character()
        plan = _Plan(lambda token: _bytes_of(change(token), to_byte), [lambda _: Characters()], is_bytes=True)
        is_one_piece = True
    elif kind == "ByteFallback":
        plan = _Plan(lambda token: _piece_or_byte(change(token)), [lambda _: ByteRuns()], has_runs=True)
        is_one_piece = False
    else:
        plan, num_plain, is_one_piece = _Plan(change), num_plain - 1, False
    for index in range(num_plain + 1, len(steps)):
        step = steps[index]
        if step["type"] == "Fuse":
            is_one_piece = True
        elif (make := (_of_text if is_one_piece else _of_pieces)(step, plan)) is not None:
            plan.stages.extend(make)
        else:
            plan.stages.append(_whole(steps[index:], is_one_piece=is_one_piece))
            plan.lead = None
            break
    if not plan.stages:
        plan.stages.append(lambda _: Changed(str))
    return plan


def _whole(steps: list[Step], *, is_one_piece: bool) -> MakeStage:
    """The stage of steps that cannot be streamed. `is_one_piece`: pieces come apart, and are one to these steps."""
    decode = _library(steps)
    return lambda _: Whole((lambda pieces: decode(["".join(pieces)])) if is_one_piece else decode)


def _of_pieces(step: Step, plan: _Plan) -> list[MakeStage] | None:
    """The stages of a step that comes while pieces are apart; None where there is none for it."""
    decode, kind = _library([step]), step["type"]
    alone = _remembered(_alone(decode))
    if kind in ("WordPiece", "Metaspace"):
        after_another = _remembered(_after_another(decode))
        return [lambda begun: FirstDiffers(alone, after_another, begun=begun)]
    plan.lead = None
    if kind in PLAIN:
        return [lambda _: Changed(alone)]
    if kind == "CTC":
        return [lambda _: WithoutRepeats(alone)]
    if kind == "BPEDecoder":
        before_another = _remembered(_before_another(decode))
        return [lambda _: LastDiffers(alone, before_another)]
    return None


def _of_text(step: Step, plan: _Plan) -> list[MakeStage] | None:
    """The same where all pieces have become one."""
    if step["type"] == "Strip":
        content, start, stop = step["content"], step["start"], step["stop"]
        # Pieces come here as they are, so that one that is not empty is at least one character.
        is_bounded = not stop and (not plan.stages or (plan.has_runs and len(plan.stages) == 1))
        plan.lead = max(start, 1) if is_bounded else None
        ends: list[MakeStage] = [lambda _: WithoutEnd(content, stop)] if stop else []
        return [lambda begun: WithoutStart(content, 0 if begun else start), *ends]
    plan.lead = None
    if step["type"] == "Replace" and (pattern := step["pattern"].get("String")):
        return [lambda _: Replaced(pattern, step["content"])]
    return None


def _steps(tokenizer: Tokenizer) -> list[Step] | None:
    """The decoder's steps, sequences taken apart."""
    if tokenizer.decoder is None:
        return None

    def flat(step: Step) -> Iterator[Step]:
        if step["type"] != "Sequence":
            yield step
            return
        for part in step["decoders"]:
            yield from flat(part)

    return list(flat(json.loads(tokenizer.decoder.__getstate__())))


def _library(steps: list[Step]) -> Decode:
    """The library's own decoder of these steps. Raises DecodeError, where it fails."""
    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())

    def decode(pieces: list[str]) -> str:
        try:
            text: str = decoder.decode(pieces)
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise DecodeError(f"the decoder of this tokenizer fails: {error}") from None
        return text

    return decode


def _alone(decode: Decode) -> TextMap:
    """What a decoder makes of the only piece."""
    return lambda piece: decode([piece])


def _after_another(decode: Decode) -> TextMap:
    """What it makes of a piece that is not the first."""
    return lambda piece: decode([STAND_IN, piece])[len(STAND_IN) :]


def _before_another(decode: Decode) -> TextMap:
    """What it makes of a piece that is not the last."""
    return lambda piece: decode([piece, STAND_IN])[: -len(STAND_IN)]


def _remembered(change: TextMap) -> TextMap:
    """The same, faster."""
    known = lru_cache(MAX_REMEMBERED)(change)
    return lambda piece: known(piece) if len(piece) <= MAX_REMEMBERED_LENGTH else change(piece)


def _piece_or_byte(piece: str) -> str | int:
    """`<0x0A>` is the byte 10, as ByteFallback reads it."""
    return int(piece[3:5], 16) if BYTE_PIECE.fullmatch(piece) else piece


def _byte_of_character() -> dict[str, int]:
    """ByteLevel's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _bytes_of(piece: str, to_byte: dict[str, int]) -> bytes:
    """A piece with any character outside the alphabet stands for itself, as in the library."""
    try:
        return bytes([to_byte[character] for character in piece])
    except KeyError:
        return piece.encode()
