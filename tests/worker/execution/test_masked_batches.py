"""Masks in mixed batches: a row gets the token that it would get alone, from the logits that its own mask leaves."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.engine_rig import make_engine
from tests.worker.sampling_rig import VOCAB, draw, logits_of, placed, row_of
from tests.worker.scheduling.maskers import packed
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.gpu.step_sampling import logprob_entries, sample_step
from trunkline_worker.runner.sampler import FAILURES, NOT_FINITE, NOTHING_LEFT, Sampled, sample
from trunkline_worker.runner.torch_runner import _sample_with_c_kernels

MASKS: dict[str, Callable[[np.random.Generator], list[int]]] = {
    "one": lambda noise: [int(noise.integers(VOCAB))],
    "some": lambda noise: noise.choice(VOCAB, 20, replace=False).tolist(),
    "most": lambda noise: noise.choice(VOCAB, VOCAB - 3, replace=False).tolist(),
    "all": lambda noise: list(range(VOCAB)),
    "none": lambda noise: [],
    "the last": lambda noise: [VOCAB - 1],
    "ends of words": lambda noise: [31, 32, 63, 64, 191, 192],
}
Step = tuple[Tensor, dict[int, list[int]]]  # logits [num_rows, VOCAB], and what masks allow, by row
Steps = Callable[[list[Row], list[Step]], Iterator[Sampled]]


def rows_of(pick: random.Random, count: int, *, only_greedy: bool) -> list[Row]:
    """Rows of every kind, in any order."""
    kinds = [
        lambda: row_of(temperature=0.0),
        lambda: row_of(temperature=1.0, seed=pick.getrandbits(64), top_p=pick.choice([1.0, 0.7])),
        lambda: row_of(temperature=0.8, seed=pick.getrandbits(64), top_k=pick.choice([1, 5, 40]), min_p=0.01),
        lambda: row_of(temperature=pick.choice([0.0, 1.3]), seed=pick.getrandbits(64), logprobs=3),
        lambda: row_of([7, 7, 9, 31], temperature=0.0, repetition_penalty=1.3, logit_bias=((8, 4.0),)),
    ]
    return [kinds[0 if only_greedy else pick.randrange(len(kinds))]() for _ in range(count)]


def steps_of(pick: random.Random, num_rows: int) -> list[Step]:
    """The same rows twice, with masks and without. Some logits are not finite, some are equal."""
    found = []
    for _ in range(2):
        logits = logits_of(num_rows, seed=pick.getrandbits(30), spread=pick.choice([0.5, 3.0]))
        logits[pick.randrange(num_rows)].round_()
        broken = pick.randrange(num_rows)
        logits[broken, pick.randrange(VOCAB)] = pick.choice([np.nan, np.inf, -np.inf])
        noise = np.random.default_rng(pick.getrandbits(30))
        masked = pick.sample(range(num_rows), pick.choice([1, num_rows // 2, num_rows]))
        found.append((logits, {i: MASKS[pick.choice([*MASKS])](noise) for i in masked}))
    return found


def mask_of(allowed: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A mask in a buffer whose neighbours allow everything, with the bits past the vocabulary set."""
    marks = np.zeros(VOCAB, bool)
    marks[allowed] = True
    room = np.full((3, -(-VOCAB // 32)), -1, np.int32)
    room[1] = packed(marks)
    room[1, -1] |= np.int32(-1) << (VOCAB % 32)
    return room[1]  # type: ignore[no-any-return]


def on_the_host(choose: Callable[[Tensor, list[Row]], Sampled]) -> Steps:
    def run(rows: list[Row], steps: list[Step]) -> Iterator[Sampled]:
        for logits, allowed in steps:
            yield choose(
                logits.clone(), [row.under(mask_of(allowed[i])) if i in allowed else row for i, row in enumerate(rows)]
            )

    return run


def on_the_device(rows: list[Row], steps: list[Step]) -> Iterator[Sampled]:
    device_rows, table = placed(rows)
    for logits, allowed in steps:
        masks = {i: mask_of(tokens) for i, tokens in allowed.items()}
        with np.errstate(invalid="ignore"):  # the interpreter computes with numpy
            found = sample_step(logits.clone(), table, device_rows, masks=masks)
        tokens: list[int] = found.tokens.tolist()
        written = [int(device_rows.tokens[row.index, row.num_tokens - 1]) for row in table]
        assert written == [max(token, 0) for token in tokens]
        logprobs = logprob_entries(found.logprobs, [3] * len(found.asking)) if found.asking else []
        yield Sampled(
            [token if token >= 0 else None for token in tokens],
            dict(zip(found.asking, logprobs, strict=True)),
            {i: FAILURES[token] for i, token in enumerate(tokens) if token < 0},
        )


def ways() -> dict[str, Steps]:
    runner = make_engine().executor._runner  # type: ignore[attr-defined]
    decoder = runner._model.decoder
    return {
        "torch": on_the_host(lambda logits, rows: sample(logits, rows, row_by_row=False)),
        "torch, row by row": on_the_host(lambda logits, rows: sample(logits, rows, row_by_row=True)),
        "C kernels": on_the_host(lambda logits, rows: _sample_with_c_kernels(decoder, False, logits, rows)),
        "C kernels, row by row": on_the_host(lambda logits, rows: _sample_with_c_kernels(decoder, True, logits, rows)),
        "device": on_the_device,
    }


WAYS = ways()


@pytest.mark.parametrize("only_greedy", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_gets_what_its_own_mask_leaves(way: str, only_greedy: bool) -> None:
    pick = random.Random(3)
    for _ in range(4 if way == "device" else 60):
        rows = rows_of(pick, pick.choice([1, 5, 12]), only_greedy=only_greedy)
        steps = steps_of(pick, len(rows))
        for (logits, allowed), found in zip(steps, WAYS[way](rows, steps), strict=True):
            for i, row in enumerate(rows):
                check(logits[i], row, allowed.get(i), found, i)
            for row, token in zip(rows, found.token_ids, strict=True):
                row.append_token(token or 0)


def check(logits: Tensor, row: Row, allowed: list[int] | None, found: Sampled, i: int) -> None:
    """That a row of a batch got what it gets alone."""
    plain = draw(logits[None], [row])
    if plain.errors:
        assert found.errors[i] == NOT_FINITE
        assert found.token_ids[i] is None
        return
    if allowed is None:
        assert found.token_ids[i] == plain.token_ids[0]
    elif not [token for token in allowed if logits[token] > -np.inf]:
        assert (found.token_ids[i], found.errors[i]) == (None, NOTHING_LEFT)
        return
    else:
        left = torch.full_like(logits, -np.inf)
        left[allowed] = logits[allowed]
        assert found.token_ids[i] == draw(left[None], [row]).token_ids[0]
        assert found.token_ids[i] in allowed
    assert i not in found.errors
    if row.sampling.logprobs is not None:
        unmasked = torch.log_softmax(logits, dim=-1)
        entry = found.logprobs[i]
        assert entry.logprob == pytest.approx(float(unmasked[entry.token_id]), abs=1e-4)
        assert entry.rank == int((logits > logits[entry.token_id]).sum()) + 1
        assert [value for _, value in entry.top] == pytest.approx(unmasked.topk(3).values.tolist(), abs=1e-4)
        assert all(before >= after for (_, before), (_, after) in pairwise(entry.top))


def test_tokens_past_the_last_word_are_excluded() -> None:
    """As with a model whose logits are padded further than its tokenizer's vocabulary."""
    logits = logits_of(1)
    logits[0, 200] = 99.0
    narrow = np.full(3, -1, np.int32)
    best = int(logits[0, :96].argmax())
    assert draw(logits, [row_of(temperature=0.0).under(narrow)]).token_ids == [best]
    device_rows, table = placed([row_of(temperature=0.0)])
    assert sample_step(logits.clone(), table, device_rows, masks={0: narrow}).tokens.tolist() == [best]
