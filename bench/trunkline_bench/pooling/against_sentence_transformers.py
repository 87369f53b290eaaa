"""`make bench-pooling PEERS=DIR`: our router and worker over HTTP against sentence-transformers, with the same models.

DIR/sentence-transformers is a virtual environment with sentence-transformers. Both sides embed the same documents of
heavy-tailed lengths in turns: ours in one request to /v1/embeddings, theirs in batches of 32 that peer_process.py makes
in three ways. Both run throughout, and are loaded once before. While one is loaded, the other is idle.
Last, our side ranks documents for one query, and tells how many of their tokens came from the prefix cache.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import numpy as np

from trunkline_bench.pooling.checkpoints import tokenizer_of, write_embedder, write_reranker
from trunkline_bench.pooling.documents import SHORTEST, Documents, lengths
from trunkline_bench.pooling.sides import NAME, Run, peer, served
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command

REPOSITORY = Path(__file__).parents[3]
NUM_DOCUMENTS = 512
# What the report calls the batchings of peer_process.py, and the goal for our rate relative to theirs.
BATCHINGS = {"given": "in the order given", "default": "`encode()` of all", "sorted": "sorted by tokens"}
GOALS = {"given": "2.5", "default": "—", "sorted": "1.2"}
OURS = "ours"
MODELS = {
    "minilm": "all-MiniLM-L6-v2, which takes 256 tokens",
    "qwen3": "a random Qwen3 of 6 layers, hidden size 384, vectors of the last token",
}
WARM_UP_DOCUMENTS, RANKED_DOCUMENTS = 64, 100
QUERY = "How does a worker decide which of the waiting requests joins the next step, and what does it cost the others?"
MOST_DIFFERENCE = 1e-4  # between components of both sides' vectors
ASKED = (
    "import sentence_transformers as s, torch as t; "
    "print(f'sentence-transformers {s.__version__}, torch {t.__version__}')"
)
HEAD = ("ours, documents/s", "theirs, documents/s", "ratio", "goal", "padding: ours, theirs")

Runs = dict[str, list[Run]]  # by side: OURS and those of BATCHINGS


def measure(python: Path, model: Path, threads: int, repeats: int, batchings: list[str]) -> Runs:
    """Loads all sides in turns, whose order changes with each repetition."""
    runs: Runs = defaultdict(list)
    documents, wanted = Documents(tokenizer_of(model)), lengths(NUM_DOCUMENTS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (
            served(model, threads, folder) as (_, ours),
            peer(python, model, threads, folder, batchings) as theirs,
        ):
            few = documents.draw(sorted(wanted)[-2 * WARM_UP_DOCUMENTS : -WARM_UP_DOCUMENTS], seed=0)
            ours(few)  # our scheduler learns what steps cost, and does not count
            theirs[batchings[0]](few)  # of middling lengths: a batch that is padded to the longest takes a minute
            sides = [(OURS, ours), *theirs.items()]
            for turn in range(1, repeats + 1):
                texts = documents.draw(wanted, seed=turn)
                for name, side in sides:
                    runs[name].append(side(texts))
                    print(
                        f"  {model.parent.name}/{model.name}, turn {turn}, {name}: {runs[name][-1].seconds:.1f} s",
                        flush=True,
                    )
                sides.reverse()
    return runs


def difference(runs: Runs) -> float:
    """Returns the largest difference between components of our vectors and of theirs."""
    pairs = [pair for side in runs.values() for pair in zip(runs[OURS], side, strict=True)]
    return max(float(np.abs(mine.vectors - other.vectors).max()) for mine, other in pairs)


def rows(name: str, runs: Runs) -> dict[str, list[str]]:
    """Medians; the ratio is that of each repetition, so that noise that both had in common does not count."""
    found = {}
    for batching in (side for side in runs if side != OURS):
        mine, other = ([run.seconds for run in runs[side]] for side in (OURS, batching))
        ratio = statistics.median(theirs / ours for ours, theirs in zip(mine, other, strict=True))
        padding = ", ".join(f"{max(run.padding for run in runs[side]):.0%}" for side in (OURS, batching))
        rates = (f"{NUM_DOCUMENTS / statistics.median(seconds):.1f}" for seconds in (mine, other))
        found[f"{name}, {BATCHINGS[batching]}"] = [*rates, f"{ratio:.2f}", GOALS[batching], padding]
    return found


def ranking(model: Path, threads: int) -> str:
    """Ranks documents for one query. Returns a sentence with the share of tokens that came from the prefix cache."""
    texts = Documents(tokenizer_of(model)).draw(lengths(RANKED_DOCUMENTS), seed=1)
    body = json.dumps({"model": NAME, "query": QUERY, "documents": texts, "truncate_prompt_tokens": -1}).encode()
    with (
        tempfile.TemporaryDirectory() as scratch,
        served(model, threads, Path(scratch), ("--task=score",)) as (url, _),
    ):
        request = urllib.request.Request(f"{url}/v1/rerank", body, {"content-type": "application/json"})
        started_s = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600.0) as answer:
            usage = json.load(answer)["usage"]
        seconds = time.perf_counter() - started_s
    tokens, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return (
        f"Reranking {RANKED_DOCUMENTS} documents for one query with the same Qwen3 in the template of Qwen3-Reranker: "
        f"{cached:,} of {tokens:,} tokens ({cached / tokens:.0%}) came from the prefix cache, in {seconds:.1f} s.\n"
    )


def report(found: dict[str, str], measured: dict[str, Runs], ranked: str, repeats: int) -> str:
    apart = ", ".join(f"{difference(runs):.0e} ({name})" for name, runs in measured.items())
    cells: dict[str, list[str]] = {}
    for name, runs in measured.items():
        cells |= rows(name, runs)
    tokens = lengths(NUM_DOCUMENTS)
    return (
        f"# Vectors over HTTP: our router and worker against sentence-transformers\n\n{listed(found)}"
        f"- models, float32: {'; '.join(f'{name}: {MODELS[name]}' for name in measured)}\n"
        f"- {NUM_DOCUMENTS} documents of {SHORTEST} to {max(tokens):,} tokens (Pareto, median "
        f"{statistics.median(tokens):.0f}), {sum(tokens):,} in all; both sides cut them to what the model takes\n"
        f"- medians of {repeats} repetitions in alternating order; both sides run throughout, and are loaded once "
        "before\n"
        "- ours: one request to /v1/embeddings with all documents\n"
        f"- theirs, padded batches of 32: {BATCHINGS['given']}: `encode()` of 32 documents after the other; "
        f"{BATCHINGS['default']}: one call, which sorts by characters; {BATCHINGS['sorted']}: as the first, after "
        "sorting all documents by tokens\n"
        f"- largest difference between components of both sides' vectors: {apart}\n\n"
        + table(cells, HEAD, "model, batches of sentence-transformers")
        + ranked
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with sentence-transformers/bin/python")
    parser.add_argument("--minilm", type=Path, required=True, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batchings", nargs="+", choices=BATCHINGS, default=list(BATCHINGS))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    python = arguments.peers.absolute() / "sentence-transformers/bin/python"
    for needed in (python, arguments.minilm):
        if not needed.exists():
            raise SystemExit(f"bench-pooling: {needed} does not exist")
    threads, repeats, batchings = arguments.threads, arguments.repeats, arguments.batchings
    theirs = subprocess.run([str(python), "-c", ASKED], capture_output=True, text=True, check=True).stdout.strip()
    flags = ["--repeats", str(repeats), "--threads", str(threads), "--models", *arguments.models]
    flags += ["--batchings", *batchings] if batchings != list(BATCHINGS) else []
    found = facts(make_command("bench-pooling", flags), "no GPU", ("trunkline", "torch"))
    found["versions"] = f"theirs: {theirs}; ours: {found['versions']}"
    measured: dict[str, Runs] = {}
    ranked = ""
    with tempfile.TemporaryDirectory() as scratch:
        if "minilm" in arguments.models:
            measured["minilm"] = measure(python, arguments.minilm, threads, repeats, batchings)
        if "qwen3" in arguments.models:
            reranker, embedder = Path(scratch) / "reranker", Path(scratch) / "qwen3"
            write_reranker(reranker, tokenizer_of(arguments.minilm))
            write_embedder(embedder, reranker)
            ranked = ranking(reranker, threads)
            measured["qwen3"] = measure(python, embedder, threads, repeats, batchings)
    for name, runs in measured.items():
        if difference(runs) > MOST_DIFFERENCE:
            raise SystemExit(f"bench-pooling: vectors of {name} differ by {difference(runs):.1e}")
    text = report(found, measured, ranked, repeats)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"pooling-{'-'.join(arguments.models)}-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
