"""Why little of a prompt was in a cache: it is compared with the prompts that workers have computed before. Pure.

It holds keys of blocks, no tokens and no text. Keys depend on the salt, so prompts of tenants that share no cache have
nothing in common here.
"""

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import StrEnum

from trunkline_router.routing.prefix_index import WorkerBlocks
from trunkline_router.routing.route import Route, W

# Of all prompts: 8 bytes a key, and at most 4 KiB a prompt for its places in the table. A prompt replaces the one that
# it continues, so a conversation counts once.
MOST_PROMPTS, MOST_KEYS = 1 << 11, 1 << 20
ENOUGH = 0.9  # of what earlier prompts could have left in a cache
# Numbers of leading blocks under which a prompt is found, from 5 on each at most a fifth more than the one before. With
# powers of two, a conversation would be taken for another one that has only the system prompt in common with it.
LENGTHS = sorted({round(2 ** (step / 4)) for step in range(72)})


class CacheMiss(StrEnum):
    """Why a worker found less of a prompt in its cache than earlier prompts could have left there."""

    NEW = "new"  # no earlier prompt goes on as this one, which has no answers in it
    CHANGED = "changed"  # the same, but it has answers: earlier turns of the conversation read otherwise
    COMPUTING = "computing"  # its worker was still computing the same for another request
    OTHER_WORKER = "other_worker"  # another worker had it
    EVICTED = "evicted"  # no worker had it any more
    LOST = "lost"  # nor had one, and the connection to the one that computed it has ended since


@dataclass(frozen=True, slots=True, eq=False)
class EarlierPrompt:
    """keys: of its blocks. blocks: of the worker that has computed it"""

    keys: "array[int]"
    blocks: WorkerBlocks


@dataclass(frozen=True, slots=True)
class Prospect:
    """A prompt when it is sent to a worker, and what is known of its beginning. Numbers are tokens.

    earlier: the prompt before it that shares the most with it
    seen: leading tokens that it shares with an earlier prompt, or that a worker has in its cache
    differing: tokens by which it could share more with `earlier`, but differs from it
    loss: why its worker finds less than `seen`, if it does
    """

    prompt: EarlierPrompt
    earlier: EarlierPrompt | None
    seen: int
    differing: int
    loss: CacheMiss

    def miss(self, found: int, *, has_answers: bool) -> CacheMiss | None:
        """Returns why its worker has found only so many tokens in its cache; None: it found enough.

        has_answers: the conversation has messages of the assistant
        """
        # More than is known of was left there by prompts that this process has not seen, or has forgotten.
        if found > self.seen or found >= ENOUGH * (self.seen + self.differing):
            return None
        if self.seen - found > self.differing:
            return self.loss
        return CacheMiss.CHANGED if has_answers else CacheMiss.NEW


class EarlierPrompts:
    """The prompts that workers have computed lately."""

    def __init__(self) -> None:
        self._prompts: dict[EarlierPrompt, None] = {}  # the oldest first
        self._latest: dict[int, EarlierPrompt] = {}  # by their keys at LENGTHS, each the key of all blocks up to there
        self.num_keys = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def prospect(self, keys: "array[int]", route: Route[W]) -> Prospect:
        """Compares a prompt that is now sent to the worker of its route."""
        worker, plan = route.worker, route.plan
        block_size = worker.kind[1]
        earlier, most = self._like(keys), route.request.most_reusable(block_size)
        held, shared, could_share = plan.workers.most_matched, 0, most
        if earlier is not None:
            shared = min(most, _num_common(keys, earlier.keys) * block_size)
            could_share = min(most, len(earlier.keys) * block_size)
        # If a worker holds more, its cache has the earlier turn of the conversation, which is not known here.
        seen, differing = (held, 0) if held > shared else (shared, could_share - shared)
        enough = int(ENOUGH * seen)
        if worker.blocks.reported(keys) * block_size >= enough:
            loss = CacheMiss.EVICTED
        elif plan.matched_tokens >= enough:
            loss = CacheMiss.COMPUTING
        elif held >= enough or earlier is None or earlier.blocks.reported(keys) * block_size >= enough:
            loss = CacheMiss.OTHER_WORKER
        else:
            loss = CacheMiss.LOST if earlier.blocks.is_closed else CacheMiss.EVICTED
        return Prospect(EarlierPrompt(keys, worker.blocks), earlier, seen, differing, loss)

    def add(self, prospect: Prospect) -> None:
        """The worker has computed the prompt."""
        prompt, earlier = prospect.prompt, prospect.earlier
        keys = prompt.keys
        if not keys:
            return
        latest = self._latest
        for length in _lengths(keys):
            latest[keys[length - 1]] = prompt
        self._prompts[prompt] = None
        self.num_keys += len(keys)
        if earlier in self._prompts and earlier.keys[-1] == keys[: len(earlier.keys)][-1]:
            del self._prompts[earlier]  # this one continues it, and has taken its places in the table
            self.num_keys -= len(earlier.keys)
        while len(self._prompts) > MOST_PROMPTS or self.num_keys > MOST_KEYS:
            self._drop(next(iter(self._prompts)))

    def _like(self, keys: "array[int]") -> EarlierPrompt | None:
        """Returns the latest of the prompts that share the most with this one, as far as LENGTHS tell."""
        latest = self._latest
        for length in reversed(_lengths(keys)):
            if (prompt := latest.get(keys[length - 1])) is not None:
                return prompt
        return None

    def _drop(self, prompt: EarlierPrompt) -> None:
        del self._prompts[prompt]
        keys, latest = prompt.keys, self._latest
        self.num_keys -= len(keys)
        for length in _lengths(keys):
            if latest.get(keys[length - 1]) is prompt:
                del latest[keys[length - 1]]


def _lengths(keys: "array[int]") -> list[int]:
    return LENGTHS[: bisect_right(LENGTHS, len(keys))]


def _num_common(one: "array[int]", other: "array[int]") -> int:
    """Returns how many leading keys are equal. A key stands for all blocks before it, too, so bisection finds it."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda place: one[place] != other[place])
