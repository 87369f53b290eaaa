"""The traces that policies are compared on, and the goals for them."""

from dataclasses import dataclass

GOAL_S = 2.0  # for the p99 of the time that a workload is judged by
OURS, BASE = "predicted-ttft", "round-robin"
BESIDE = ("session-affinity", BASE, "sglang-cache-aware")  # policies that ours must be compared with


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace and its goals."""

    name: str
    file: str
    block_size: int
    # One in a hundred of Mooncake's prompts has over 85,000 tokens, which an idle H200 computes in seven seconds. The
    # goal there is for the delay that the fleet adds.
    idle_share: float
    ramp_s: float  # longer than most agent conversations, and than Mooncake's prefixes stay cached
    times_base: float  # goal for the ratio of our highest load to that of BASE

    @property
    def judged_by(self) -> str:
        return "delay" if self.idle_share else "TTFT"

    def judged_s(self, ttft_p99_s: float, delay_p99_s: float) -> float:
        """The one of the two times that GOAL_S applies to."""
        return delay_p99_s if self.idle_share else ttft_p99_s


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mooncake", "mooncake_conversation.jsonl", 256, 1.0, 60.0, times_base=1.3),
        Workload("agent", "lmcache_miniswe.jsonl.gz", 64, 0.0, 30.0, times_base=3.0),
    )
}
