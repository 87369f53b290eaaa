"""The state of an engine over the time of a run."""

from dataclasses import dataclass, field

from trunkline.v1.worker_pb2 import LoadSample
from trunkline_worker.scheduler.stats import StepCounts


@dataclass(slots=True)
class StepSeries:
    """One entry per EngineStep, which is of one step or of a run of repeated steps."""

    time_s: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    kv_live: list[int] = field(default_factory=list)
    kv_cached: list[int] = field(default_factory=list)
    kv_free: list[int] = field(default_factory=list)
    waiting: list[tuple[int, ...]] = field(default_factory=list)  # by lane
    prefill: list[int] = field(default_factory=list)  # tokens of the last step, as the next two
    decode: list[int] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)

    def add(self, now_s: float, load: LoadSample, counts: StepCounts) -> None:
        self.time_s.append(now_s)
        self.running.append(load.running)
        self.kv_live.append(load.kv_live_blocks)
        self.kv_cached.append(load.kv_cached_blocks)
        self.kv_free.append(load.kv_free_blocks)
        self.waiting.append(tuple(load.waiting_by_lane))
        self.prefill.append(counts.prefill_tokens)
        self.decode.append(counts.decode_tokens)
        self.padding.append(counts.padding_tokens)
