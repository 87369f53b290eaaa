"""What a step costs, learned from past steps, and how long a prompt's chunk may be to stay under a time.

time = fixed + a * tokens + b * KV tokens read by decodes + c * (query, key) pairs of chunks + d * prompt tokens with
requested log-probabilities + e * the share of a model's experts that the tokens use on average. The coefficients are
fitted to the latest steps by least squares of the relative error; none is negative. A coefficient is kept only if the
fit is clearly better with it than without. If the steps were all alike, so that they do not show what a token costs, a
token is a fixed share of a step.

A cost that is too low corrects itself, because prompts arrive and their steps are learned from; one that is too high
sends prompts to other workers, and nothing is learned any more. So routers take what is not known to be cheap. Steps
must not be filled on that assumption: Experience bounds how far a step may exceed what past steps have shown.

Steps that were filled up to the target time would miss it half of the time. They are filled so that nine of ten meet
it, by how the latest steps differed from the fit. On a device of its own a worker loses a few percent that way; beside
other processes on the same cores it may lose a third.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline_kernels.routing_rule import RoutingRule

# A fit is trusted for steps up to this many times as large as the largest step that it explains.
TRUSTED_TIMES = 2.0
# A fit explains a step that took no more than this many times the fitted time.
EXPLAINED_TIMES = 1.5
# With each fit, speeds that recent steps have not reached are reduced to this share: the device may have become slower.
KEPT_SHARE = 0.9
KEPT_STEPS = 96  # of each kind: with chunks, and without
# A step counts half as much once so many were learned from since, because a device's speed changes. What rare prompts
# cost is not forgotten: a step counts at least as much as LEAST_COUNT of the latest one.
STEPS_TO_HALF = 32.0
LEAST_COUNT = 1 / 8
STEPS_PER_FIT = 32
# If one sequence alone takes nearly the target time, or more, others may still add this share of its time, and prompts
# this share of the time of the decodes.
LEAST_ADDED_SHARE = 0.25
# Steps that only decode are many and alike: one is learned from in this many, or in this much time. The kept steps
# then span at most the last ten seconds, or the last 96 steps if steps take longer.
DECODE_SAMPLE_EVERY = 8
DECODE_SAMPLE_EVERY_S = 0.1
# A worker's first steps are slower than later ones, by any factor, so they are not learned from. A fit to three of them
# and many small, equal steps once made prompts seem fifty times too expensive, and no more arrived.
FIRST_STEPS = 4
TOKENS_AS_FIXED = 512.0  # tokens that add as much as the fixed time, until steps show what they add
# A pair takes 4·width·layers operations, a token 24·width²·layers and more: even a small model's pairs are cheaper than
# this share of a token. Without this bound a few short chunks, whose pairs and tokens grow alike, could attribute their
# time to pairs, and predict hundreds of times the real time of a long prompt.
MOST_PAIR_SHARE = 1 / 64
# A coefficient is kept if it lowers the squared error by this many variances: about three standard deviations.
CLEARLY = 10.0
LATE_QUANTILE, MOST_LATE_TIMES = 0.9, 1.5  # steps that are later than that depend on more than their load
# If a step with prompts is later still, the next ones get fewer prompt tokens: the fit may have missed a cost, and the
# next fit may be seconds away. SHORT_S is added to both times, so that the jitter of short steps has no such effect.
# Nor do shorter steps that were in time show much of long ones.
SHORT_S, MOST_LATENESS = 0.02, 8.0
WAIT_WEIGHT, MOST_WAIT_S = 0.1, 0.1  # of the latest time between two steps; a longer one is an outlier
LEAST_STEP_SHARE = 0.5  # of an interval, however long the engine takes between steps
LEAST_ERROR = 0.01  # of a step's time: smaller errors are noise
JITTER_S = 1e-3  # steps that compute the same differ by so much, however short they are
# A fit takes several turns. Each one divides errors by the times of the turn before, kept within so many times the
# measured ones. Errors above a share are mostly delays, so they pull no harder than that share. In the first turns
# larger errors pull too: the fit then starts between fast and slow steps, and reaches whichever are more.
LARGE_ERRORS, MOST_TIMES_AROUND = (1.0, 0.3, 0.1, 0.1, 0.1, 0.1), 16.0
# A fit is a sum of non-negative parts. Columns: a step; a step with tokens at their assumed cost; a token; a KV token;
# a token whose pairs cost the most they can; a scored token; all experts. Rows: fixed, token, KV token, pair, scored
# token, all experts.
STEP, STEP_AS_ASSUMED, TOKEN, KV_TOKEN, TOKEN_WITH_PAIRS, SCORED_TOKEN, EXPERTS = range(7)
PARTS = np.array(
    [
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0 / TOKENS_AS_FIXED, 1.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, MOST_PAIR_SHARE, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    ]
)


class Size(NamedTuple):
    """What makes a step large; as a speed, the same amounts per second."""

    tokens: float
    pairs: float  # (query, key) pairs of chunks
    sequences: float


NOTHING = Size(0.0, 0.0, 0.0)


class Experience:
    """How large a step may be, judged by the best of the steps before it.

    Far beyond the sizes of past steps the fit is a guess: steps of five tokens say next to nothing about two thousand.
    One bound holds there too. A step that is k times as large as another one takes at most k times as long, because it
    could be computed as k such steps. So the highest number of tokens per second that any step reached is a speed that
    every larger step reaches too; the same holds for pairs and sequences per second.

    A worker's first steps are therefore small, and each following step fills its target time by what is known so far. A
    step that was slow by chance does no harm: it is not the best one.

    trusted: sizes for which the fit is trusted
    """

    def __init__(self, trusted: Size = NOTHING) -> None:
        self.trusted = trusted
        self._speeds = NOTHING

    def observe(self, size: Size, time_s: float) -> None:
        """Learns from a step that took this long; 0: the executor does not measure times."""
        if time_s > 0:
            self._speeds = Size(*map(max, self._speeds, [part / time_s for part in size]))
        else:
            self._speeds = Size(*[float("inf") for _ in size])

    def fitted(self, sizes: NDArray[np.float64], times_s: NDArray[np.float64], fitted_s: NDArray[np.float64]) -> None:
        """Called after a fit, with all steps that it was made of.

        sizes: [num_steps, 3], the parts of Size
        """
        fastest = (sizes / times_s[:, None]).max(axis=0).tolist()
        explained = sizes[times_s <= EXPLAINED_TIMES * fitted_s]
        # Chunks hide what the sequences of a step cost: only steps of decodes show it.
        explained[:, 2] *= explained[:, 1] == 0
        self.trusted = Size(*(TRUSTED_TIMES * explained.max(axis=0, initial=0.0)).tolist())
        self._speeds = Size(*map(max, fastest, [KEPT_SHARE * speed for speed in self._speeds]))

    def room(self, time_s: float, pairs_per_token: float) -> tuple[float, float]:
        """The most tokens and the most pairs of a step that takes at most `time_s`, as far as is known.

        pairs_per_token: this many pairs cost no more than a token
        """
        speeds = self._speeds
        pairs_per_s = max(speeds.pairs, pairs_per_token * speeds.tokens)
        return max(self.trusted.tokens, time_s * speeds.tokens), max(self.trusted.pairs, time_s * pairs_per_s)

    def longest_s(self, tokens: float, sequences: float) -> float:
        """The longest time, in seconds, of a step of this many tokens and sequences without chunks; 0 if the fit is
        trusted for it, infinite before the first step."""
        longest_s = 0.0
        for amount, trusted, speed in (
            (tokens, self.trusted.tokens, self._speeds.tokens),
            (sequences, self.trusted.sequences, self._speeds.sequences),
        ):
            if amount > trusted:
                longest_s = max(longest_s, amount / speed if speed else float("inf"))
        return longest_s


class StepLoad(NamedTuple):
    """What a step's time depends on."""

    num_tokens: int  # padding included
    decode_kv_tokens: int  # context lengths of one-token sequences, summed
    chunk_pairs: float  # (query, key) pairs of longer chunks
    num_sequences: int = 0  # not part of the fit
    num_scored: int = 0  # prompt tokens with log-probabilities
    # Not part of the fit, but of the step's least work.
    chunk_tokens: int = 0
    chunk_kv_tokens: int = 0  # context lengths of chunks, summed
    num_sampled: int = 0  # sequences that sample

    @property
    def size(self) -> Size:
        return Size(self.num_tokens, self.chunk_pairs, self.num_sequences)

    @property
    def causal_pairs(self) -> float:
        """(query, key) pairs of chunks, with those of each token and itself."""
        return self.chunk_pairs + self.chunk_tokens / 2


class Sample(NamedTuple):
    """A step that is learned from."""

    load: StepLoad
    time_s: float
    number: int  # of steps that were learned from before it


class StepCost:
    """The cost model and the steps it was fitted to.

    defers_fits: whether later fits than the first one wait until fit() is called, or until the next one is due
    """

    def __init__(self) -> None:
        self.defers_fits = False
        self.is_fit_due = False
        self.routing: RoutingRule | None = None  # None: the model has no experts
        self._decodes: deque[Sample] = deque(maxlen=KEPT_STEPS)
        self._chunks: deque[Sample] = deque(maxlen=KEPT_STEPS)
        self.experience = Experience()
        self._observed = 0
        self._seen = 0
        self._steps_since_sample = DECODE_SAMPLE_EVERY
        self._since_sample_s = 0.0
        self.num_fits = 0
        self.between_s = 0.0  # recent mean time between two steps that follow each other
        self.late_times = 1.0  # nine of ten steps with prompts take at most this many times their fitted time
        # Of steps with prompts, in times of the fitted time: that of the latest one, or half-way to it from the value
        # before, whichever is more. A step shorter than SHORT_S moves it less towards its own.
        self.recent_lateness = 1.0
        self.fixed_s = self.token_s = self.kv_token_s = self.pair_s = self.scored_token_s = self.experts_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a fit has been made."""
        return self._seen >= STEPS_PER_FIT

    def observe(self, load: StepLoad, time_s: float, *, is_rehearsed: bool = False) -> None:
        """Learns from a step that took this long on the device; 0: the executor does not measure times.

        is_rehearsed: no other step like it may come soon, so it is learned from even if it only decodes
        """
        self.experience.observe(load.size, time_s)
        self._observed += 1
        if time_s <= 0:
            return
        if load.chunk_pairs:
            kept = self._chunks
            if self.num_fits:
                lateness = min((time_s + SHORT_S) / (self.time_s(load) + SHORT_S), MOST_LATENESS)
                moved = 0.5 * min(time_s / SHORT_S, 1.0)
                self.recent_lateness = max(lateness, self.recent_lateness + moved * (lateness - self.recent_lateness))
        else:
            # A step is chosen before its time is known. Otherwise delayed steps would be chosen more often than others.
            is_due = (
                is_rehearsed
                or self._steps_since_sample >= DECODE_SAMPLE_EVERY
                or self._since_sample_s >= DECODE_SAMPLE_EVERY_S
            )
            if is_due:
                self._steps_since_sample, self._since_sample_s = 0, 0.0
            self._steps_since_sample += 1
            self._since_sample_s += time_s
            if not is_due:
                return
            kept = self._decodes
        if self._observed > FIRST_STEPS:
            kept.append(Sample(load, time_s, self._seen))
        self._seen += 1
        if self._seen % STEPS_PER_FIT == 0:
            if self.defers_fits and self.num_fits and not self.is_fit_due:
                self.is_fit_due = True
            else:
                self.fit()

    def waited(self, time_s: float) -> None:
        """Learns from the time between two steps that followed each other at once, in which the engine took in
        requests, reported what had been computed, and planned."""
        self.between_s += WAIT_WEIGHT * (min(max(time_s, 0.0), MOST_WAIT_S) - self.between_s)

    def within_s(self, interval_s: float) -> float:
        """The most seconds that a step with prompts is planned to take if steps follow each other at an interval. Nine
        of ten steps are expected to meet the interval."""
        return max(interval_s - self.between_s, LEAST_STEP_SHARE * interval_s) / self.late_times

    def prompts_within_s(self, interval_s: float) -> float:
        """within_s() for the prompts of the next step, which is shorter if recent ones were late."""
        return self.within_s(interval_s) * min(1.0, self.late_times / self.recent_lateness)

    def time_s(self, load: StepLoad) -> float:
        """The seconds that a step should take."""
        return (
            self.fixed_s
            + self.token_s * load.num_tokens
            + self.kv_token_s * load.decode_kv_tokens
            + self.pair_s * load.chunk_pairs
            + self.scored_token_s * load.num_scored
            + self.experts_s * self._used_share(load.num_tokens)
        )

    @property
    def full_fixed_s(self) -> float:
        """The seconds of a step that do not depend on its tokens once they use all experts, as those of chunks do."""
        return self.fixed_s + self.experts_s

    def other_experts_s(self, num_tokens: int) -> float:
        """The seconds that chunks add to a step of `num_tokens` others because they use the other experts, too."""
        return self.experts_s * (1.0 - self._used_share(num_tokens))

    def _used_share(self, num_tokens: int) -> float:
        return 0.0 if self.routing is None else self.routing.used_share(num_tokens)

    def cautious_s(self, num_decodes: int, kv_tokens: int) -> float:
        """The most seconds that a step of decodes takes, as far as is known."""
        fitted_s = self.time_s(StepLoad(num_decodes, kv_tokens, 0.0))
        return max(fitted_s, self.experience.longest_s(num_decodes, num_decodes))

    def chunk_s(self, num_tokens: int, num_before: int, *, is_scored: bool = False) -> float:
        """The seconds that a chunk of `num_tokens` after `num_before` computed ones adds to a step, beside those of
        other experts."""
        return self._prompt_token_s(is_scored) * num_tokens + self.pair_s * chunk_pairs(num_tokens, num_before)

    def longest_chunk(self, time_s: float, num_before: int, *, is_scored: bool = False) -> int:
        """The most tokens of a prompt, after `num_before` computed ones, that add no more than `time_s` to a step."""
        return _longest(time_s, self._prompt_token_s(is_scored) + self.pair_s * num_before, self.pair_s)

    def _prompt_token_s(self, is_scored: bool) -> float:
        return self.token_s + (self.scored_token_s if is_scored else 0.0)

    def fit(self) -> None:
        """Fits the model to the kept steps."""
        self.is_fit_due = False
        self.num_fits += 1
        samples = [*self._decodes, *self._chunks]
        loads, times = [load for load, _, _ in samples], np.array([time_s for _, time_s, _ in samples])
        features = np.array(
            [
                (
                    1.0,
                    load.num_tokens,
                    load.decode_kv_tokens,
                    load.chunk_pairs,
                    float(load.num_scored),
                    self._used_share(load.num_tokens),
                )
                for load in loads
            ]
        )
        ages = self._seen - np.array([number for _, _, number in samples])
        counts = np.maximum(1 / (1 + ages / STEPS_TO_HALF), LEAST_COUNT)
        # Errors are relative, so that one of a short step counts as much as one of a long step. They are relative to
        # the fit before: those relative to the measured times are smallest for a fit that is too low. Large errors
        # count less, so that a step which was delayed by something else hardly counts. The shortest steps differ by
        # JITTER_S whatever they compute.
        around_s, weights = times + JITTER_S, np.sqrt(counts)
        parts = [STEP, TOKEN, KV_TOKEN, TOKEN_WITH_PAIRS, SCORED_TOKEN] + [EXPERTS] * (self.routing is not None)
        for turn, large_error in enumerate(LARGE_ERRORS, 1):
            rows = features @ PARTS / around_s[:, None]
            scale = np.maximum(rows.max(axis=0), 1e-12)
            relative = np.column_stack([rows / scale, times / around_s]) * weights[:, None]
            # The triangle has the same least-squares solution as the rows it is made of.
            triangle: NDArray[np.float64] = np.asarray(np.linalg.qr(relative, mode="r"))
            # Whether a part is clear is seen only when outliers count little.
            if turn < len(LARGE_ERRORS):
                solution, _ = _least_squares(triangle, parts)
            else:
                solution = _clear_parts(triangle, parts, len(samples))
            costs: list[float] = (PARTS @ (solution / scale)).tolist()
            fitted_s = features @ costs
            errors = np.abs(times - fitted_s) / around_s
            weights = np.sqrt(counts * large_error / np.maximum(errors, large_error))
            around_s = np.clip(fitted_s, times / MOST_TIMES_AROUND, times * MOST_TIMES_AROUND) + JITTER_S
        self.fixed_s, self.token_s, self.kv_token_s, self.pair_s, self.scored_token_s, self.experts_s = costs
        sizes = np.array([load.size for load in loads], float)
        self.experience.fitted(sizes, times, fitted_s)
        ratios = (times / np.maximum(fitted_s, 1e-9))[len(self._decodes) :]  # of steps with prompts
        late_times = float(np.quantile(ratios, LATE_QUANTILE)) if len(ratios) else 1.0
        self.late_times = min(max(late_times, 1.0), MOST_LATE_TIMES)


def longest_chunk(num_pairs: float, num_before: int) -> int:
    """The most tokens of a prompt, after `num_before` computed ones, with at most this many (query, key) pairs."""
    return _longest(num_pairs, num_before, 1.0)


def _longest(amount: float, linear: float, square: float) -> int:
    """The largest whole n for which linear * n + square / 2 * n² is at most `amount`."""
    if amount <= 0:
        return 0
    if amount == float("inf"):
        return 1 << 30
    a = square / 2
    if a > 1e-18:
        return int((-linear + (linear * linear + 4 * a * amount) ** 0.5) / (2 * a))
    return int(amount / linear) if linear > 1e-15 else 1 << 30


def chunk_pairs(num_tokens: int, num_before: int) -> float:
    """(query, key) pairs of a causal chunk."""
    return num_tokens * (num_before + num_tokens / 2)


def _clear_parts(triangle: NDArray[np.float64], parts: list[int], num_steps: int) -> NDArray[np.float64]:
    """The amount of each part that fits the steps best; parts that do not improve the fit clearly are 0.

    triangle: of the weighted steps; a column for each part, and one for what they should add up to
    """
    solution, error = _least_squares(triangle, parts)
    clear = CLEARLY * max(error / max(num_steps - len(parts), 1), LEAST_ERROR**2)
    # A few tokens cost by the experts that they use. Taken for a cost of each token, that would make prompts seem dear,
    # which soon use all experts. So experts explain what they can, and come last.
    for part in (SCORED_TOKEN, TOKEN_WITH_PAIRS, KV_TOKEN, TOKEN, EXPERTS):
        if part not in parts:
            continue
        fewer = [kept for kept in parts if kept != part]
        if part == TOKEN:
            if TOKEN_WITH_PAIRS in parts:
                continue
            fewer = [STEP_AS_ASSUMED if kept == STEP else kept for kept in fewer]
        without, more_error = _least_squares(triangle, fewer)
        if more_error - error < clear:
            parts, solution, error = fewer, without, more_error
    return solution


def _least_squares(triangle: NDArray[np.float64], parts: list[int]) -> tuple[NDArray[np.float64], float]:
    """The best non-negative amounts of some parts, and the squared error."""
    used, solution = parts, np.zeros(len(PARTS[0]))
    while used:
        found = np.linalg.lstsq(triangle[:, used], triangle[:, -1], rcond=1e-9)[0]
        if (found >= 0).all():
            solution[used] = found
            break
        used = [part for part, amount in zip(used, found, strict=True) if amount > found.min()]
    error = triangle @ np.append(solution, -1.0)
    return solution, float(error @ error)
