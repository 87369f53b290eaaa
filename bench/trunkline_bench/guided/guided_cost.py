"""`make bench-guided`: what grammars cost a step, and those beside them.

The engine, its grammar process and the masks are real, with a vocabulary of 152k tokens; a device is simulated that
takes 10 ms for each step. Sequences write JSON documents of a usual schema.
"""

import argparse
import gc
import json
import random
import select
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from trunkline.engine.v1.engine_pb2 import EngineRequest, EngineStep
from trunkline.names import grammar_digest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Grammar, GrammarKind, Submit
from trunkline_bench.guided.large_tokenizer import read_ranks, write_tokenizer
from trunkline_bench.guided.simulated_device import SimulatedDevice, Text
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.reports.statistics import percentile
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.engine.engine_process import idle_s
from trunkline_worker.engine.guided_sequences import GuidedSequences
from trunkline_worker.grammar.grammar_link import GrammarLink
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats

REPOSITORY = Path(__file__).parents[3]
VOCAB = 151_936  # Qwen3's: a little more than its tokenizer's
STEP_S = 0.010
SEQUENCES, STREAMS, SCHEMAS = 64, 16, 200
PROMPT, LONGEST = 32, 30_000
WARM_UP_STEPS = 50
DOCUMENT_TOKENS = 60  # about as many as a document has
COLOURS = ["red", "green", "blue"]
NAMES = ["Ada Lovelace", "Grace Hopper", "Alan Turing", "Katherine Johnson"]


def schema(record: int) -> dict[str, Any]:
    """A usual object; another one for each number."""
    properties = {
        "first_and_last_name": {"type": "string"},
        "age_in_years": {"type": "integer"},
        "is_active": {"type": "boolean"},
        "favourite_colours": {"type": "array", "items": {"enum": COLOURS}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, f"city_{record}": {"type": "string"}},
            "required": ["street", f"city_{record}"],
            "additionalProperties": False,
        },
        "comment": {"type": "string"},
    }
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def document(record: int, draw: random.Random) -> dict[str, Any]:
    words = ["the", "order", "came", "late", "and", "parcel", "was", "open", "but", "all", "of", "it", "there"]
    return {
        "first_and_last_name": draw.choice(NAMES),
        "age_in_years": draw.randrange(18, 99),
        "is_active": draw.random() < 0.5,
        "favourite_colours": draw.sample(COLOURS, draw.randrange(4)),
        "address": {"street": f"Mill Lane {draw.randrange(1, 200)}", f"city_{record}": draw.choice(["Oslo", "Turin"])},
        "comment": " ".join(draw.choices(words, k=draw.randrange(5, 30))),
    }


class Bench:
    """An engine on a simulated device."""

    def __init__(self, tokenizer: Path, ranks: dict[bytes, int], end: int) -> None:
        limits = SchedulerLimits(max_running_requests=SEQUENCES + STREAMS + SCHEMAS, itl_target_s=1.0)
        num_blocks = 20_000
        scheduler = Scheduler(limits, KVBlocks(num_blocks, PrefixTree("guided", 16)), EngineStats(0.0))
        self.device = SimulatedDevice(STEP_S)
        self.engine = Engine(scheduler, self.device, ModelLimits(32_768, frozenset([end])), time.perf_counter)
        self._link = GrammarLink(tokenizer, vocab_size=VOCAB, eos_token_ids=[end])
        self.engine.guided = GuidedSequences(self._link, scheduler.sequences, VOCAB)
        self._ranks, self._end = ranks, end
        self._pieces = {rank: token for token, rank in ranks.items()}
        self._handles = 0

    def close(self) -> None:
        self._link.close()

    def submit(
        self,
        text: dict[str, Any] | list[Any] | None = None,
        schema: dict[str, Any] | None = None,
        max_tokens: int = LONGEST,
    ) -> int:
        """One request. With a schema it writes this text. Returns its handle."""
        self._handles += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0)
        submit = Submit(handle=self._handles, prompt_token_ids=[self._handles] * PROMPT, sampling=sampling, lane=1)  # type: ignore[arg-type]
        if schema is not None:
            grammar = Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text=json.dumps(schema))
            grammar.digest = grammar_digest(grammar)
            submit.work.grammar.CopyFrom(grammar)
            self.device.texts[self._handles] = Text(json.dumps(text).encode(), self._ranks, self._pieces, self._end)
        self.engine.accept(EngineRequest(submits=[submit]))
        return self._handles

    def abort_all(self) -> None:
        self.engine.accept(EngineRequest(abort_handles=range(1, self._handles + 1)))
        self.run(lambda step: not self.engine.scheduler.has_work)

    def run(self, is_over: Callable[[EngineStep | None], bool]) -> None:
        """The loop of engine_process.run()."""
        assert self.engine.guided is not None
        gc.collect()
        gc.freeze()  # the texts: an engine has no such objects, which its collector would visit
        while not is_over(step := self.engine.step()):
            broken = [output for output in step.outputs if output.HasField("error")] if step is not None else []
            assert not broken, broken[0]
            timeout_s, ends_s = idle_s(self.engine), self.device.ends_s()
            if ends_s is not None:
                until_s = max(0.0, ends_s - time.perf_counter())
                timeout_s = until_s if timeout_s is None else min(timeout_s, until_s)
            select.select([self.engine.guided], [], [], timeout_s)

    def steps(self, count: int) -> list[float]:
        """The times of this many steps, in ms."""
        times_s: list[float] = [time.perf_counter()]
        num_steps = self.device.num_steps

        def is_over(step: EngineStep | None) -> bool:
            if self.device.num_steps > num_steps + len(times_s) - 1:
                times_s.append(time.perf_counter())
            return len(times_s) > count

        self.run(is_over)
        return [1e3 * (after - before) for before, after in pairwise(times_s)]


def step_times(bench: Bench, count: int, *, guided: bool, draw: random.Random) -> list[float]:
    """Of steps in which all sequences decode."""
    for number in range(SEQUENCES):
        if guided:
            many = {"type": "array", "items": schema(number)}
            bench.submit([document(number, draw) for _ in range(count // 10)], many)
        else:
            bench.submit()
    bench.run(lambda step: len(bench.engine.scheduler.running) == SEQUENCES)
    bench.steps(WARM_UP_STEPS)
    found = bench.steps(count)
    assert len(bench.engine.scheduler.running) == SEQUENCES
    bench.abort_all()
    return found


def gaps(
    bench: Bench,
    draw: random.Random,
    *,
    first_schema: int | None = None,
    plain: int = 0,
    count: int = 0,
) -> list[float]:
    """Times between tokens of streams without a grammar, in ms, while other requests arrive at once: with new schemas,
    or `plain` ones. If none arrive, of `count` steps."""
    streams = [bench.submit() for _ in range(STREAMS)]
    bench.run(lambda step: len(bench.engine.scheduler.running) == STREAMS)
    bench.steps(WARM_UP_STEPS)
    for _ in range(plain):
        bench.submit(max_tokens=DOCUMENT_TOKENS)
    left = plain
    if first_schema is not None:
        for number in range(first_schema, first_schema + SCHEMAS):
            bench.submit(document(number, draw), schema(number))
        left = SCHEMAS
    found: list[float] = []
    last_s = time.perf_counter()

    def is_over(step: EngineStep | None) -> bool:
        nonlocal last_s, left
        if step is not None:
            left -= sum(bool(output.finish_reason) for output in step.outputs)
            if streams[0] in step.token_handles:
                now_s = time.perf_counter()
                found.append(1e3 * (now_s - last_s))
                last_s = now_s
        return len(found) >= count and left == 0

    bench.run(is_over)
    bench.abort_all()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiktoken", type=Path, required=True, help="qwen.tiktoken, from the wheel of dashscope")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="measured in a turn")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results" / "structured-output")
    arguments = parser.parse_args()
    flags = ["--tiktoken", arguments.tiktoken.name, "--turns", str(arguments.turns), "--steps", str(arguments.steps)]
    found = facts(make_command("bench-guided", flags), "shared", ("trunkline", "llguidance"))
    ranks = read_ranks(arguments.tiktoken)
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        bench = Bench(tokenizer, ranks, write_tokenizer(ranks, tokenizer))
        try:
            text = measured(bench, arguments.turns, arguments.steps, draw)
        finally:
            bench.close()
    text = "# What grammars cost a step\n\n" + listed(found) + text
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"guided-cost-{found['date']}.md").write_text(text)
    print(text)


def measured(bench: Bench, turns: int, count: int, draw: random.Random) -> str:
    """The lines of the report."""
    times: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(turns):
        for guided in times:
            times[guided].append(step_times(bench, count, guided=guided, draw=draw))
    device = bench.device
    forced, late = device.num_forced / device.num_guided, device.num_late / device.num_masked
    beside: dict[bool, list[list[float]]] = {False: [], True: []}
    plain: dict[bool, list[list[float]]] = {False: [], True: beside[True]}
    for turn in range(turns):
        some = gaps(bench, draw, first_schema=1000 + turn * SCHEMAS)
        beside[True].append(some)
        beside[False].append(gaps(bench, draw, count=len(some)))
        plain[False].append(gaps(bench, draw, plain=SCHEMAS, count=len(some)))
    lines = [
        f"- {VOCAB:,} tokens in the vocabulary, {1e3 * STEP_S:.0f} ms of simulated device time a step; medians of "
        f"{turns} turns\n",
        "| | without | with | ratio |",
        "|---|---|---|---|",
        row(f"time of a step of {SEQUENCES} sequences, mean, ms", times, statistics.fmean),
        row("the same, p50, ms", times, statistics.median),
        row("the same, p99, ms", times, lambda values: percentile(values, 0.99)),
        row(f"ITL of {STREAMS} streams beside {SCHEMAS} new schemas, p50, ms", beside, statistics.median),
        row("the same, p99, ms", beside, lambda values: percentile(values, 0.99)),
        row("the same, p99, against as many plain requests, ms", plain, lambda values: percentile(values, 0.99)),
        "",
        f"Of the guided tokens {forced:.0%} were forced: they came in runs, without a step each. {late:.2%} of the "
        "masks were late, and their rows sat out a step.",
    ]
    return "\n".join(lines) + "\n"


def row(name: str, found: dict[bool, list[list[float]]], of: Callable[[list[float]], float]) -> str:
    """The medians of all turns, and of the ratios of a turn."""
    without, having = ([of(turn) for turn in found[guided]] for guided in (False, True))
    ratio = statistics.median(b / a for a, b in zip(without, having, strict=True))
    return f"| {name} | {statistics.median(without):.2f} | {statistics.median(having):.2f} | {ratio:.3f} |"


if __name__ == "__main__":
    main()
