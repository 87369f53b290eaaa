"""What a router's CPU time per token grows by where it looks for reasoning and calls in the text of a chat.

usage: python -m trunkline_bench.streaming.parsing_cost [--streams 64] [--restarts 6] [--turns 8] [--unpaced]

Three routers stream the same chats over HTTP: two as text, one in the format of Hermes. They take turns in random
order. The ratio of the two equal routers shows how far the third one's ratio can be trusted. Processes differ by their
layout in memory, so all of them are started again several times, and a start counts as one observation.
"""

import argparse
import asyncio
import contextlib
import random
from dataclasses import replace
from pathlib import Path
from statistics import median

from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts
from trunkline_bench.streaming.client import Load
from trunkline_bench.streaming.processes import Hop, printed_address, process, router_hops, run
from trunkline_bench.streaming.tables import STEPS_PER_S

RESULTS = Path(__file__).parents[2] / "results"
TOKENS = 100  # per stream
TEXT, AGAIN, PARSED = "text", "text, a second router", "parsed"
FORMATS = {TEXT: "", AGAIN: "", PARSED: "hermes"}


async def one_start(streams: int, turns: int, steps_per_s: float) -> dict[str, float]:
    """Returns the CPU time of each router in microseconds per token: the median of its turns after the first."""
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    async with contextlib.AsyncExitStack() as stack:
        hops: dict[str, Hop] = {}
        for name in _shuffled():
            source = process(
                "trunkline_bench.streaming.source", "--steps-per-s", str(steps_per_s),
                variables={"ANSWER_FORMAT": FORMATS[name]},
            )  # fmt: skip
            address = await printed_address(await stack.enter_async_context(source))
            hops[name] = replace((await router_hops(stack, address, ("", name)))[name], wire="chat")
        for _ in range(turns + 1):
            for name in _shuffled():
                hop = hops[name]
                one = await run(hop, Load(hop.address, hop.wire, streams, TOKENS, steps_per_s=steps_per_s))
                found[name].append(one.hop_cpu_s / one.seen.tokens * 1e6)
    return {name: median(times_us[1:]) for name, times_us in found.items()}


def _shuffled() -> list[str]:
    return random.sample(list(FORMATS), len(FORMATS))


async def measure(streams: int, restarts: int, turns: int, steps_per_s: float) -> str:
    rows: dict[str, list[str]] = {}
    ratios, controls = [], []
    for start in range(1, restarts + 1):
        times_us = await one_start(streams, turns, steps_per_s)
        ratios.append(times_us[PARSED] / ((times_us[TEXT] + times_us[AGAIN]) / 2))
        controls.append(times_us[AGAIN] / times_us[TEXT])
        cells = [f"{times_us[name]:.1f}" for name in FORMATS]
        rows[f"start {start}"] = [*cells, f"{ratios[-1]:.3f}", f"{controls[-1]:.3f}"]
        print(f"start {start}: {rows[f'start {start}']}", flush=True)
    rows["median"] = ["", "", "", f"{median(ratios):.3f}", f"{median(controls):.3f}"]
    return table(rows, [*(f"{name}, us per token" for name in FORMATS), "parsed to text", "text to text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--restarts", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--unpaced", action="store_true", help="tokens as fast as the router takes them")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    given = f"--streams {arguments.streams} --restarts {arguments.restarts} --turns {arguments.turns}"
    command = f"python -m trunkline_bench.streaming.parsing_cost {given}" + " --unpaced" * arguments.unpaced
    found = facts(command, "shared by source, router and client", ("trunkline", "grpcio", "protobuf", "uvloop"))
    steps_per_s = 0.0 if arguments.unpaced else STEPS_PER_S
    measured = asyncio.run(measure(arguments.streams, arguments.restarts, arguments.turns, steps_per_s))
    pace = "as fast as the router takes them" if arguments.unpaced else f"{STEPS_PER_S:.0f} a second and stream"
    text = (
        "# What looking for reasoning and calls costs a router\n\n"
        + listed(found)
        + f"- chats over HTTP: {arguments.streams} streams of {TOKENS} tokens, {pace}\n\n"
        + measured
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    pace = "-unpaced" if arguments.unpaced else ""
    (arguments.output / f"parsing-cost-{arguments.streams}{pace}-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
