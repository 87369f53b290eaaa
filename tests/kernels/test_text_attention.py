"""The Triton attention of encoders, interpreted, against its reference."""

import pytest
import torch

from tests.kernels.tensors import random
from trunkline_kernels.full_attention import full_attention
from trunkline_kernels.gpu.text_attention import TILES, text_attention, tiles_of_texts

SIZE = TILES[4]
LENGTHS = [1, 2, 40, SIZE - 1, SIZE, SIZE + 3, 7, 150]


@pytest.mark.parametrize(
    ("window", "head_dim"), [(None, 24), (None, 32), (0, 24), (1, 8), (5, 32), (SIZE, 24), (200, 8)]
)
def test_it_equals_the_reference_whatever_the_lengths_and_windows(window: int | None, head_dim: int) -> None:
    q, k, v = random(sum(LENGTHS), 3, 2, head_dim).unbind(1)  # tokens are not contiguous, as an encoder has them
    found = text_attention(q, k, v, torch.from_numpy(tiles_of_texts(LENGTHS, q.dtype)), window=window)
    torch.testing.assert_close(found, full_attention(q, k, v, LENGTHS, window=window))


@pytest.mark.parametrize("window", [None, 5])
def test_a_text_has_the_same_bits_whichever_texts_are_beside_it(window: int | None) -> None:
    lengths = [3, 130, 17]
    q, k, v = random(sum(lengths), 3, 2, 24).unbind(1)
    together = torch.split(
        text_attention(q, k, v, torch.from_numpy(tiles_of_texts(lengths, q.dtype)), window=window), lengths
    )
    parts = zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True)
    for beside, own, length in zip(together, parts, lengths, strict=True):
        tiles = torch.from_numpy(tiles_of_texts([length], q.dtype))
        assert torch.equal(text_attention(own[0], own[1], own[2], tiles, window=window), beside)


def test_it_equals_the_reference_in_float16() -> None:
    lengths = [TILES[2] + 1, 5, 2 * TILES[2]]
    q, k, v = random(sum(lengths), 3, 2, 32).half().unbind(1)
    found = text_attention(q, k, v, torch.from_numpy(tiles_of_texts(lengths, q.dtype)), window=None)
    expected = full_attention(q.float(), k.float(), v.float(), lengths, window=None)
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)
