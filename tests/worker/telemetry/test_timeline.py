"""Timelines tell what happened, although nothing is noted for a token that simply follows another one."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.worker.telemetry.timeline_rig import TARGET_S, TimelineRig, expected, told
from trunkline.engine.v1.engine_pb2 import StepRecord
from trunkline_worker.front.telemetry import timeline as timeline_module
from trunkline_worker.front.telemetry.timeline import MAX_CHUNKS, MAX_GAPS, ChoiceTimeline, StepTimes
from trunkline_worker.scheduler.limits import AdmissionRule, Batching
from trunkline_worker.step.lanes import Lane


class TimelineLife(RuleBasedStateMachine):
    """Random lives of a scheduler: prompts in chunks, preemptions, stop strings, aborts, static batches, run-ahead."""

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 5),
        max_step_tokens=st.integers(1, 32),
        max_running=st.integers(1, 6),
        run_ahead=st.integers(0, 2),
        admission=st.sampled_from(AdmissionRule),
        interactive_reserve=st.sampled_from([0.0, 0.5]),
        batching=st.sampled_from([Batching.CONTINUOUS] * 3 + [Batching.STATIC, Batching.STATIC_UNPADDED]),
        batch_size=st.integers(1, 5),
    )
    def start(self, **options: object) -> None:
        self.rig = TimelineRig(**options)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        max_tokens=st.integers(1, 20),
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from(["a", "b"]),
    )
    def submit(self, prompt: list[int], max_tokens: int, **options: object) -> None:
        if len(prompt) < self.rig.blocks.num_blocks * self.rig.blocks.block_size:
            self.rig.submit(prompt, max_tokens, **options)

    @rule(pick=st.integers(0, 1 << 30))
    def find_a_stop_string(self, pick: int) -> None:
        """The front finds one in the latest token of a choice."""
        rig = self.rig
        got_a_token = [n for n in rig.timelines if rig.histories[n].samples and rig.was_computed_at_the_end(n)]
        if got_a_token:
            sequence_id = got_a_token[pick % len(got_a_token)]
            rig.end(sequence_id)
            rig.scheduler.finish(sequence_id, rig.now_s)
            assert told(rig.ended[sequence_id]) == close_to(expected(rig.histories[sequence_id]))

    @rule(pick=st.integers(0, 1 << 30))
    def abort(self, pick: int) -> None:
        rig = self.rig
        if rig.timelines:
            sequence_id = list(rig.timelines)[pick % len(rig.timelines)]
            exact = rig.was_computed_at_the_end(sequence_id)
            rig.end(sequence_id)
            rig.scheduler.abort(sequence_id, rig.now_s)
            seen, wanted = told(rig.ended[sequence_id]), expected(rig.histories[sequence_id])
            if not exact:  # it may have been left out of steps since its latest token, which is noted with the next one
                for name in ("gaps", "num_gaps", "longest_gap_s", "device_s"):
                    del seen[name], wanted[name]
            assert seen == close_to(wanted)

    @rule(steps=st.integers(1, 40))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.rig.scheduler.has_work:
                self.rig.step()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        for sequence_id in self.rig.finished:
            assert told(self.rig.ended[sequence_id]) == close_to(expected(self.rig.histories[sequence_id]))


def close_to(fields: dict[str, object]) -> dict[str, object]:
    """The same fields, compared up to rounding: some times are sums and differences."""
    return {name: _close_to(value) for name, value in fields.items()}


def _close_to(value: object) -> object:
    if isinstance(value, list):
        return [_close_to(part) for part in value]
    return pytest.approx(value) if isinstance(value, float | tuple) else value


TestTimelineLife = TimelineLife.TestCase
TestTimelineLife.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes
)


def record(done_s: float, *, regular: int = 1, prefill: int = 0) -> StepRecord:
    return StepRecord(
        done_s=done_s, device_s=0.5, prefill_tokens=prefill, decode_tokens=regular, sequences=1, regular_tokens=regular
    )


def test_the_random_lives_have_every_kind_of_event() -> None:
    """A tight pool: long prompts in chunks, preemptions and long gaps."""
    rig = TimelineRig(num_blocks=12, max_step_tokens=6, max_running=4, admission=AdmissionRule.OPTIMISTIC)
    for n in range(20):
        rig.submit([(n * k) % 3 for k in range(1, 4 + n)], max_tokens=12)
    rig.run()
    assert len(rig.ended) == 20
    for sequence_id, timeline in rig.ended.items():
        assert told(timeline) == close_to(expected(rig.histories[sequence_id]))
    ended = rig.ended.values()
    assert any(len(timeline.chunks) > 2 for timeline in ended)
    assert any(timeline.preemptions and timeline.recomputed_tokens for timeline in ended)
    assert any(timeline.num_gaps > MAX_GAPS // 4 for timeline in ended)
    total_s = sum(part.share_s for history in rig.histories.values() for part in history.parts)
    assert sum(timeline.device_s for timeline in ended) == pytest.approx(total_s), "no device time is lost or invented"


def test_chunks_past_the_bound_are_added_to_the_last() -> None:
    times, timeline = StepTimes(TARGET_S), ChoiceTimeline(0.0, 0)
    for n in range(MAX_CHUNKS + 10):
        step = record(1.0 + n, regular=0, prefill=3)
        times.take(step)
        timeline.add_chunk(3, 0, step, times)
    told = timeline.end(100.0, num_outputs=0, cached_tokens=0, times=times)
    assert [chunk.tokens for chunk in told.chunks] == [3] * (MAX_CHUNKS - 1) + [33]
    last = told.chunks[-1]
    assert (last.started_s, last.duration_s) == (MAX_CHUNKS - 0.5, 10.5)


def test_only_the_longest_gaps_are_listed_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MAX_SLOW_STEPS", 64)
    times, timeline = StepTimes(TARGET_S), ChoiceTimeline(0.0, 0)
    times.take(record(0.0))
    timeline.add_first_token(times)
    done_s, num_steps = 0.0, 1000
    for n in range(num_steps):
        done_s += 2.0 + n / 1000
        times.take(record(done_s))
    told = timeline.end(done_s, num_outputs=num_steps + 1, cached_tokens=0, times=times)
    assert told.num_gaps == told.decode_steps == num_steps
    assert [round(gap.duration_s - 2.0, 3) for gap in told.gaps] == [n / 1000 for n in range(984, 1000)]
    assert told.longest_gap_s == pytest.approx(2.999)
    assert len(times._slow) <= 64, "memory is bounded"


def test_a_sequence_that_is_preempted_and_admitted_between_two_steps_has_computed_again() -> None:
    """Its token follows one of the step before, but it came of a chunk."""
    rig = TimelineRig(num_blocks=12, block_size=4)
    sequence_id = rig.submit([1] * 7, max_tokens=6)
    for _ in range(3):
        rig.step()
    rig.scheduler._evictions.evict(rig.sequences[sequence_id])
    rig.run()
    timeline = rig.ended[sequence_id]
    assert [chunk.tokens for chunk in timeline.chunks] == [7, 2], "two full blocks were still cached"
    assert (timeline.preemptions, timeline.recomputed_tokens, timeline.decode_steps) == (1, 1, 4)
    assert told(timeline) == close_to(expected(rig.histories[sequence_id]))
