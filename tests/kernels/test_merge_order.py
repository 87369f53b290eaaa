"""Decode attention's pieces are merged by whichever program is done last: that one makes no difference."""

import sys
from collections.abc import Sequence

import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.attention_cases import BLOCK, make_case
from tests.kernels.attention_rig import decode


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_bits_do_not_depend_on_which_program_is_last(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, batch, _ = make_case([(1, context) for context in (300, 40, 200, 150)], 6, 2)
    prefixes = [(0, 4, 2 * BLOCK)] if shared else None
    if shared:
        batch.block_tables[1:, :2] = batch.block_tables[0, :2]
    found = decode(q, kv, batch, programs=4, multiprocessors=3, shared=prefixes)
    walks = []

    def backwards(*bounds: int) -> Sequence[int]:
        """What the interpreter walks the grid with."""
        runs_the_grid = sys._getframe(1).f_code is interpreter.GridExecutor.__call__.__code__
        walks.append(runs_the_grid)
        return range(*bounds)[::-1] if runs_the_grid else range(*bounds)

    monkeypatch.setattr(interpreter, "range", backwards, raising=False)
    assert torch.equal(decode(q, kv, batch, programs=4, multiprocessors=3, shared=prefixes), found)
    assert any(walks)
