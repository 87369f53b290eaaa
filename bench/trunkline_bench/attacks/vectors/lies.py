"""Lies of a broken worker."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import nan

from trunkline.v1.generation_pb2 import OutputChunk, RequestError
from trunkline.v1.worker_pb2 import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    GetModelResponse,
    LoadSample,
    SequenceOutput,
    StepCostModel,
    Submit,
    WatchCacheResponse,
)

MIB = 1 << 20
HASH_BYTES = 16
PIECE_BYTES = 1 << 20  # of a tokenizer's file
LOOP_BLOCKS = 20_000  # stored and cleared again in one message
UNKNOWN_OUTPUTS = 20_000  # in one message

Files = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Lie:
    """Replaces what an honest worker would send. None: honest.

    output: outputs that answer a submit
    cache: messages of WatchCache after the snapshot, possibly endless; takes epoch and sequence number
    flood: outputs added to every message of a session, without end
    tokenizer: changes the files; "hangs": the files never come; "floods": they never end
    copies: uses the id and epoch of the real worker
    """

    model: Callable[[GetModelResponse], None] | None = None
    load: Callable[[], LoadSample] | None = None
    output: Callable[[Submit], list[SequenceOutput]] | None = None
    cache: Callable[[int, int], Iterator[WatchCacheResponse]] | None = None
    flood: Callable[[], list[SequenceOutput]] | None = None
    tokenizer: Callable[[Files], Files] | str | None = None
    copies: bool = False


def _sets(field: str, value: float) -> Callable[[GetModelResponse], None]:
    return lambda model: setattr(model, field, value)


def _hot_default(model: GetModelResponse) -> None:
    model.default_sampling.temperature = nan


def _error(code: int) -> Callable[[Submit], list[SequenceOutput]]:
    error = RequestError(code=code, reason="NO_WORKER", message="the worker goes away")
    return lambda submit: [SequenceOutput(handle=submit.handle, error=error)]


def _end(reason: int) -> Callable[[Submit], list[SequenceOutput]]:
    def output(submit: Submit) -> list[SequenceOutput]:
        chunk = OutputChunk(index=submit.choice, token_ids=[5], text="x")
        chunk.finish_reason = reason  # type: ignore[assignment]
        return [SequenceOutput(handle=submit.handle, chunk=chunk)]

    return output


def _too_many_tokens(submit: Submit) -> list[SequenceOutput]:
    tokens = submit.sampling.max_tokens + 100
    chunk = OutputChunk(index=submit.choice, token_ids=[5] * tokens, text="x" * tokens)
    return [SequenceOutput(handle=submit.handle, chunk=chunk)]


def _large_snapshot(epoch: int, sequence: int) -> Iterator[WatchCacheResponse]:
    hashes = os.urandom(MIB) * 60  # drawing 60 MiB of random bytes would delay this worker rather than the router
    for part in range(3):
        snapshot = CacheSnapshot(block_hashes=hashes, first=part == 0, last=part == 2)
        yield WatchCacheResponse(epoch=epoch, sequence=sequence, snapshot=snapshot)


def _changing_cache(epoch: int, sequence: int) -> Iterator[WatchCacheResponse]:
    hashes = os.urandom(LOOP_BLOCKS * HASH_BYTES)
    stored, cleared = CacheEvent(stored=BlocksStored(block_hashes=hashes)), CacheEvent(cleared=CacheCleared())
    while True:
        sequence += 1
        yield WatchCacheResponse(epoch=epoch, sequence=sequence, events=CacheEvents(events=[stored, cleared]))


def _unknown_removals(epoch: int, sequence: int) -> Iterator[WatchCacheResponse]:
    removed = CacheEvent(removed=BlocksRemoved(block_hashes=os.urandom(LOOP_BLOCKS * HASH_BYTES)))
    while True:
        sequence += 1
        yield WatchCacheResponse(epoch=epoch, sequence=sequence, events=CacheEvents(events=[removed]))


def _unknown_outputs() -> list[SequenceOutput]:
    return [SequenceOutput(handle=(1 << 62) + number) for number in range(UNKNOWN_OUTPUTS)]


def _without_merges(files: Files) -> Files:
    """One token per character: the vocabulary stays the same, but a text has other tokens."""
    tokenizer = json.loads(files["tokenizer.json"])
    tokenizer["model"]["merges"] = []
    return files | {"tokenizer.json": json.dumps(tokenizer).encode()}


LIES: Mapping[str, Lie] = {
    "two entries of uncached_tokens_by_lane": Lie(load=lambda: LoadSample(uncached_tokens_by_lane=[1, 2])),
    "four entries of waiting_by_lane": Lie(load=lambda: LoadSample(waiting_by_lane=[1, 2, 3, 4])),
    "NaN as the cost of a step": Lie(load=lambda: LoadSample(step_cost=StepCostModel(fixed_s=nan, token_s=nan))),
    "NaN as interactive_reserve": Lie(model=_sets("interactive_reserve", nan)),
    "NaN as itl_target_ms": Lie(model=_sets("itl_target_ms", nan)),
    "NaN as batch_window_ms": Lie(model=_sets("batch_window_ms", nan)),
    "a vocabulary of one token": Lie(model=_sets("vocab_size", 1)),
    "a context of 4 billion tokens": Lie(model=_sets("context_length", (1 << 32) - 1)),
    "NaN as default temperature": Lie(model=_hot_default),
    "another tokenizer under the same weights": Lie(tokenizer=_without_merges),
    "error code 0": Lie(output=_error(0)),
    "error code 999": Lie(output=_error(999)),
    "error code -1": Lie(output=_error(-1)),
    "finish reason 99": Lie(output=_end(99)),
    "more tokens than were asked for": Lie(output=_too_many_tokens),
    "a tokenizer that never comes": Lie(tokenizer="hangs"),
    "a tokenizer without end": Lie(tokenizer="floods"),
    "a cache snapshot of 3 times 60 MiB": Lie(cache=_large_snapshot),
    "blocks stored and cleared in a loop": Lie(cache=_changing_cache),
    "removals of unknown blocks in a loop": Lie(cache=_unknown_removals),
    "outputs of unknown choices in a loop": Lie(flood=_unknown_outputs),
    "another worker's name and epoch": Lie(copies=True),
}
