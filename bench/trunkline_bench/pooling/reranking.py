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
HEAD = ("prompt tokens", "from the prefix cache", "share", "seconds")


@dataclass(frozen=True, slots=True)
class Ranking:
    """What one call cost."""

    tokens: int
    cached: int
    seconds: float

    @property
    def cells(self) -> list[str]:
        return [f"{self.tokens:,}", f"{self.cached:,}", f"{self.cached / self.tokens:.0%}", f"{self.seconds:.2f}"]


def rankings(model: Path, threads: int, flags: tuple[str, ...] = ()) -> list[Ranking]:
    """Ranks other documents for each of QUERIES; the first call finds an empty cache."""
    documents, found = Documents(tokenizer_of(model)), []
    with (
        tempfile.TemporaryDirectory() as logs,
        served(model, threads, Path(logs), ("--task=score", *flags)) as (url, _),
    ):
        for seed, query in enumerate(QUERIES):
            texts = documents.draw(lengths(NUM_DOCUMENTS), seed)
            body = {"model": NAME, "query": query, "documents": texts, "truncate_prompt_tokens": -1}
            request = urllib.request.Request(
                f"{url}/v1/rerank", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            started_s = time.perf_counter()
            with urllib.request.urlopen(request, timeout=600.0) as answer:
                usage = json.load(answer)["usage"]
            seconds = time.perf_counter() - started_s
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            found.append(Ranking(usage["prompt_tokens"], cached, seconds))
            print(f"  {flags or 'default blocks'}, query {seed}: {found[-1]}", flush=True)
    return found


def median(found: list[Ranking]) -> Ranking:
    """The ranking of the median time."""
    seconds = statistics.median_low(one.seconds for one in found)
    return next(one for one in found if one.seconds == seconds)


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
        first, *later = rankings(model, arguments.threads)
        _, *unshared = rankings(model, arguments.threads, (f"--block-size={UNSHARED_BLOCK}",))
    cells = {
        "blocks of 16 tokens, first call after the start": first.cells,
        f"blocks of 16 tokens, {len(later)} calls after it": median(later).cells,
        f"blocks of {UNSHARED_BLOCK} tokens, {len(unshared)} calls likewise": median(unshared).cells,
    }
    tokens = lengths(NUM_DOCUMENTS)
    text = (
        f"# Reranking {NUM_DOCUMENTS} documents for one query: what the prefix cache saves\n\n{listed(found)}"
        "- model: a random Qwen3 of 6 layers, hidden size 384, float32, with --task score and the template of "
        "Qwen3-Reranker, whose prompt has the query before the document\n"
        f"- documents of {min(tokens)} to {max(tokens):,} tokens (Pareto, median {statistics.median(tokens):.0f}), cut "
        "to the context of 4,096; each call is one request to /v1/rerank, with another query and other documents\n"
        "- tokens and tokens from the cache are those of the answer's `usage`; of several calls the one of the median "
        "time is shown\n\n" + table(cells, HEAD)
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"reranking-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
