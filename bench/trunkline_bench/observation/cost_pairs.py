"""Pairs of runs, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles, stdev

from trunkline_bench.reports.markdown import table

COLUMNS = ("off", "on", "CPU µs, off", "on", "on / off", "middle half", "mean")


@dataclass(frozen=True, slots=True)
class Pair:
    """What a second of CPU time did, without and with observation."""

    off: float
    on: float

    @property
    def ratio(self) -> float:
        return self.on / self.off


Pairs = dict[str, list[Pair]]  # by row


def cost_table(pairs: Pairs) -> str:
    """Medians of the pairs; of their ratios also the range of the middle half, and the mean with its standard error."""
    return table({name: cells(taken) for name, taken in pairs.items()}, COLUMNS, "per CPU second")


def cells(taken: Sequence[Pair]) -> list[str]:
    """A row. CPU time is that of one token or one request."""
    off, on = median(pair.off for pair in taken), median(pair.on for pair in taken)
    ratios = [pair.ratio for pair in taken]
    low, _, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    ratio = f"{median(ratios):.3f}"
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    mean = f"{fmean(ratios):.3f} ± {error:.3f}"
    return [f"{off:,.0f}", f"{on:,.0f}", f"{1e6 / off:.1f}", f"{1e6 / on:.1f}", ratio, f"{low:.3f} to {high:.3f}", mean]
