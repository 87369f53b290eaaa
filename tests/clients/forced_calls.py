"""Calls that are forced through a router and a worker, for the tools of bfcl-eval.

python -m tests.clients.forced_calls > bench/results/structured-output/forced-calls-served-DATE.md
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.chat_model import CHAT_MODEL
from tests.clients.edge import Edge, running_edge
from tests.clients.weather_tools import ASKED
from tests.playing.families import FAMILIES, TEMPLATES
from tests.worker.grammar.call_measure import invalid_calls, tool_lists
from trunkline import Client
from trunkline.v1.inference_pb2 import Tool
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts

MAX_TOKENS = 400
CONTEXT_LENGTH = 16_384  # of random weights, whose tokenizer makes 13,588 tokens of the longest list
AT_ONCE = 16
MARK = "<tool_call>"  # of hermes. It is five tokens of SmolLM2, so a limit may cut it off, and what is left is text
HEAD = """# Forced calls through a router and a worker

{facts}
Different lists of tools (bfcl-eval 2026.3.23) are each asked for once with `tool_choice`, half of them with a tool
that is named, {at_once} at once, temperature 1, at most {most} tokens. A quotation mark has a bias of 5, so that
strings end. The arguments of calls are validated by jsonschema-rs against the schema of the tool as it was sent. A call
that the limit of tokens cut off is not counted.

| model | format | lists | calls | invalid | answers cut off |
|---|---|---:|---:|---:|---:|"""


@contextmanager
def random_weights(answer_format: str, directory: Path) -> Iterator[Edge]:
    """A router before a worker with random weights. Its template knows no reasoning, which would not end."""
    model = FAMILIES[answer_format].write(directory / answer_format, {}, context_length=CONTEXT_LENGTH)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("</think>", "").replace("[/THINK]", ""))
    with running_edge(model, f"--kv-blocks={CONTEXT_LENGTH // 8}") as running:
        yield running


@contextmanager
def chat_model(directory: Path, *, tells_names_alone: bool = False) -> Iterator[Edge]:
    """A router before a worker with SmolLM2-135M-Instruct. Its own template knows no tools.

    tells_names_alone: the prompt has the names of tools without their schemas, and is a tenth as long
    """
    template = directory / "chat_template.jinja"
    text = (TEMPLATES / "hermes.jinja").read_text().replace("</think>", "")
    template.write_text(text.replace("tool | tojson", "tool.function.name") if tells_names_alone else text)
    with running_edge(CHAT_MODEL, f"--chat-template={template}", "--dtype=bfloat16") as running:
        yield running


# What the report calls a model, its answer format, and what serves it.
MODELS: dict[str, tuple[str, str, Callable[[Path], AbstractContextManager[Edge]]]] = {
    "hermes": ("random weights", "hermes", partial(random_weights, "hermes")),
    "mistral": ("random weights", "mistral", partial(random_weights, "mistral")),
    "smollm2": ("SmolLM2-135M-Instruct (Q4_1)", "hermes", chat_model),
    "smollm2-names": (
        "SmolLM2-135M-Instruct (Q4_1), told the names of tools alone",
        "hermes",
        partial(chat_model, tells_names_alone=True),
    ),
}


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
            is_text_right = MARK.startswith(answer.text) if was_cut else not answer.text
            faults += [] if is_text_right else [f"text, {answer.finish_reason}: {answer.text}"]
            counts["calls"] += len(calls)
            counts["cut off"] += was_cut
            counts["invalid"] += len(faults)
            wrong.extend(faults)

        await asyncio.gather(*(force(index, tools) for index, tools in enumerate(lists)))
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all if left out")
    parser.add_argument("--lists", type=int, help="of tools, evenly chosen; all if left out")
    parser.add_argument("--part", default="1/1", help="of these lists, such as 2/10, to run them in several turns")
    given = parser.parse_args()
    part, num_parts = map(int, given.part.split("/"))
    lists = tool_lists()[:: len(tool_lists()) // given.lists if given.lists else 1][part - 1 :: num_parts]
    command = shlex.join(["python", "-m", "tests.clients.forced_calls", *sys.argv[1:]])
    found = facts(command, "shared by client, router and worker", ("trunkline", "torch", "llguidance"))
    print(HEAD.format(facts=listed(found), most=MAX_TOKENS, at_once=AT_ONCE), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        for name, answer_format, running in (MODELS[each] for each in given.models or MODELS):
            with running(at) as edge:
                counts, wrong = asyncio.run(forced_calls(edge.cluster.address, lists))
            cells = [len(lists), *(counts[kind] for kind in ("calls", "invalid", "cut off"))]
            print(f"| {name} | `{answer_format}` | {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)
            for fault in wrong[:20]:
                print(fault, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
