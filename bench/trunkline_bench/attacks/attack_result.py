"""The result of one attack, its bounds, and whether they held."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trunkline_bench.attacks.innocent import Record
from trunkline_bench.attacks.watched_server import LoopLag

# Bounds on the innocent tenant's latency, and on the router or worker under attack.
MAX_P99_MS = 250.0
MAX_RSS_MIB = 1024.0
MAX_KEPT_MIB = 256.0  # memory more than before, three seconds after the attack
# One callback may take 5 ms. An iteration of the loop runs all callbacks that are ready, including one per connection.
MAX_OWN_LAG_MS = 100.0
# Bounds for tenants that share a worker, relative to the p99 without the others, since its work for them takes time.
TIMES_ALONE, MORE_THAN_ALONE_MS = 4.0, 200.0  # 200 ms are two targets for the inter-token latency
MAX_LATER_MS = 100.0  # for each token after the first: the default target for the inter-token latency

HEAD = (
    "| attack | outcomes | innocent's requests | first token: p50, ms | p99 | max | a later token: p99, ms | failed "
    "| loop lag, ms | without waits for a core | RSS before, MiB | peak | after | verdict |\n|" + "---|" * 14
)


class Bounds(NamedTuple):
    """p99_ms: of the innocent's first tokens; later_ms: of each later token, a mean over its answer
    statuses: those that calls of the attack may end with; empty: any
    """

    p99_ms: float = MAX_P99_MS
    later_ms: float = MAX_LATER_MS
    rss_mib: float = MAX_RSS_MIB
    kept_mib: float = MAX_KEPT_MIB
    own_lag_ms: float = MAX_OWN_LAG_MS
    statuses: Sequence[str] = ()


def bound_beside_others(alone_ms: float) -> float:
    """Bound in ms on the innocent's p99 while another tenant uses the same worker; `alone_ms`: its p99 without that."""
    return max(TIMES_ALONE * alone_ms, alone_ms + MORE_THAN_ALONE_MS)


@dataclass(slots=True)
class AttackResult:
    """The result of one attack. Memory is in MiB, of the process that was attacked.

    warm_ms: the innocent's slowest request of the few right before the attack
    outcomes: how often each outcome occurred, or one line of what the router reported
    """

    attack: str
    bounds: Bounds
    warm_ms: float = 0.0
    outcomes: str = ""
    record: Record = field(default_factory=Record)
    rss_before: float = 0.0
    rss_peak: float = 0.0
    rss_after: float = 0.0
    lag: LoopLag = field(default_factory=LoopLag)
    strange_statuses: tuple[str, ...] = ()  # statuses that the attack's calls may not end with
    failure: str = ""  # why the attack could not be measured

    def misses(self) -> list[str]:
        """The bounds that did not hold, each with what was measured."""
        if self.failure:
            return [self.failure]
        measured = (
            ("p99", self.record.p99_ms, self.bounds.p99_ms, "ms"),
            ("p99 of a later token", self.record.later_p99_ms, self.bounds.later_ms, "ms"),
            ("RSS", self.rss_peak, self.bounds.rss_mib, "MiB"),
            ("RSS kept", self.rss_after - self.rss_before, self.bounds.kept_mib, "MiB"),
            ("lag", self.lag.own_ms, self.bounds.own_lag_ms, "ms"),
        )
        missed = [f"{name} {value:.0f} > {bound:.0f} {unit}" for name, value, bound, unit in measured if value > bound]
        if self.record.errors:
            missed.append(f"{len(self.record.errors)} failed: {self.record.errors[0]}")
        missed += [f"status {status}" for status in self.strange_statuses]
        return missed

    def markdown(self) -> str:
        """A row of the table that HEAD begins."""
        record, misses = self.record, self.misses()
        cells = (
            self.attack,
            self.outcomes,
            str(len(record.times_ms)),
            f"{record.p50_ms:.0f}",
            f"{record.p99_ms:.0f}",
            f"{max(record.times_ms, default=math.nan):.0f}",
            f"{record.later_p99_ms:.0f}" if record.later_ms else "",
            str(len(record.errors)),
            f"{self.lag.lag_ms:.0f}",
            f"{self.lag.own_ms:.0f}",
            f"{self.rss_before:.0f}",
            f"{self.rss_peak:.0f}",
            f"{self.rss_after:.0f}",
            "**missed**: " + "; ".join(misses) if misses else "holds",
        )
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
