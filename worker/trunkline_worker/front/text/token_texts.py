"""The text of each token of a tokenizer, and the stages of its decoder: read once, used by every stream.

The library computes what a decoder does to a single piece, and the result is cached. decoder_stages.py computes what
depends on other pieces.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from tokenizers import Tokenizer, decoders

from trunkline_worker.front.text.decoder_stages import (
    AnyStage,
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

Step = dict[str, Any]  # a decoder's step, as tokenizer.json describes it
# A token's piece, byte or bytes, as the decoder's first stage takes them; None: the token has no text.
Unit = str | int | bytes | None
Decode = Callable[[list[str]], str]  # returns the text of all pieces
MakeStage = Callable[[bool], AnyStage]  # its argument: whether text has begun

MAX_REMEMBERED = 1 << 16  # changed pieces; many vocabularies have this size
MAX_REMEMBERED_LENGTH = 64  # characters; a longer piece is a run of bytes, which rarely occurs again
CHARACTER_BYTES = 4  # most bytes of a character in UTF-8
FIRST_OF_SEVERAL = 0x80  # bytes below it are whole characters
PLAIN = ("Replace", "Strip")  # before Fuse, these steps change each piece by itself
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f+][0-9A-Fa-f]>")  # the library's parser accepts a plus sign
PANIC = "PanicException"  # the library's internal failure; it is not an Exception, and cannot be imported
STAND_IN = "\ue000"  # a private-use character, which no tokenizer has as a piece


class DecodeError(Exception):
    """The library cannot decode these tokens. The message is one line for the operator."""


class Units(dict[int, Unit]):
    """The units of tokens by token id, each computed at its first use."""

    def __init__(self, read: Callable[[int], Unit]) -> None:
        self._read = read

    def __missing__(self, token_id: int) -> Unit:
        unit = self[token_id] = self._read(token_id)
        return unit


@dataclass(frozen=True, slots=True)
class Opening:
    """The index `start` of the prompt's token from which a stream must decode to be correct at the prompt's end.
    `begun`: a token before `start` has text."""

    start: int
    begun: bool


class TokenTexts:
    """The texts and decoder stages of one tokenizer, shared by all streams.

    marks: the text of special tokens that occur in them can be kept without that of others (SamplingParams.keep_marks)
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._plan = _plan_of(_steps(tokenizer))
        self._with_special = Units(partial(self._unit, skipped=frozenset()))
        self._without_special = Units(partial(self._unit, skipped=frozenset(special)))
        unmarked = frozenset(token for token in special if not any(token in mark for mark in marks))
        self._with_marks = Units(partial(self._unit, skipped=unmarked))

    def units(self, *, keep_special: bool, keep_marks: bool = False) -> Units:
        """Returns the units by token id. Ids that the tokenizer does not have map to None."""
        if keep_special:
            return self._with_special
        return self._with_marks if keep_marks else self._without_special

    def stages(self, *, begun: bool) -> list[AnyStage]:
        """Returns new stages for one stream, in order. They take units, except bytes of runs: those take a ByteRun."""
        return [make(begun) for make in self._plan.stages]

    @property
    def fuses_runs(self) -> bool:
        """Whether the stages take the text of a run of byte tokens in parts of any size."""
        return self._plan.fuses_runs

    def opening(self, prompt: Sequence[int], units: Units) -> Opening:
        """Returns the latest start that the decoder allows: usually the prompt's last or second-last token."""
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
    """Returns the index of the token in which the prompt's last character begins, or the prompt's length if that
    character is complete."""
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
    """The parts of a decoder: `read` returns a token's unit; `stages` create the stages, given whether text has begun.

    `lead`: number of non-empty pieces that must precede a run of bytes for the text to have begun; None if a stage
    depends on more than that, so that a stream must decode its prompt from the beginning.
    """

    read: Callable[[str], Unit]
    stages: list[MakeStage] = field(default_factory=list)
    lead: int | None = 1
    is_bytes: bool = False  # units are bytes
    fuses_runs: bool = False  # no step takes a run of byte tokens as one piece


def _plan_of(steps: list[Step] | None) -> _Plan:
    """Returns the plan of these steps. None: the tokenizer has no decoder, and the library joins tokens with blanks."""
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
        fuses_runs = [step["type"] for step in steps[num_plain + 1 : num_plain + 2]] in ([], ["Fuse"])
        plan, is_one_piece = _Plan(lambda token: _piece_or_byte(change(token)), fuses_runs=fuses_runs), False
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
    """Returns the stage of steps that cannot be streamed. `is_one_piece`: these steps take all pieces joined."""
    decode = _library(steps)
    return lambda _: Whole((lambda pieces: decode(["".join(pieces)])) if is_one_piece else decode)


def _of_pieces(step: Step, plan: _Plan) -> list[MakeStage] | None:
    """Returns the stages of a step that takes separate pieces, or None if the step cannot be streamed."""
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
    """Returns the stages of a step that takes all pieces joined, or None if the step cannot be streamed."""
    if step["type"] == "Strip":
        content, start, stop = step["content"], step["start"], step["stop"]
        # Pieces arrive unchanged here, so a non-empty piece has at least one character.
        is_bounded = not stop and not plan.stages
        plan.lead = max(start, 1) if is_bounded else None
        ends: list[MakeStage] = [lambda _: WithoutEnd(content, stop)] if stop else []
        return [lambda begun: WithoutStart(content, 0 if begun else start), *ends]
    plan.lead = None
    if step["type"] == "Replace" and (pattern := step["pattern"].get("String")):
        return [lambda _: Replaced(pattern, step["content"])]
    return None


def _steps(tokenizer: Tokenizer) -> list[Step] | None:
    """Returns the decoder's steps with nested sequences flattened, or None if the tokenizer has no decoder."""
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
    """Returns the library's decoder of these steps, which raises DecodeError if it fails."""
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
    """Returns how a decoder changes a piece that is the only one."""
    return lambda piece: decode([piece])


def _after_another(decode: Decode) -> TextMap:
    """Returns how a decoder changes a piece that is not the first."""
    return lambda piece: decode([STAND_IN, piece])[len(STAND_IN) :]


def _before_another(decode: Decode) -> TextMap:
    """Returns how a decoder changes a piece that is not the last."""
    return lambda piece: decode([piece, STAND_IN])[: -len(STAND_IN)]


def _remembered(change: TextMap) -> TextMap:
    """Returns `change` with a bounded cache in front of it."""
    known = lru_cache(MAX_REMEMBERED)(change)
    return lambda piece: known(piece) if len(piece) <= MAX_REMEMBERED_LENGTH else change(piece)


def _piece_or_byte(piece: str) -> str | int:
    """Returns the byte that ByteFallback reads from the piece (`<0x0A>` is 10), else the piece."""
    return int(piece[3:5], 16) if BYTE_PIECE.fullmatch(piece) else piece


def _byte_of_character() -> dict[str, int]:
    """ByteLevel's alphabet: printable bytes are their own characters, other bytes the characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _bytes_of(piece: str, to_byte: dict[str, int]) -> bytes:
    """Returns the piece's bytes. As in the library, a piece with a character outside the alphabet is plain UTF-8."""
    try:
        return bytes([to_byte[character] for character in piece])
    except KeyError:
        return piece.encode()
