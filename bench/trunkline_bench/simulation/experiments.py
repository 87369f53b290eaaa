"""`make bench-scheduler`: experiments with the scheduler in virtual time.

Each experiment prints a table, and writes it with its plots to bench/results/scheduler/. Its docstring is the title.
"""

import argparse
import gc
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.reports.statistics import jain, percentile
from trunkline_bench.simulation import plots, report
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.places import AZURE, RESULTS, TRACES
from trunkline_bench.simulation.traces.workload import at_once, at_rate, mixed_lengths, poisson, read_trace
from trunkline_bench.simulation.worker.replay import Replayed, replay
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.scheduler.limits import AdmissionRule, Batching, SchedulerLimits
from trunkline_worker.step.fair_share import INPUT_COST, OUTPUT_COST

MOONCAKE = TRACES / "mooncake_conversation.jsonl"

PROFILE = PROFILES["h200-8b"]
BLOCK_SIZE = 64
UNBOUNDED = 1 << 40
NOT_THE_DEVICE = "not the simulated device"
FAIRNESS_S = 100.0
STATIC_BATCH_SIZES = (16, 32, 64, 128, 256)
LIMITS = SchedulerLimits(
    max_step_tokens=4096,
    max_running_requests=512,
    max_waiting_requests=UNBOUNDED,
    max_waiting_tokens=UNBOUNDED,
    itl_target_s=0.1,
)


def worker(limits: SchedulerLimits = LIMITS, *, num_blocks: int | None = None) -> WorkerSpec:
    return WorkerSpec(PROFILE, num_blocks or PROFILE.kv_blocks(BLOCK_SIZE), BLOCK_SIZE, limits)


def batching(folder: Path) -> str:
    """Continuous against static batching of a saturated worker, padded and unpadded, at several batch sizes."""
    workloads = {
        "Azure conversation trace, first 4,000 requests": at_once(read_trace(AZURE, limit=4000)),
        "mixed lengths, 2,000 requests": at_once(poisson(2000, 1.0, mixed_lengths)),
    }
    text = ""
    for title, requests in workloads.items():
        runs: dict[str, Replayed] = {"continuous": replay(requests, worker())}
        for size in STATIC_BATCH_SIZES:
            for kind in (Batching.STATIC, Batching.STATIC_UNPADDED):
                limits = replace(LIMITS, batching=kind, batch_size=size)
                runs[f"{kind.value}, {size}"] = replay(requests, worker(limits))
        rates = {name: report.output_rate(run) for name, run in runs.items()}
        rows = {name: [*report.row(run), f"{rates['continuous'] / rates[name]:.2f}"] for name, run in runs.items()}
        best = {
            kind: max((name for name in rates if name.startswith(kind + ",")), key=lambda name: rates[name])
            for kind in ("static", "static-unpadded")
        }
        text += f"## {title}, all arriving at the start\n\n"
        text += table(rows, (*report.COLUMNS, "continuous / this"), "batching, batch size")
        for baseline, name in best.items():
            gain = rates["continuous"] / rates[name]
            text += f"\n{baseline} is best at {name.split(', ')[1]}: continuous gives {gain:.2f} x."
        text += "\n\n"
        slug = title.split()[0].lower()
        plots.bars(rates, "output tokens per second", folder / f"batching-{slug}.png")
        plots.batch_composition(runs["continuous"].series, folder / f"batching-{slug}-continuous.png")
        plots.batch_composition(runs[best["static"]].series, folder / f"batching-{slug}-static.png")
    return text


def half_load(folder: Path) -> str:
    """Latency under each kind of batching, at half the load that continuous batching carries."""
    requests = read_trace(AZURE, limit=4000)
    saturated = replay(at_once(requests), worker())
    rate = len(requests) / saturated.duration_s / 2
    requests = at_rate(requests, rate)
    runs = {"continuous": replay(requests, worker())}
    for size, window_s in ((32, 0.1), (64, 0.1), (64, 1.0)):
        limits = replace(LIMITS, batching=Batching.DYNAMIC, batch_size=size, batch_window_s=window_s)
        runs[f"dynamic, {size} or {window_s:g} s"] = replay(requests, worker(limits))
    limits = replace(LIMITS, batching=Batching.STATIC_UNPADDED, batch_size=64)
    runs["static-unpadded, 64"] = replay(requests, worker(limits))
    plots.ttft_cdf({name: report.ttfts(run) for name, run in runs.items()}, folder / "half-load-ttft.png")
    title = f"## Azure conversation trace at {rate:.1f} requests/s, half of what continuous batching carries\n\n"
    return title + table({name: report.row(run) for name, run in runs.items()}, report.COLUMNS, "batching")


def lanes(folder: Path) -> str:
    """Interactive requests alone, beside ten times as much batch work, and the latter without lanes."""
    target_s = 0.05
    limits = replace(LIMITS, itl_target_s=target_s, interactive_reserve=0.1)
    chat = poisson(2400, 4.0, chat_lengths, seed=1, lane="interactive", tenant="chat")
    flood = poisson(12_000, 20.0, bulk_lengths, seed=2, lane="batch", tenant="bulk")
    tokens = {
        name: sum(r.prompt_tokens + r.output_tokens for r in rs) for name, rs in (("chat", chat), ("bulk", flood))
    }
    both = sorted([*chat, *flood], key=lambda request: request.arrival_s)
    mixed = [replace(request, lane="standard", tenant="") for request in both]
    end_s = chat[-1].arrival_s
    runs = {
        "interactive alone": replay(chat, worker(limits), until_s=end_s),
        "with 10 x batch": replay(both, worker(limits), until_s=end_s),
        "with 10 x batch, without lanes": replay(mixed, worker(limits), until_s=end_s),
    }
    is_chat = {id(request.prompt) for request in chat}
    first = {
        name: [o.ttft_s for o in run.outcomes if o.ttft_s is not None and id(o.request.prompt) in is_chat]
        for name, run in runs.items()
    }
    plots.ttft_cdf(first, folder / "lanes-ttft.png")
    plots.kv_and_queue(runs["with 10 x batch"].series, folder / "lanes-kv-and-queue.png")
    alone, flooded = (percentile(first[name], 0.99) for name in list(first)[:2])
    allowed = max(2 * alone, alone + 2 * target_s)
    rows = {
        name: [
            *(f"{percentile(values, share) * 1e3:,.0f}" for share in (0.5, 0.9, 0.99)),
            f"{report.output_rate(runs[name]):,.0f}",
            f"{runs[name].stats.steps.preemptions}",
        ]
        for name, values in first.items()
    }
    return (
        f"## Interactive requests under a flood of batch work ({tokens['bulk'] / tokens['chat']:.1f} x the tokens)\n\n"
        + table(rows, ("p50, ms", "p90, ms", "p99, ms", "output tok/s, all", "preemptions"), "TTFT, interactive")
        + f"\nAllowed at p99: max(2 x alone, alone + 2 steps of {target_s * 1e3:.0f} ms) = {allowed * 1e3:.0f} ms; "
        f"measured {flooded * 1e3:.0f} ms.\n"
    )


def chat_lengths(draw: np.random.Generator) -> tuple[int, int]:
    return int(draw.integers(100, 1500)), int(draw.integers(50, 350))


def bulk_lengths(draw: np.random.Generator) -> tuple[int, int]:
    return int(draw.integers(500, 4000)), int(draw.integers(50, 350))


def fairness(folder: Path) -> str:
    """Two backlogged tenants, one of which sends ten times as many requests."""
    rows = {}
    series = {}
    for weights in ((1.0, 1.0), (3.0, 1.0)):
        few = poisson(5_000, 50.0, chat_lengths, seed=3, tenant="few")
        many = poisson(50_000, 500.0, bulk_lengths, seed=4, tenant="many")
        requests = sorted([*few, *many], key=lambda request: request.arrival_s)
        names = {"few": weights[0], "many": weights[1]}
        run = replay(requests, worker(), tenant_weights=names, until_s=FAIRNESS_S)
        service = {
            name: sum(
                INPUT_COST * (o.request.prompt_tokens - o.cached_tokens) + OUTPUT_COST * o.output_tokens
                for o in run.outcomes
                if o.request.tenant == name and o.first_token_s is not None
            )
            / weight
            for name, weight in names.items()
        }
        rows[f"{weights[0]:g} : {weights[1]:g}"] = [
            f"{service['few']:,.0f}", f"{service['many']:,.0f}", f"{jain(service.values()):.4f}",
        ]  # fmt: skip
        series[f"{weights[0]:g} : {weights[1]:g}"] = run
    plots.kv_and_queue(series["3 : 1"].series, folder / "fairness-kv-and-queue.png")
    return (
        "## Two backlogged tenants, `many` sending ten times as many requests as `few`, "
        f"{FAIRNESS_S:.0f} s\n\n"
        + table(rows, ("few: service / weight", "many: service / weight", "Jain's index"), "weights few : many")
        + "\nService is counted in cost units: 1 for an input token, 2 for an output token.\n"
    )


def overload(folder: Path) -> str:
    """Ten times more requests than the worker can serve: latency of the accepted requests, and accuracy of the retry
    hints."""
    limits = replace(LIMITS, max_waiting_requests=256)
    capacity = 4000 / replay(at_once(read_trace(AZURE, limit=4000)), worker()).duration_s
    requests = at_rate(read_trace(AZURE, limit=19_000), 10 * capacity)
    run = replay(requests, worker(limits))
    arrivals_end_s = requests[-1].arrival_s
    accepted = [o for o in run.outcomes if o.ttft_s is not None]
    halves = [
        [o.ttft_s or 0.0 for o in accepted if low <= o.request.arrival_s < high]
        for low, high in ((0.0, arrivals_end_s / 2), (arrivals_end_s / 2, float("inf")))
    ]
    ratios = hint_ratios(run)
    plots.kv_and_queue(run.series, folder / "overload-kv-and-queue.png")
    rows = {
        "offered": [f"{10 * capacity:.0f} requests/s, ten times the capacity"],
        "accepted / refused": [f"{len(accepted):,} / {sum(bool(o.refused) for o in run.outcomes):,}"],
        "longest queue (bound 256)": [f"{max(map(sum, run.series.waiting)):,}"],
        "TTFT p50 / p99 of the accepted, first half": [quantiles(halves[0])],
        "TTFT p50 / p99 of the accepted, second half": [quantiles(halves[1])],
        "retry hint / real wait: p10, median, p90": [
            ", ".join(f"{percentile(ratios, share):.2f}" for share in (0.1, 0.5, 0.9))
        ],
        "hints within 30 % of the real wait": [
            f"{sum(0.7 <= ratio <= 1.3 for ratio in ratios) / len(ratios):.0%} of {len(ratios):,}"
        ],
    }
    return "## Ten times the capacity, Azure conversation trace\n\n" + table(rows, ("measured",))


def hint_ratios(run: Replayed) -> list[float]:
    """For each refusal, the ratio of its hint to the time in which the requests that waited then were admitted.

    Refusals before as many admissions as waiting requests are left out, since the worker cannot know its rate yet."""
    admitted_s = [time_s for time_s, _ in run.admitted]
    ratios = []
    for outcome in run.outcomes:
        if not outcome.refused or outcome.done_s is None:
            continue
        at = bisect_right(run.series.time_s, outcome.request.arrival_s) - 1
        waiting = sum(run.series.waiting[at]) if at >= 0 else 0
        before = bisect_right(admitted_s, outcome.request.arrival_s)
        if waiting and before >= waiting and before + waiting <= len(admitted_s):
            ratios.append(outcome.retry_delay_s / (admitted_s[before + waiting - 1] - outcome.request.arrival_s))
    return ratios


def quantiles(values: list[float]) -> str:
    return " / ".join(f"{percentile(values, share):.2f} s" for share in (0.5, 0.99))


def preemption(folder: Path) -> str:
    """Admission by predicted peak against admission by what fits now, with a KV pool that is too small."""
    requests = at_rate(read_trace(MOONCAKE, limit=3000), 1.2)
    rows, runs = {}, {}
    for num_blocks in (2000, 4000):
        for rule in (AdmissionRule.OPTIMISTIC, AdmissionRule.PREDICTED):
            run = replay(requests, worker(replace(LIMITS, admission=rule), num_blocks=num_blocks))
            name = f"{num_blocks * BLOCK_SIZE:,} tokens of KV, {rule.value}"
            steps = run.stats.steps
            rows[name] = [
                f"{1000 * steps.preemptions / len(requests):,.1f}",
                f"{steps.preempted_tokens:,}",
                f"{steps.preempted_tokens / sum(r.prompt_tokens for r in requests):.1%}",
                f"{report.output_rate(run):,.0f}",
                quantiles(report.ttfts(run)),
                quantiles(report.e2es(run)),
            ]
            runs[name] = run
            plots.kv_and_queue(run.series, folder / f"preemption-{num_blocks}-{rule.value}.png")
    columns = (
        "preemptions per 1,000 requests", "tokens dropped", "of prompt tokens", "output tok/s", "TTFT p50 / p99",
        "E2E p50 / p99",
    )  # fmt: skip
    return (
        "## A small KV pool, Mooncake conversation trace, 3,000 requests at 1.2 requests/s\n\n"
        + table(rows, columns)
        + "\n`optimistic` is vLLM's rule: a request is admitted when its prompt fits now. Predicting the peak delays "
        "the first token of requests that are held back, but avoids computing tokens twice.\n"
    )


EXPERIMENTS: dict[str, Callable[[Path], str]] = {
    "batching": batching,
    "half-load": half_load,
    "lanes": lanes,
    "fairness": fairness,
    "overload": overload,
    "preemption": preemption,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"unknown experiments: {', '.join(sorted(unknown))}; allowed: {', '.join(EXPERIMENTS)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    gc.disable()  # see main.py
    for name in arguments.names or EXPERIMENTS:
        started_s = time.perf_counter()
        found = facts(make_command("bench-scheduler", [name]), NOT_THE_DEVICE)
        text = EXPERIMENTS[name](arguments.output)
        title = (EXPERIMENTS[name].__doc__ or "").replace("\n    ", " ").strip()
        head = f"# {title}\n\n- simulated device: {PROFILE.name} ({PROFILE.model.name}), not measured: a cost model\n"
        (arguments.output / f"{name}.md").write_text(head + listed(found) + "\n" + text)
        print(text, f"({name}: {time.perf_counter() - started_s:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
