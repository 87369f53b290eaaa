"""Plots of runs, as PNG."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from trunkline_bench.simulation.worker.step_series import StepSeries
from trunkline_worker.step.lanes import Lane

SIZE_INCHES = (7.0, 3.6)
DPI = 80
POINTS = 600  # of a line; more would not be visible


def ttft_cdf(runs: dict[str, list[float]], path: Path) -> None:
    """Cumulative distribution of times to first token, given in seconds, for each run."""
    figure, axes = plt.subplots(figsize=SIZE_INCHES, dpi=DPI)
    for name, values in runs.items():
        if values:
            ordered = np.sort(np.array(values)) * 1e3
            picked = np.unique(np.linspace(0, len(ordered) - 1, POINTS).astype(int))
            axes.plot(ordered[picked], (picked + 1) / len(ordered), label=f"{name} (n={len(ordered)})")
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, ms")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.01)
    _finish(figure, axes, path)


def kv_and_queue(series: StepSeries, path: Path) -> None:
    """Contents of the KV pool and number of requests, over time."""
    time_s, index = _picked(series)
    figure, (pool, queue) = plt.subplots(2, 1, sharex=True, figsize=(SIZE_INCHES[0], 5.0), dpi=DPI)
    live, cached, free = (np.array(values)[index] for values in (series.kv_live, series.kv_cached, series.kv_free))
    total = live + cached + free
    pool.stackplot(time_s, live / total, cached / total, free / total, labels=["live", "cached", "free"], lw=0)
    pool.set_ylabel("share of KV blocks")
    pool.set_ylim(0, 1)
    waiting = np.array(series.waiting)[index]
    for lane in Lane:
        if waiting[:, lane].any():
            queue.plot(time_s, waiting[:, lane], label=f"{lane.name.lower()} waiting")
    queue.plot(time_s, np.array(series.running)[index], label="running", color="grey", lw=0.8)
    queue.set_xlabel("time, s")
    queue.set_ylabel("requests")
    pool.legend(loc="upper right", fontsize="small")
    _finish(figure, queue, path)


def batch_composition(series: StepSeries, path: Path) -> None:
    """Tokens per step by kind, over time. Each point is the mean of equally many steps."""
    figure, axes = plt.subplots(figsize=SIZE_INCHES, dpi=DPI)
    count = len(series.time_s)
    edges = np.unique(np.linspace(0, count, min(count, POINTS // 3) + 1).astype(int))
    time_s = np.array(series.time_s)[edges[:-1]]
    means = [
        np.add.reduceat(np.array(values), edges[:-1]) / np.diff(edges)
        for values in (series.prefill, series.decode, series.padding)
    ]
    axes.stackplot(time_s, *means, labels=["prefill", "decode", "padding"], lw=0)
    axes.set_xlabel("time, s")
    axes.set_ylabel("tokens per step")
    _finish(figure, axes, path)


def bars(values: dict[str, float], label: str, path: Path) -> None:
    """One bar per name."""
    figure, axes = plt.subplots(figsize=SIZE_INCHES, dpi=DPI)
    drawn = axes.barh(list(values), list(values.values()))
    axes.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _picked(series: StepSeries) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Times and indices of the entries to plot."""
    index = np.unique(np.linspace(0, len(series.time_s) - 1, POINTS).astype(int))
    return np.array(series.time_s)[index], index


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
