"""Converts long lists of token ids and long texts in messages in pieces, so that other requests run in between."""

import asyncio
from array import array
from collections.abc import Sequence

from trunkline.v1.inference_pb2 import TokenizeResponse
from trunkline.validation import validate_token_ids
from trunkline_runtime.wire import varint_bytes

PIECE = 1 << 14  # ids; one or two milliseconds
TEXT = b"\x0a"  # the tag of DetokenizeResponse.text


async def read_ids(ids: Sequence[int], *, vocab_size: int, field: str) -> "array[int]":
    """Returns the ids of a message. Raises RequestRefused (INVALID_REQUEST) if one is not in the vocabulary."""
    read = array("i")
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        validate_token_ids(piece, vocab_size=vocab_size, field=field, first_index=start)
        read.extend(piece)
        if len(piece) == PIECE:
            await asyncio.sleep(0)
    return read


async def tokenize_response(ids: Sequence[int]) -> bytes:
    """Returns a serialized TokenizeResponse. In protobuf, concatenated messages are one message with lists joined."""
    parts = []
    for start in range(0, len(ids), PIECE):
        parts.append(TokenizeResponse(token_ids=ids[start : start + PIECE]).SerializeToString())
        if start + PIECE < len(ids):
            await asyncio.sleep(0)
    return b"".join(parts)


def detokenize_response(utf8: bytes) -> bytes:
    """Returns a serialized DetokenizeResponse with this text."""
    return b"".join((TEXT, varint_bytes(len(utf8)), utf8))
