"""`make bench-chats-beside`: the first tokens of chats while another pool of the same router embeds documents.

One router, one worker that generates and one that embeds, all on the same cores. Chats arrive at random times at a
fixed mean rate. In every other phase a process of its own sends documents to embed, all the time. Time to first token
counts from when a chat was due, so a late client hides nothing.
"""

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random

from openai import AsyncOpenAI, OpenAI

from trunkline_bench.engine.against_smg import REPOSITORY
from trunkline_bench.pooling.checkpoints import tokenizer_of
from trunkline_bench.pooling.documents import Documents, lengths
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.reports.statistics import percentile
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.servers.http_stack import Served, http_stacks, log_ends, wait_for_answer, wait_for_completion

CHAT, EMBED = "chat", "embed"
OBJECTIVE_MS = 500  # for 99 % of first tokens: deploy/observability/rules.yaml
ALONE, BESIDE = "chats alone", "beside documents"
OUTPUT_TOKENS, PROMPT_LINES = 32, 2
TEXT, SHORTEST_LINE = REPOSITORY / "docs" / "operations.md", 60  # characters
DOCUMENTS_AT_ONCE = 128  # of a request; one is under way all the time
SETTLE_S = 2.0  # between phases
HEAD = ("chats", "TTFT p50, ms", "TTFT p99, ms", "longest, ms", "documents/s")


class Phases:
    """What was measured in the phases of one kind."""

    def __init__(self) -> None:
        self.ttfts_ms = list[float]()
        self.documents, self.seconds = 0, 0.0

    @property
    def cells(self) -> list[str]:
        milliseconds = (percentile(self.ttfts_ms, share) for share in (0.5, 0.99, 1.0))
        return [
            f"{len(self.ttfts_ms):,}",
            *(f"{value:,.0f}" for value in milliseconds),
            f"{self.documents / self.seconds:.1f}",
        ]


def embed_documents(url: str, minilm: Path, done: "Synchronized[int]") -> None:
    """Sends documents until it is killed. done: counts those embedded"""
    documents, wanted = Documents(tokenizer_of(minilm)), lengths(DOCUMENTS_AT_ONCE)
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600.0, max_retries=0)
    for seed in range(1 << 30):
        texts = documents.draw(wanted, seed)
        client.embeddings.create(model=EMBED, input=texts, extra_body={"truncate_prompt_tokens": -1})
        with done:
            done.value += len(texts)


@contextmanager
def documents_beside(url: str, minilm: Path, done: "Synchronized[int]") -> Iterator[None]:
    """Embeds documents throughout; from the first that is done on."""
    before = done.value
    sender = get_context("spawn").Process(target=embed_documents, args=(url, minilm, done))
    sender.start()
    try:
        while done.value == before:
            if not sender.is_alive():
                raise SystemExit("bench-chats-beside: no documents were embedded")
            time.sleep(0.1)
        yield
        if not sender.is_alive():
            raise SystemExit("bench-chats-beside: documents were no longer embedded")
    finally:
        sender.kill()
        sender.join()


async def chats(url: str, rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Streams chats for so long. Returns the time to the first token of each, in ms."""
    draw = Random(seed)
    lines = [line for line in TEXT.read_text().splitlines() if len(line) > SHORTEST_LINE]

    async def ttft_ms(client: AsyncOpenAI, due_s: float, text: str) -> float:
        await asyncio.sleep(due_s - time.perf_counter())
        stream = await client.chat.completions.create(
            model=CHAT,
            messages=[{"role": "user", "content": text}],
            max_tokens=OUTPUT_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first_s = None
        async for chunk in stream:
            if first_s is None and chunk.choices and chunk.choices[0].delta.content:
                first_s = time.perf_counter()
        if first_s is None:
            raise SystemExit("bench-chats-beside: a chat has no text")
        return 1e3 * (first_s - due_s)

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600.0, max_retries=0) as client:
        due_s = first_due_s = time.perf_counter() + 1.0
        pending = []
        while due_s < first_due_s + seconds:
            text = " ".join(draw.sample(lines, PROMPT_LINES))
            pending.append(asyncio.create_task(ttft_ms(client, due_s, text)))
            due_s += draw.expovariate(rate_per_s)
        return await asyncio.gather(*pending)


def measure(arguments: argparse.Namespace, url: str) -> dict[str, Phases]:
    """Runs both kinds of phases in turns."""
    found: dict[str, Phases] = defaultdict(Phases)
    done: Synchronized[int] = get_context("spawn").Value("q", 0)

    def phase(kind: str, seed: int) -> None:
        begun_s, before = time.perf_counter(), done.value
        ttfts = asyncio.run(chats(url, arguments.rate, arguments.seconds, seed))
        phases = found[kind]
        phases.ttfts_ms += ttfts
        phases.documents += done.value - before
        phases.seconds += time.perf_counter() - begun_s
        print(f"  {kind}: {len(ttfts)} chats, TTFT p99 {percentile(ttfts, 0.99):.0f} ms", flush=True)

    for turn in range(arguments.repeats):
        phase(ALONE, 2 * turn)
        with documents_beside(url, arguments.minilm, done):
            phase(BESIDE, 2 * turn + 1)
        time.sleep(SETTLE_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minilm", type=Path, required=True, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--rate", type=float, default=4.0, help="chats per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase")
    parser.add_argument("--repeats", type=int, default=2, help="phases of each kind")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--embed-threads", type=int, help="of the worker that embeds, if it has others")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    embed_threads = arguments.embed_threads or arguments.threads
    flags = [f"--{name}={getattr(arguments, name)}" for name in ("rate", "seconds", "repeats", "threads")]
    flags += [f"--embed-threads={embed_threads}"] if embed_threads != arguments.threads else []
    machine = "shared by client, router and workers"
    found = facts(make_command("bench-chats-beside", flags), machine, ("trunkline", "torch"))
    models = {
        CHAT: Served(DEMO_MODEL, (f"--threads={arguments.threads}",)),
        EMBED: Served(arguments.minilm, (f"--threads={embed_threads}",)),
    }
    with tempfile.TemporaryDirectory() as scratch, http_stacks(models, Path(scratch)) as url:
        try:
            wait_for_completion(url, CHAT)
            wait_for_answer(f"{url}/v1/embeddings", {"model": EMBED, "input": "a"})
        except TimeoutError as error:
            raise SystemExit(f"bench-chats-beside: {error}\n{log_ends(Path(scratch))}") from error
        asyncio.run(chats(url, arguments.rate, 5.0, seed=-1))  # the scheduler learns what steps cost
        measured = measure(arguments, url)
    within = percentile(measured[BESIDE].ttfts_ms, 0.99) <= OBJECTIVE_MS
    text = (
        f"# Chats beside documents: two pools behind one router\n\n{listed(found)}"
        f"- generation: the demo model, {arguments.threads} thread(s); chats of {OUTPUT_TOKENS} tokens over HTTP, "
        f"{arguments.rate:g} a second at random times, in the lane standard\n"
        f"- embedding: all-MiniLM-L6-v2, float32, {embed_threads} thread(s); one request to /v1/embeddings with "
        f"{DOCUMENTS_AT_ONCE} documents under way all the time, lengths as in bench-pooling\n"
        f"- phases of {arguments.seconds:g} s in turns; the time to the first token counts from when the chat was "
        "due\n"
        f"- objective: 99 % of first tokens within {OBJECTIVE_MS} ms (`firstTokenSeconds` of the chart): "
        f"{'reached' if within else 'missed'}\n\n"
        + table({kind: measured[kind].cells for kind in (ALONE, BESIDE)}, HEAD)
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"chats-beside-documents-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
