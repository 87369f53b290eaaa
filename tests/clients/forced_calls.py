"""Calls that are forced through a router and a worker, for the tools of bfcl-eval.

python -m tests.clients.forced_calls > bench/results/structured-output/forced-calls-served-DATE.md
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chat_model import CHAT_MODEL
from tests.clients.edge import Edge, running_edge
from tests.clients.weather_tools import ASKED
from tests.playing.families import FAMILIES, TEMPLATES
from tests.worker.grammar.call_measure import invalid_calls, tool_lists
from trunkline import Client
from trunkline.v1.inference_pb2 import Tool

MAX_TOKENS = 400
AT_ONCE = 16
HEAD = """# Forced calls through a router and a worker

`python -m tests.clients.forced_calls`. {lists:,} different lists of tools (bfcl-eval 2026.3.23), each asked for once
with `tool_choice`, half of them with a tool that is named, {at_once} at once, temperature 1, at most {most} tokens. A
quotation mark has a bias of 5, so that strings end. The arguments of calls are validated by jsonschema-rs against the
schema of the tool as it was sent. Calls that the limit of tokens cut off are not validated.

| model | format | lists | calls | invalid | cut off |
|---|---|---:|---:|---:|---:|"""


@contextmanager
def random_weights(answer_format: str, directory: Path) -> Iterator[Edge]:
    """A router before a worker with random weights. Its template knows no reasoning, which would not end."""
    model = FAMILIES[answer_format].write(directory / answer_format, {})
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("</think>", "").replace("[/THINK]", ""))
    with running_edge(model) as running:
        yield running


@contextmanager
def chat_model(directory: Path) -> Iterator[Edge]:
    """A router before a worker with SmolLM2-135M-Instruct. Its own template knows no tools."""
    template = directory / "chat_template.jinja"
    template.write_text((TEMPLATES / "hermes.jinja").read_text().replace("</think>", ""))
    with running_edge(CHAT_MODEL, f"--chat-template={template}", "--dtype=bfloat16") as running:
        yield running


async def forced_calls(address: str, lists: Sequence[Sequence[Tool]]) -> tuple[Counter[str], list[str]]:
    """Forces a call of each list of tools. Returns how many answers there are of each kind, and the faults of calls."""
    counts, wrong = Counter[str](), list[str]()
    places = asyncio.Semaphore(AT_ONCE)
    async with Client(address) as client:
        [quote] = await client.tokenize('"', special_tokens=False)

        async def force(index: int, tools: Sequence[Tool]) -> None:
            called = tools[-1].name if index % 2 else ""
            choice: Any = {"type": "function", "function": {"name": called}} if called else "required"
            asked: dict[str, Any] = {"max_tokens": MAX_TOKENS, "seed": index, "logit_bias": {quote: 5.0}}
            async with places:
                done = await client.complete(ASKED, tools=tools, tool_choice=choice, **asked)
            [answer] = done.choices
            calls = [(call.name, call.arguments) for call in answer.tool_calls]
            was_cut = answer.finish_reason == "length"
            faults = [*invalid_calls(tools, calls, called)] if calls or was_cut else ["no call"]
            faults += [f"text: {answer.text}"] if answer.text else []
            counts["calls"] += len(calls)
            counts["cut off"] += was_cut
            counts["invalid"] += len(faults)
            wrong.extend(faults)

        await asyncio.gather(*(force(index, tools) for index, tools in enumerate(lists)))
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lists", type=int, help="of tools, evenly chosen; all if left out")
    number = parser.parse_args().lists
    lists = tool_lists()[:: len(tool_lists()) // number if number else 1]
    print(HEAD.format(lists=len(lists), most=MAX_TOKENS, at_once=AT_ONCE), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        served = [("random weights", name, random_weights(name, at)) for name in ("hermes", "mistral")]
        for name, answer_format, running in [*served, ("SmolLM2-135M-Instruct (Q4_1)", "hermes", chat_model(at))]:
            with running as edge:
                counts, wrong = asyncio.run(forced_calls(edge.cluster.address, lists))
            cells = [len(lists), *(counts[kind] for kind in ("calls", "invalid", "cut off"))]
            print(f"| {name} | `{answer_format}` | {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)
            for fault in wrong[:20]:
                print(fault, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
