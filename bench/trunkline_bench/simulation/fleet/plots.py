"""Plots of a fleet over time, by policy, as PNG."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from trunkline_bench.simulation.fleet.summary import Summary

SIZE_INCHES = (7.0, 8.0)
DPI = 80


def over_time(runs: list[Summary], title: str, path: Path) -> None:
    """Hit rate, time to first token and imbalance over time."""
    figure, (hits, ttft, balance) = plt.subplots(3, 1, sharex=True, figsize=SIZE_INCHES, dpi=DPI)
    for run in runs:
        time_s = run.over_time.time_s
        hits.plot(time_s, run.over_time.hit_rate, label=run.policy, lw=1)
        line = ttft.plot(time_s, run.over_time.ttft_p99_s, label=f"{run.policy}, p99", lw=1)[0]
        ttft.plot(time_s, run.over_time.ttft_p50_s, ls=":", color=line.get_color(), lw=1)
        balance.plot(time_s, run.over_time.load_cv, label=run.policy, lw=1)
    hits.plot(runs[0].over_time.time_s, runs[0].over_time.ideal_hit_rate, color="grey", ls="--", lw=1, label="ideal")
    hits.set_ylabel("hit rate")
    hits.set_ylim(0, 1.01)
    ttft.set_ylabel("TTFT, s (dotted: p50)")
    ttft.set_yscale("log")
    balance.set_ylabel("CV of tokens to prefill")
    balance.set_xlabel("arrival, s")
    for axes in (hits, ttft, balance):
        axes.grid(alpha=0.3)
    hits.legend(loc="best", fontsize="x-small", ncols=2)
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
