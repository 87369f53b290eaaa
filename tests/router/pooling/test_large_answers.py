"""Answers with millions of numbers are made in pieces, between which other tasks run."""

import numpy as np
import orjson

from tests.router.loop_work import watched_loop
from trunkline.v1.generation_pb2 import Score, Vector
from trunkline_router.edge.pooling.pooled_call import PIECE_BYTES, list_json, values_of
from trunkline_router.request.inputs import MAX_INPUTS

DIMENSIONS = 1024
MOST_S = 0.05  # the whole answer takes several times as long


async def test_a_large_answer_never_holds_the_loop_for_long() -> None:
    vectors = np.random.default_rng(0).random((MAX_INPUTS, DIMENSIONS), np.float32)
    outputs = [Vector(values=vector.tobytes()) for vector in vectors]
    async with watched_loop() as work:
        pieces = await list_json(
            {"model": 'has "data":[]'}, ({"embedding": values_of(one, as_base64=False)} for one in outputs)
        )
    assert work.longest_s < MOST_S
    assert max(map(len, pieces)) < 2 * PIECE_BYTES
    made = orjson.loads(b"".join(pieces))
    assert made["model"] == 'has "data":[]'
    assert np.array_equal(np.array([one["embedding"] for one in made["data"]], np.float32), vectors)


async def test_an_answer_of_one_piece_has_its_entries_in_order() -> None:
    data = ({"data": values_of(Score(values=[number, 0.5]), as_base64=False)} for number in (1.0, 2.0))
    (piece,) = await list_json({"object": "list", "usage": {"total_tokens": 3}}, data)
    assert orjson.loads(piece) == {
        "object": "list",
        "usage": {"total_tokens": 3},
        "data": [{"data": [1.0, 0.5]}, {"data": [2.0, 0.5]}],
    }
