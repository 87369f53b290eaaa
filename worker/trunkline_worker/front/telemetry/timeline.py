"""What became of one choice, and when: collected while it lives; sent, logged, traced and counted at its end."""

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode, format_trace_id
from opentelemetry.util.types import AttributeValue

from trunkline.engine.v1.engine_pb2 import EngineStep, StepRecord
from trunkline.v1.worker_pb2 import Gap, PrefillChunk, SampledStep, Timeline
from trunkline_runtime.telemetry import genai
from trunkline_runtime.telemetry.timeline_phases import phases_of
from trunkline_runtime.tracing import SpanEvent, add_child
from trunkline_worker.step.lanes import Lane

MILLISECONDS = 1e3
TARGET_S = 1.0  # of gaps, where the worker has no target time for steps
MAX_SLOW_STEPS = 8192  # kept at most; half of them are dropped when there are more
MAX_CHUNKS = 64
MAX_GAPS = 16
MAX_SAMPLES, FIRST_STRIDE = 16, 32  # of steps that computed an output token
TEXT_STRIDE = 8  # one of so many outputs is timed; a divisor of FIRST_STRIDE


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Never holds content: neither tokens nor text."""

    request_id: str
    tenant: str
    lane: Lane
    outcome: str  # a finish reason, "cancelled", or a reason of the error table in capitals
    prompt_tokens: int
    ledger_tokens: int  # output tokens of other workers that came with the submit
    output_tokens: int  # with those of the ledger
    timeline: Timeline
    span: Span

    @property
    def is_error(self) -> bool:
        return self.outcome.isupper()

    def log_fields(self) -> dict[str, Any]:
        """The fields of the closing log line: the whole timeline. Times in milliseconds; fields that only unusual
        choices have are left out otherwise."""
        timeline = self.timeline
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "lane": self.lane.name.lower(),
            "outcome": self.outcome,
            "duration_ms": _ms(timeline.ended_s),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": timeline.cached_tokens,
            "output_tokens": self.output_tokens,
            "device_ms": _ms(timeline.device_s),
        }
        if trace_id := self.span.get_span_context().trace_id:
            fields["trace_id"] = format_trace_id(trace_id)
        waited_s = timeline.admitted_s if timeline.HasField("admitted_s") else timeline.ended_s
        fields["queue_ms"] = _ms(waited_s)
        if timeline.awaited_s:
            fields["awaited_ms"] = _ms(timeline.awaited_s)
        if timeline.chunks:
            fields["prefill_ms"] = [_ms(chunk.duration_s) for chunk in timeline.chunks]
            fields["prefill_tokens"] = [chunk.tokens for chunk in timeline.chunks]
        if timeline.HasField("first_token_s"):
            fields["first_token_ms"] = _ms(timeline.first_token_s)
        if self.ledger_tokens:
            fields["ledger_tokens"] = self.ledger_tokens
        if timeline.num_gaps:
            fields["num_gaps"] = timeline.num_gaps
            fields["gaps_ms"] = [[_ms(gap.at_s), _ms(gap.duration_s)] for gap in timeline.gaps]
        if timeline.preemptions:
            fields["preemptions"] = timeline.preemptions
            fields["recomputed_tokens"] = timeline.recomputed_tokens
        return fields


def _ms(seconds: float) -> float:
    return round(seconds * MILLISECONDS, 1)


def end_spans(end: ChoiceEnd) -> None:
    """Ends the choice's span, with spans of its phases under it. Nothing but the end is done if it is not recorded."""
    timeline, span = end.timeline, end.span
    received_ns = timeline.received.ToNanoseconds()

    def unix_ns(time_s: float) -> int:
        return received_ns + int(time_s * 1e9)

    if not span.is_recording():
        span.end()
        return
    parent = span
    for phase in phases_of(timeline):
        parent = add_child(
            parent if phase.is_part else span,
            phase.name,
            unix_ns(phase.start_s),
            unix_ns(phase.end_s),
            phase.attributes,
            [SpanEvent(name, unix_ns(at_s), attributes) for at_s, name, attributes in phase.events],
        )
    span.set_attributes(_of_choice(end))
    if end.is_error:
        span.set_status(Status(StatusCode.ERROR, end.outcome))
    span.end(unix_ns(timeline.ended_s))


def _of_choice(end: ChoiceEnd) -> dict[str, AttributeValue]:
    timeline = end.timeline
    usage: dict[str, AttributeValue] = {
        genai.USAGE_INPUT_TOKENS: end.prompt_tokens,
        genai.USAGE_OUTPUT_TOKENS: end.output_tokens,
        genai.USAGE_CACHE_READ_INPUT_TOKENS: timeline.cached_tokens,
    }
    if not end.is_error:
        usage[genai.RESPONSE_FINISH_REASONS] = [end.outcome]
    return {
        **genai.spelled(usage),
        "trunkline.prompt_tokens": end.prompt_tokens,
        "trunkline.cached_tokens": timeline.cached_tokens,
        "trunkline.output_tokens": end.output_tokens,
        "trunkline.ledger_tokens": end.ledger_tokens,
        "trunkline.device_s": timeline.device_s,
        "trunkline.outcome": end.outcome,
    }


class StepTimes:
    """What the timelines of all choices share, so that a token that follows a token of the step before costs none of
    them anything."""

    def __init__(self, itl_target_s: float) -> None:
        self.target_s = itl_target_s or TARGET_S  # longer gaps are noted
        self.done_s = 0.0  # the end of the latest step
        self.latest: StepRecord | None = None
        self.per_token_s = 0.0  # device time of each of its tokens
        # The same, summed over all steps so far: a choice that was decoded in each step since a time has used the
        # difference.
        self.device_s_per_token = 0.0
        # Ends of the steps that ended later after the one before than the target, oldest first, and how much later.
        self._slow: list[tuple[float, float]] = []
        self._num_dropped = 0  # of the oldest

    @property
    def num_slow(self) -> int:
        """Slow steps so far."""
        return self._num_dropped + len(self._slow)

    def take(self, record: StepRecord) -> None:
        """Takes in the step after the latest one."""
        gap_s, self.done_s = record.done_s - self.done_s, record.done_s
        self.latest = record
        if gap_s > self.target_s and record.regular_tokens:
            self._slow.append((record.done_s, gap_s))
            if len(self._slow) > MAX_SLOW_STEPS:
                del self._slow[: MAX_SLOW_STEPS // 2]
                self._num_dropped += MAX_SLOW_STEPS // 2
        self.per_token_s = record.device_s / max(1, record.prefill_tokens + record.decode_tokens)
        self.device_s_per_token += self.per_token_s

    def num_slow_until(self, time_s: float) -> int:
        """Slow steps that ended by then."""
        return self._num_dropped + bisect_right(self._slow, (time_s, float("inf")))

    def slow(self, first: int, end: int) -> list[tuple[float, float]]:
        """Ends and durations of the slow steps with numbers in [first, end), as far as they are kept."""
        return self._slow[max(0, first - self._num_dropped) : max(0, end - self._num_dropped)]


@dataclass(slots=True)
class ChoiceTimeline:
    """Times are on the clock of the engine's steps, in seconds. Only events are noted: a token that follows a token of
    the step before is none."""

    received_s: float
    received_unix_ns: int
    admitted_s: float | None = None
    awaited_s: float = 0.0  # of the time until then
    first_token_s: float | None = None
    chunks: list[PrefillChunk] = field(default_factory=list)  # with the engine's times
    preemptions: int = 0
    recomputed_tokens: int = 0
    _num_sampled: int = 0  # output tokens that chunks sampled
    _chunks_s: float = 0.0  # device time of the chunks
    # StepTimes.device_s_per_token at the first token, plus that of the steps that decoded none of the choice since.
    _device_from: float | None = None
    _num_slow_before: int = 0  # slow steps with lower numbers are settled
    _gaps: list[tuple[float, float]] = field(default_factory=list)  # heap of the longest: durations and ends
    _num_gaps: int = 0
    # Since it was preempted, until its next token: the end of the step before, and its device_s_per_token.
    _left: tuple[float, float] | None = None
    _text_s: float = 0.0  # of timed outputs
    _num_timed: int = 0
    _samples: list[SampledStep] = field(default_factory=list)  # with the engine's times
    _stride: int = FIRST_STRIDE

    def add_timed_output(self, number: int, text_s: float, times: StepTimes) -> None:
        """The latest step returned an output, whose tokens became text in this time.

        number: outputs before it, a multiple of TEXT_STRIDE
        """
        self._text_s += text_s
        self._num_timed += 1
        step = times.latest
        if not number or number % self._stride or step is None:
            return
        if len(self._samples) == MAX_SAMPLES:
            del self._samples[::2]
            self._stride *= 2
            if number % self._stride:
                return
        self._samples.append(
            SampledStep(
                at_s=step.done_s,
                duration_s=step.device_s,
                prefill_tokens=step.prefill_tokens,
                decode_tokens=step.decode_tokens,
                padding_tokens=step.padding_tokens,
                sequences=step.sequences,
            )
        )

    def add_chunk(self, tokens: int, recomputed: int, record: StepRecord, times: StepTimes) -> None:
        """The latest step, whose record this is, computed more than the next token."""
        self.recomputed_tokens += recomputed
        self._chunks_s += tokens * times.per_token_s
        started_s = record.done_s - record.device_s
        if len(self.chunks) == MAX_CHUNKS:
            last = self.chunks.pop()
            started_s, tokens = last.started_s, last.tokens + tokens
        self.chunks.append(
            PrefillChunk(
                started_s=started_s,
                duration_s=record.done_s - started_s,
                tokens=tokens,
                step_prefill_tokens=record.prefill_tokens,
                step_decode_tokens=record.decode_tokens,
                step_padding_tokens=record.padding_tokens,
                step_sequences=record.sequences,
            )
        )

    def add_first_token(self, times: StepTimes) -> None:
        """A chunk of the latest step sampled the first output token."""
        self.first_token_s = times.done_s
        self._num_sampled += 1
        self._device_from = times.device_s_per_token
        self._num_slow_before = times.num_slow
        self._left = None

    def add_late_token(self, since_s: float, skipped_s: float, times: StepTimes, *, by_chunk: bool) -> None:
        """The latest step sampled a token, and the step before it did not.

        since_s: the end of the step of the token before; skipped_s: device time per token of the steps that decoded
        none of the choice since; by_chunk: whether the token was sampled by a chunk
        """
        if self._device_from is None:
            return  # the first token is unknown: a message of the engine was wrong
        self._settle_slow(times, since_s)
        self._num_slow_before = times.num_slow  # steps in between were not steps of this choice
        gap_s = times.done_s - since_s
        if gap_s > times.target_s:
            self._num_gaps += 1
            self._add_gap(gap_s, times.done_s)
        self._num_sampled += by_chunk
        self._device_from += skipped_s
        self._left = None

    def add_preemption(self, times: StepTimes) -> None:
        """The choice lost its KV blocks after the latest step."""
        self.preemptions += 1
        if self._left is None:
            self._left = (times.done_s, times.device_s_per_token)

    def end(self, now_s: float, *, num_outputs: int, cached_tokens: int, times: StepTimes) -> Timeline:
        """The whole timeline, of a choice that has just ended. May be called once.

        num_outputs: tokens that the engine has returned
        """
        device_s = self._chunks_s
        if self._device_from is not None:
            last_s, device_s_per_token = self._left or (times.done_s, times.device_s_per_token)
            device_s += max(0.0, device_s_per_token - self._device_from)
            self._settle_slow(times, last_s)
        timeline = Timeline(
            chunks=self.chunks,
            ended_s=self._since_received(now_s),
            decode_steps=max(0, num_outputs - self._num_sampled),
            longest_gap_s=max((duration_s for duration_s, _ in self._gaps), default=0.0),
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            device_s=device_s,
            cached_tokens=cached_tokens,
            awaited_s=self.awaited_s,
            num_gaps=self._num_gaps,
            detokenize_s=self._text_s * num_outputs / self._num_timed if self._num_timed else 0.0,
            sampled_steps=self._samples,
        )
        timeline.received.FromNanoseconds(self.received_unix_ns)
        if self.admitted_s is not None:
            timeline.admitted_s = self._since_received(self.admitted_s)
        if self.first_token_s is not None:
            timeline.first_token_s = self._since_received(self.first_token_s)
        for chunk in timeline.chunks:
            chunk.started_s = self._since_received(chunk.started_s)
        for sampled in timeline.sampled_steps:
            sampled.at_s = self._since_received(sampled.at_s)
        for at_s, duration_s in sorted((at_s, duration_s) for duration_s, at_s in self._gaps):
            timeline.gaps.append(Gap(at_s=self._since_received(at_s), duration_s=duration_s))
        return timeline

    def _since_received(self, time_s: float) -> float:
        return max(0.0, time_s - self.received_s)

    def _settle_slow(self, times: StepTimes, until_s: float) -> None:
        """Notes the slow steps that ended by then and are not settled as gaps of this choice."""
        first, end = self._num_slow_before, times.num_slow_until(until_s)
        if end <= first:
            return
        self._num_gaps += end - first
        self._num_slow_before = end
        for at_s, duration_s in times.slow(first, end):
            self._add_gap(duration_s, at_s)

    def _add_gap(self, duration_s: float, at_s: float) -> None:
        if len(self._gaps) < MAX_GAPS:
            heapq.heappush(self._gaps, (duration_s, at_s))
        else:
            heapq.heappushpop(self._gaps, (duration_s, at_s))


def take_step(step: EngineStep, times: StepTimes, timeline_of: Callable[[int], ChoiceTimeline | None]) -> None:
    """Notes the events of a step in the timelines of its choices. First tokens are noted with the first outputs.

    timeline_of: returns the timeline of a handle; None if the choice has ended
    """
    awaited_s = dict(zip(step.awaited_handles, step.awaited_s, strict=True))
    for handle, admitted_s in zip(step.admitted_handles, step.admitted_s, strict=True):
        if (timeline := timeline_of(handle)) is not None:
            timeline.admitted_s, timeline.awaited_s = admitted_s, awaited_s.get(handle, 0.0)
    for handle in step.preempted_handles:
        if (timeline := timeline_of(handle)) is not None:
            timeline.add_preemption(times)
    if not step.HasField("record"):
        return
    record = step.record
    times.take(record)
    chunks = zip(record.chunk_handles, record.chunk_tokens, record.chunk_recomputed, strict=True)
    for handle, tokens, recomputed in chunks:
        if (timeline := timeline_of(handle)) is not None:
            timeline.add_chunk(tokens, recomputed, record, times)
    if record.late_handles:
        chunked = set(record.chunk_handles)
        late = zip(record.late_handles, record.late_since_s, record.late_skipped_s, strict=True)
        for handle, since_s, skipped_s in late:
            if (timeline := timeline_of(handle)) is not None:
                timeline.add_late_token(since_s, skipped_s, times, by_chunk=handle in chunked)
