"""What the engine has done: counters since its start, and distributions in a recent window. The one source for
GetStats, log and metrics."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from trunkline_worker.cache.sequence import Finish, Sequence
from trunkline_worker.step.lanes import Lane

# Bucket i holds values up to LEAST * RATIO^i: a quantile is known within half of 5 %.
LEAST = 1e-6
RATIO = 1.05
NUM_BUCKETS = 460  # up to about 5,600
WINDOW_S = 60.0  # quantiles are of the last one to two of these

_LOG_RATIO = math.log(RATIO)
_LOG_LEAST = math.log(LEAST)


class Histogram:
    """A distribution of values in seconds: counts in logarithmic buckets, since the start and in a recent window."""

    __slots__ = ("_counts", "_marks", "count", "sum")

    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS
        self._marks: deque[list[int]] = deque([self._counts.copy()], maxlen=2)  # counts at the last windows' ends
        self.count = 0
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self.count += count
        self.sum += value * count
        index = int((math.log(value) - _LOG_LEAST) / _LOG_RATIO) + 1 if value > LEAST else 0
        self._counts[min(index, NUM_BUCKETS - 1)] += count

    def include(self, other: "Histogram") -> None:
        """Adds the values that another histogram has counted since its start."""
        self.count += other.count
        self.sum += other.sum
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]

    def turn_window(self) -> None:
        """Ends a window. Called once per WINDOW_S."""
        self._marks.append(self._counts.copy())

    def quantiles(self, *shares: float) -> list[float]:
        """Quantiles in seconds of the values of the last one to two windows, each the middle of its bucket; 0 if there
        were no values."""
        recent = [now - before for now, before in zip(self._counts, self._marks[0], strict=True)]
        total = sum(recent)
        found = []
        for share in shares:
            wanted, seen, index = share * total, 0, 0
            while total and index < NUM_BUCKETS - 1 and seen + recent[index] < wanted:
                seen += recent[index]
                index += 1
            found.append(LEAST * RATIO ** (index - 0.5) if total else 0.0)
        return found


@dataclass(slots=True)
class LaneCounts:
    """Counts of one lane's sequences. Times in seconds."""

    accepted: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    expired: int = 0
    output_tokens: int = 0
    queue_time: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class StepCounts:
    """Counts of one step, or of all steps."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    sequences: int = 0
    host_time_s: float = 0.0
    device_time_s: float = 0.0
    expert_imbalance: tuple[float, ...] = ()  # of each layer, with steps that tell it


class EngineStats:
    """Filled by the scheduler (sequences) and the engine loop (steps)."""

    def __init__(self, now_s: float) -> None:
        self.started_s = now_s
        self.lanes = [LaneCounts() for _ in Lane]
        self.steps = 0
        self.total = StepCounts()
        self.last = StepCounts()
        self.host_time = Histogram()
        self.device_time = Histogram()
        self.expert_imbalance = 0.0  # of the layer with the highest, as the steps told it last
        self.prefix_hit_tokens = 0
        self.admissions = 0
        self.preemptions = 0
        self.preempted_tokens = 0
        self.stale_results = 0
        self._window_started_s = now_s
        self._window_before: tuple[float, int] = (now_s, 0)  # (time, output tokens) when the window before began
        self._window_tokens = 0  # output tokens when this window began

    # Sequences

    def admitted(self, sequence: Sequence, now_s: float) -> None:
        """A sequence was admitted. Called before the time of its first admission is set."""
        self.admissions += 1
        self.prefix_hit_tokens += sequence.num_computed
        if sequence.admitted_s is None:
            self.lanes[sequence.lane].queue_time.add(now_s - sequence.arrival_s)

    def first_token(self, sequence: Sequence, now_s: float) -> None:
        self.lanes[sequence.lane].ttft.add(now_s - sequence.arrival_s)

    def ended(self, sequence: Sequence, finish: Finish, now_s: float) -> None:
        """An accepted sequence has ended."""
        lane = self.lanes[sequence.lane]
        if finish is Finish.ABORT:
            lane.aborted += 1
            return
        lane.finished += 1
        lane.e2e.add(now_s - sequence.arrival_s)
        if sequence.num_output > 1 and sequence.first_token_s is not None:
            lane.tpot.add((now_s - sequence.first_token_s) / (sequence.num_output - 1))

    def expired(self, sequence: Sequence) -> None:
        """An accepted sequence is refused because it cannot meet its deadline any more."""
        self.lanes[sequence.lane].expired += 1

    def preempted(self, num_tokens: int) -> None:
        """A sequence was preempted, and gave up the KV of this many tokens."""
        self.preemptions += 1
        self.preempted_tokens += num_tokens

    # Steps

    def step(self, counts: StepCounts, now_s: float) -> None:
        self.turn_windows(now_s)
        self.steps += 1
        total = self.total
        total.prefill_tokens += counts.prefill_tokens
        total.decode_tokens += counts.decode_tokens
        total.padding_tokens += counts.padding_tokens
        total.sequences += counts.sequences
        total.host_time_s += counts.host_time_s
        total.device_time_s += counts.device_time_s
        self.host_time.add(counts.host_time_s)
        self.device_time.add(counts.device_time_s)
        self.last = counts
        if counts.expert_imbalance:
            self.expert_imbalance = max(counts.expert_imbalance)

    def turn_windows(self, now_s: float) -> None:
        """Forgets values that are more than two windows old. Called in every step and before every report."""
        passed_s = now_s - self._window_started_s
        if passed_s < WINDOW_S:
            return
        self._window_before = (self._window_started_s, self._window_tokens)
        self._window_started_s, self._window_tokens = now_s, self.output_tokens
        for histogram in self._histograms():
            histogram.turn_window()
        if passed_s >= 2 * WINDOW_S:  # nothing happened meanwhile: all values are old
            self._window_before = (now_s - WINDOW_S, self._window_tokens)
            for histogram in self._histograms():
                histogram.turn_window()

    @property
    def output_tokens(self) -> int:
        return sum(lane.output_tokens for lane in self.lanes)

    def output_tokens_per_s(self, now_s: float) -> float:
        """Mean rate over the last one to two windows."""
        since_s, tokens = self._window_before
        return (self.output_tokens - tokens) / (now_s - since_s) if now_s > since_s else 0.0

    def _histograms(self) -> Iterator[Histogram]:
        yield self.host_time
        yield self.device_time
        for lane in self.lanes:
            yield from (lane.queue_time, lane.ttft, lane.itl, lane.tpot, lane.e2e)
