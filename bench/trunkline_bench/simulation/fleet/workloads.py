"""The traces that policies are compared on, and what is asked of them there."""

from dataclasses import dataclass

GOAL_S = 2.0  # of the time that a workload is judged by, at the 99th percentile
OURS, BASE = "predicted-ttft", "round-robin"
BESIDE = ("session-affinity", BASE, "sglang-cache-aware")  # what ours must have been run beside


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace, and what its requests are judged by."""

    name: str
    file: str
    block_size: int
    # Of Mooncake's prompts one in a hundred has over 85,000 tokens, which an idle H200 computes in seven seconds:
    # there the goal is for what is added to that.
    idle_share: float
    ramp_s: float  # longer than most conversations of the agents, and than a prefix of Mooncake's stays cached
    times_base: float  # the goal: how many times the highest load of BASE ours should carry

    @property
    def judged_by(self) -> str:
        return "delay" if self.idle_share else "TTFT"

    def judged_s(self, ttft_p99_s: float, delay_p99_s: float) -> float:
        """Which of the two GOAL_S is for."""
        return delay_p99_s if self.idle_share else ttft_p99_s


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mooncake", "mooncake_conversation.jsonl", 256, 1.0, 60.0, times_base=1.3),
        Workload("agent", "lmcache_miniswe.jsonl.gz", 64, 0.0, 30.0, times_base=3.0),
    )
}
