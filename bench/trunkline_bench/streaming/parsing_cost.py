"""What a router's CPU time per token grows by where it looks for reasoning and calls in the text of a chat.

usage: python -m trunkline_bench.streaming.parsing_cost [--streams 64] [--restarts 3] [--turns 8] [--unpaced]

One router has three models that answer with the same tokens: two as text, one in the format of Hermes. Chats with them
take turns in random order. All of them run in one process, since processes differ by their layout in memory. The ratio
of the two models with text shows how far the third one's ratio can be trusted.
"""

import argparse
import asyncio
import contextlib
import math
import random
from pathlib import Path
from statistics import median, stdev

from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts
from trunkline_bench.streaming.client import Load
from trunkline_bench.streaming.processes import HTTP, ROUTER, printed_address, process, router_hops, run
from trunkline_bench.streaming.tables import STEPS_PER_S

RESULTS = Path(__file__).parents[2] / "results"
TOKENS = 100  # per stream
TEXT, AGAIN, PARSED = "text", "text again", "parsed"  # names of models
FORMATS = {TEXT: "", AGAIN: "", PARSED: "hermes"}


Turn = dict[str, float]  # CPU time of the router in microseconds per token, by model


async def one_start(streams: int, turns: int, steps_per_s: float) -> list[Turn]:
    """Returns what the turns of one router took, without the first one."""
    taken: list[Turn] = []
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for model in _shuffled():
            variables = {"MODEL": model, "ANSWER_FORMAT": FORMATS[model]}
            source = process("trunkline_bench.streaming.source", "--steps-per-s", str(steps_per_s), variables=variables)
            addresses.append(await printed_address(await stack.enter_async_context(source)))
        hop = (await router_hops(stack, ",".join(addresses), (ROUTER, HTTP)))[HTTP]
        for _ in range(turns + 1):
            turn: Turn = {}
            for model in _shuffled():
                one = await run(hop, Load(hop.address, "chat", streams, TOKENS, steps_per_s=steps_per_s, model=model))
                turn[model] = one.hop_cpu_s / one.seen.tokens * 1e6
            taken.append(turn)
    return taken[1:]


def _shuffled() -> list[str]:
    return random.sample(list(FORMATS), len(FORMATS))


def parsed_to_text(turn: Turn) -> float:
    return turn[PARSED] / ((turn[TEXT] + turn[AGAIN]) / 2)


def text_to_text(turn: Turn) -> float:
    return turn[AGAIN] / turn[TEXT]


async def measure(streams: int, restarts: int, turns: int, steps_per_s: float) -> str:
    rows: dict[str, list[str]] = {}
    every: list[Turn] = []
    for start in range(1, restarts + 1):
        taken = await one_start(streams, turns, steps_per_s)
        every += taken
        rows[f"start {start}"] = _row(taken)
        print(f"start {start}: {rows[f'start {start}']}", flush=True)
    rows[f"all {len(every)} turns"] = _row(every)
    return table(rows, [*(f"{name}, us per token" for name in FORMATS), "parsed to text", "text to text"])


def _row(taken: list[Turn]) -> list[str]:
    """Medians of turns; ratios with the error of their median."""
    ratios = (list(map(parsed_to_text, taken)), list(map(text_to_text, taken)))
    times_us = [f"{median(turn[model] for turn in taken):.1f}" for model in FORMATS]
    return [*times_us, *(f"{median(each):.3f} ± {_error_of_median(each):.3f}" for each in ratios)]


def _error_of_median(values: list[float]) -> float:
    """The standard error of the median of normally distributed values."""
    return 1.2533 * stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--restarts", type=int, default=3)
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
        "# The cost of looking for reasoning and calls in a router\n\n"
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
