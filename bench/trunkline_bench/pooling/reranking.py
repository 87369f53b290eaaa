"""`make bench-reranking`: how many tokens the prefix cache saves when documents are ranked for one query.

A random Qwen3 ranks documents of heavy-tailed lengths over HTTP, in the template of Qwen3-Reranker, which puts the
query before the document. It does so with the default blocks of 16 tokens, and with blocks that template and query do
not fill, so that documents share none.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from trunkline_bench.engine.against_smg import REPOSITORY
from trunkline_bench.pooling.checkpoints import tokenizer_of, write_reranker
from trunkline_bench.pooling.documents import Documents, lengths
from trunkline_bench.pooling.sides import NAME, served
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command

NUM_DOCUMENTS = 100
QUERIES = (
    "How does a worker decide which of the waiting requests joins the next step, and what does it cost the others?",
    "What happens to the streams of a worker that is killed, and from where does another one continue them?",
    "Which settings bound the memory of the prefix cache, and how does a router learn what a worker has stored?",
    "Where are the limits of a tenant kept while Redis does not answer, and what enforces them then?",
)
UNSHARED_BLOCK = 256  # tokens: more than template and query have
HEAD = (
    "prompt tokens",
    "from the prefix cache",
    "share",
    f"with blocks of {UNSHARED_BLOCK} tokens",
    "seconds",
    f"seconds with blocks of {UNSHARED_BLOCK}",
    "ratio",
)


@dataclass(frozen=True, slots=True)
class Ranking:
    """What one call cost."""

    tokens: int
    cached: int
    seconds: float


Pair = tuple[Ranking, Ranking]  # of the same query and documents: with blocks of 16 tokens, with UNSHARED_BLOCK


def rank(url: str, query: str, texts: list[str]) -> Ranking:
    """Ranks texts with one request."""
    body = {"model": NAME, "query": query, "documents": texts, "truncate_prompt_tokens": -1}
    request = urllib.request.Request(
        f"{url}/v1/rerank", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600.0) as answer:
        usage = json.load(answer)["usage"]
    seconds = time.perf_counter() - started_s
    return Ranking(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], seconds)


def measure(model: Path, threads: int) -> list[Pair]:
    """Ranks other documents for each of QUERIES with both sizes of blocks in turns."""
    documents, pairs = Documents(tokenizer_of(model)), []
    with ExitStack() as stack:
        urls = []
        for flags in ((), (f"--block-size={UNSHARED_BLOCK}",)):
            logs = stack.enter_context(tempfile.TemporaryDirectory())
            server = served(model, threads, Path(logs), ("--task=score", *flags))
            urls.append(stack.enter_context(server)[0])
        for seed, query in enumerate(QUERIES):
            texts = documents.draw(lengths(NUM_DOCUMENTS), seed)
            shared, unshared = (rank(url, query, texts) for url in urls)
            pairs.append((shared, unshared))
            print(f"  query {seed}: {shared}, {unshared}", flush=True)
    return pairs


def rows(pairs: list[Pair]) -> dict[str, list[str]]:
    """A row for each query, and the median ratio of the later ones: the first finds workers that have just started."""
    found, ratios = {}, [unshared.seconds / shared.seconds for shared, unshared in pairs]
    for number, ((shared, unshared), ratio) in enumerate(zip(pairs, ratios, strict=True), start=1):
        cached = [f"{shared.cached:,}", f"{shared.cached / shared.tokens:.0%}", f"{unshared.cached:,}"]
        seconds = [f"{shared.seconds:.2f}", f"{unshared.seconds:.2f}", f"{ratio:.2f}"]
        found[str(number)] = [f"{shared.tokens:,}", *cached, *seconds]
    found["median of the later ones"] = ["", "", "", "", "", "", f"{statistics.median(ratios[1:]):.2f}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minilm", type=Path, required=True, help="directory of all-MiniLM-L6-v2, for its tokenizer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    flags = ["--threads", str(arguments.threads)]
    found = facts(make_command("bench-reranking", flags), "no GPU", ("trunkline", "torch"))
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "reranker"
        write_reranker(model, tokenizer_of(arguments.minilm))
        cells = rows(measure(model, arguments.threads))
    tokens = lengths(NUM_DOCUMENTS)
    text = (
        f"# Reranking {NUM_DOCUMENTS} documents for one query: what the prefix cache saves\n\n{listed(found)}"
        "- model: a random Qwen3 of 6 layers, hidden size 384, float32, with --task score and the template of "
        "Qwen3-Reranker, whose prompt has the query before the document\n"
        f"- documents of {min(tokens)} to {max(tokens):,} tokens (Pareto, median {statistics.median(tokens):.0f}), cut "
        "to the context of 4,096; each call is one request to /v1/rerank, with another query and other documents\n"
        f"- two workers, which take turns: one with blocks of 16 tokens, one with blocks of {UNSHARED_BLOCK}, which no "
        "two documents share; the ratio is that of their times for the same query and documents\n"
        "- tokens and tokens from the cache are those of the answer's `usage`\n\n" + table(cells, HEAD, "query")
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"reranking-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
