"""A scheduler's rig that keeps the timelines of its sequences as a front does, and besides a list of all that happened,
from which the same timelines follow by simple means."""

from dataclasses import dataclass, field
from itertools import pairwise

from tests.worker.rig import Rig
from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.v1.worker_pb2 import Timeline
from trunkline_worker.engine.messages import fill_record
from trunkline_worker.front.telemetry.timeline import MAX_CHUNKS, MAX_GAPS, ChoiceTimeline, StepTimes, take_step
from trunkline_worker.scheduler.sequence_table import StepOutput
from trunkline_worker.scheduler.stats import StepCounts
from trunkline_worker.step.plan import StepPlan, StepResult

TARGET_S = 1.2
STEP_S = (1.0, 1.0, 1.0, 1.5, 1.0, 2.0, 1.0)  # in turn


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's part in a step that counted."""

    step_id: int
    done_s: float
    device_s: float
    step_tokens: int
    start: int
    num_new: int
    samples: bool
    again: int  # tokens that it had before a preemption

    @property
    def share_s(self) -> float:
        return self.num_new * self.device_s / self.step_tokens


@dataclass(slots=True)
class History:
    """All that happened to one sequence."""

    submitted_s: float
    admitted_s: float | None = None
    parts: list[Part] = field(default_factory=list)
    known: int = 0  # leading tokens whose KV it had at last
    lost: int = 0  # the most that a preemption took
    generation: int = 0

    @property
    def samples(self) -> list[Part]:
        return [part for part in self.parts if part.samples]

    def chunks(self) -> list[tuple[float, int, bool]]:
        """(start of the step, tokens, whether a token was sampled) of all but plain decodes."""
        first = self.samples[:1]
        return [
            (part.done_s - part.device_s, part.num_new, part.samples)
            for part in self.parts
            if part.num_new > 1 or not part.samples or part in first
        ]

    def gaps(self) -> list[tuple[float, float]]:
        """(end, duration) of all that exceed the target."""
        ends = [part.done_s for part in self.samples]
        return [(later, later - before) for before, later in pairwise(ends) if later - before > TARGET_S]


class TimelineRig(Rig):
    """Steps take different times. `ended` has the timelines of sequences that have ended, `histories` what happened."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.times = StepTimes(TARGET_S)
        self.timelines: dict[int, ChoiceTimeline] = {}
        self.histories: dict[int, History] = {}
        self.ended: dict[int, Timeline] = {}
        self.num_steps = 0

    def submit(self, prompt: list[int], max_tokens: int = 8, **options: object) -> int:
        sequence_id = super().submit(prompt, max_tokens, **options)  # type: ignore[arg-type]
        self.timelines[sequence_id] = ChoiceTimeline(self.now_s, 0)
        self.histories[sequence_id] = History(self.now_s)
        return sequence_id

    def schedule(self) -> tuple[StepPlan, StepResult] | None:
        scheduled = super().schedule()
        for sequence_id, sequence in self.scheduler.sequences.items():
            history = self.histories[sequence_id]
            if sequence.generation != history.generation:
                history.lost = max(history.lost, history.known)
                history.generation, history.known = sequence.generation, 0
        admitted = self.scheduler.take_admitted()
        for step in scheduled[0].steps if scheduled else ():
            history = self.histories[step.sequence_id]
            history.known = max(history.known, step.num_computed if not history.known else 0)
            if history.admitted_s is None:
                history.admitted_s = self.now_s
        self.tell(
            EngineStep(
                admitted_handles=[handle for handle, _, _ in admitted],
                admitted_s=[time_s for _, time_s, _ in admitted],
                preempted_handles=self.scheduler.take_preempted(),
            )
        )
        return scheduled

    def commit(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        self.num_steps += 1
        result.device_time_s = 0.25 + 0.125 * (self.num_steps % 4)
        self.now_s += STEP_S[self.num_steps % len(STEP_S)] - 1.0
        for step in plan.steps:
            sequence = self.scheduler.sequences.get(step.sequence_id)
            if sequence is not None and sequence.generation == step.generation:
                history = self.histories[step.sequence_id]
                history.known = step.num_computed + step.num_new
                again = sum(p < history.lost for p in range(step.num_computed, history.known))
                part = (self.now_s + 1.0, result.device_time_s, plan.num_tokens, *step[2:4], step.samples, again)
                history.parts.append(Part(plan.step_id, *part))
        outputs = super().commit(plan, result)
        decodes = plan.num_decodes
        counts = StepCounts(
            plan.num_tokens - decodes, decodes, plan.num_padding, len(plan.steps), 0.0, result.device_time_s
        )
        message = EngineStep()
        fill_record(message.record, self.committed, counts, self.scheduler.last_commit_s)
        self.tell(message)
        for output in outputs:
            if output.prompt is not None:
                self.timelines[output.sequence_id].add_first_token(self.times)
            if output.finish is not None:
                self.end(output.sequence_id)
        return outputs

    def tell(self, step: EngineStep) -> None:
        """Passes a message of the engine to the timelines, in the form in which a front gets it."""
        take_step(EngineStep.FromString(step.SerializeToString()), self.times, self.timelines.get)

    def end(self, sequence_id: int) -> None:
        """The front sees the end of a choice."""
        samples = len(self.histories[sequence_id].samples)
        timeline = self.timelines.pop(sequence_id)
        cached = self.cached.get(sequence_id, 0)
        self.ended[sequence_id] = timeline.end(self.now_s, num_outputs=samples, cached_tokens=cached, times=self.times)

    def was_computed_at_the_end(self, sequence_id: int) -> bool:
        """Whether the latest step sampled a token of the sequence, or it has none."""
        samples = self.histories[sequence_id].samples
        return not samples or samples[-1].done_s == self.times.done_s


def expected(history: History) -> dict[str, object]:
    """The fields of a timeline that follow from what happened; times relative to the submission."""
    chunks, gaps = history.chunks(), history.gaps()
    longest = sorted(gaps, key=lambda gap: (gap[1], gap[0]))[-MAX_GAPS:]
    merged = [tokens for _, tokens, _ in chunks[: MAX_CHUNKS - 1]]
    if len(chunks) >= MAX_CHUNKS:
        merged.append(sum(tokens for _, tokens, _ in chunks[MAX_CHUNKS - 1 :]))
    first = next((part.done_s - history.submitted_s for part in history.samples), None)
    return {
        "admitted_s": None if history.admitted_s is None else history.admitted_s - history.submitted_s,
        "chunk_tokens": merged,
        "chunk_started_s": [started_s - history.submitted_s for started_s, _, _ in chunks[:MAX_CHUNKS]],
        "first_token_s": first,
        "decode_steps": len(history.samples) - sum(samples for _, _, samples in chunks),
        "num_gaps": len(gaps),
        "gaps": [(at_s - history.submitted_s, duration_s) for at_s, duration_s in sorted(longest)],
        "longest_gap_s": max((duration_s for _, duration_s in gaps), default=0.0),
        "preemptions": history.generation,
        "recomputed_tokens": sum(part.again for part in history.parts),
        "device_s": sum(part.share_s for part in history.parts),
    }


def told(timeline: Timeline) -> dict[str, object]:
    """The same fields of a timeline."""
    return {
        "admitted_s": timeline.admitted_s if timeline.HasField("admitted_s") else None,
        "chunk_tokens": [chunk.tokens for chunk in timeline.chunks],
        "chunk_started_s": [chunk.started_s for chunk in timeline.chunks],
        "first_token_s": timeline.first_token_s if timeline.HasField("first_token_s") else None,
        "decode_steps": timeline.decode_steps,
        "num_gaps": timeline.num_gaps,
        "gaps": [(gap.at_s, gap.duration_s) for gap in timeline.gaps],
        "longest_gap_s": timeline.longest_gap_s,
        "preemptions": timeline.preemptions,
        "recomputed_tokens": timeline.recomputed_tokens,
        "device_s": timeline.device_s,
    }
