"""`make bench-pooling PEERS=DIR`: our router and worker over HTTP against sentence-transformers, with the same models.

DIR/sentence-transformers is a virtual environment with sentence-transformers, and DIR/infinity, for `--against
infinity`, one with infinity-emb[server,torch]. All sides embed the same documents of heavy-tailed lengths in turns:
ours and infinity-emb in one request to /v1/embeddings, sentence-transformers in batches of 32 that peer_process.py
makes in three ways. All run throughout, and are loaded once before. While one is loaded, the others are idle.
"""

import argparse
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import starmap
from pathlib import Path

import numpy as np

from trunkline_bench.pooling.checkpoints import tokenizer_of, write_embedder, write_reranker
from trunkline_bench.pooling.documents import SHORTEST, Documents, lengths
from trunkline_bench.pooling.sides import Run, Side, infinity, peer, served
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command

REPOSITORY = Path(__file__).parents[3]
NUM_DOCUMENTS = 512
# What the report calls the batchings of peer_process.py.
BATCHINGS = {"given": "in the order given", "default": "`encode()` of all", "sorted": "sorted by tokens"}
OURS, INFINITY = "ours", "infinity"
OTHERS = BATCHINGS | {INFINITY: "infinity-emb over HTTP"}
INFINITY_NOTE = (
    "- infinity-emb: one request to /embeddings with all documents, which it batches by itself, 32 at a time (its "
    "defaults, with --engine=torch --dtype=float32)\n"
)
# Of our rate relative to theirs.
GOALS = {"default": "2.5", "sorted": "1.2"}
MODELS = {
    "minilm": "all-MiniLM-L6-v2, which takes 256 tokens",
    "qwen3": "a random Qwen3 of 6 layers, hidden size 384, vectors of the last token",
}
WARM_UP_DOCUMENTS = 64
MOST_DIFFERENCE = 1e-4  # between components of both sides' vectors
ASKED = (
    "from importlib.metadata import distributions as d; named = {e.name: e.version for e in d()}; "
    "print(', '.join(f'{n} {named[n]}' for n in ('sentence-transformers', 'infinity_emb', 'torch') if n in named))"
)
HEAD = ("ours, documents/s", "theirs, documents/s", "ratio", "goal", "padding: ours, theirs")

Runs = dict[str, list[Run]]  # by side: OURS and those of OTHERS


@contextmanager
def running(pythons: dict[str, Path], model: Path, threads: int, others: list[str]) -> Iterator[dict[str, Side]]:
    """Runs all sides, each with so many threads."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        sides = {OURS: stack.enter_context(served(model, threads, folder))[1]}
        batchings = [name for name in others if name != INFINITY]
        if batchings:
            theirs = peer(pythons["sentence-transformers"], model, threads, folder, batchings)
            sides |= stack.enter_context(theirs)
        if INFINITY in others:
            sides[INFINITY] = stack.enter_context(infinity(pythons[INFINITY], model, threads, folder))
        yield sides


def measure(
    pythons: dict[str, Path], model: Path, others: list[str], *, threads: int, repeats: int, num_documents: int
) -> Runs:
    """Loads all sides in turns, whose order changes with each repetition."""
    runs: Runs = defaultdict(list)
    documents, wanted = Documents(tokenizer_of(model)), lengths(num_documents)
    with running(pythons, model, threads, others) as found:
        sides = list(found.items())
        few = documents.draw(sorted(wanted)[-2 * WARM_UP_DOCUMENTS : -WARM_UP_DOCUMENTS], seed=0)
        for _, side in sides:  # of middling lengths: a batch that is padded to the longest takes a minute
            side(few)  # our scheduler learns what steps cost, and does not count
        for turn in range(1, repeats + 1):
            texts = documents.draw(wanted, seed=turn)
            for name, side in sides:
                runs[name].append(side(texts))
                seconds = runs[name][-1].seconds
                print(f"  {model.parent.name}/{model.name}, turn {turn}, {name}: {seconds:.1f} s", flush=True)
            sides.reverse()
    return runs


def difference(runs: Runs) -> float:
    """Returns the largest difference between components of our vectors and of theirs."""
    pairs = [pair for side in runs.values() for pair in zip(runs[OURS], side, strict=True)]
    return max(float(np.abs(mine.vectors - other.vectors).max()) for mine, other in pairs)


def rows(name: str, runs: Runs) -> dict[str, list[str]]:
    """Medians; the ratio is that of each repetition, so that noise that both had in common does not count."""
    found = {}
    for peer_name in (side for side in runs if side != OURS):
        mine, other = ([run.seconds for run in runs[side]] for side in (OURS, peer_name))
        ratio = statistics.median(theirs / ours for ours, theirs in zip(mine, other, strict=True))
        padding = ", ".join(padding_of(runs[side]) for side in (OURS, peer_name))
        rates = (f"{len(runs[OURS][0].vectors) / statistics.median(seconds):.1f}" for seconds in (mine, other))
        found[f"{name}, {OTHERS[peer_name]}"] = [*rates, f"{ratio:.2f}", GOALS.get(peer_name, "—"), padding]
    return found


def padding_of(runs: list[Run]) -> str:
    """The largest share of padding in runs of one side."""
    told = [run.padding for run in runs if run.padding is not None]
    return f"{max(told):.0%}" if told else "not reported"


def report(found: dict[str, str], measured: dict[str, Runs], num_documents: int, repeats: int) -> str:
    apart = ", ".join(f"{difference(runs):.0e} ({name})" for name, runs in measured.items())
    cells: dict[str, list[str]] = {}
    for name, runs in measured.items():
        cells |= rows(name, runs)
    tokens = lengths(num_documents)
    return (
        f"# Vectors over HTTP: our router and worker against sentence-transformers\n\n{listed(found)}"
        f"- models, float32: {'; '.join(f'{name}: {MODELS[name]}' for name in measured)}\n"
        f"- {num_documents} documents of {SHORTEST} to {max(tokens):,} tokens (Pareto, median "
        f"{statistics.median(tokens):.0f}), {sum(tokens):,} in all; all sides cut them to what the model takes\n"
        f"- repetitions in alternating order: {repeats} (medians); all sides run throughout, and are loaded once "
        "before\n"
        "- ours: one request to /v1/embeddings with all documents\n"
        f"- sentence-transformers, padded batches of 32: {BATCHINGS['given']}: `encode()` of 32 documents after the "
        f"other; {BATCHINGS['default']}: one call, which sorts by characters; {BATCHINGS['sorted']}: as the first, "
        "after sorting all documents by tokens\n"
        f"{INFINITY_NOTE if any(INFINITY in runs for runs in measured.values()) else ''}"
        f"- largest difference between components of our vectors and of theirs: {apart}\n\n"
        + table(cells, HEAD, "model, other side")
    )


def report_name(models: list[str], others: list[str], date: str) -> str:
    """Of the file. Reports of one day that compare other sides do not replace each other."""
    return f"{'-'.join(('pooling', *models, 'against', *others, date))}.md"


def versions_of(name: str, python: Path) -> str:
    """The packages that matter in a virtual environment."""
    asked = subprocess.run([str(python), "-c", ASKED], capture_output=True, text=True, check=True)
    return f"environment {name}: {asked.stdout.strip()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with sentence-transformers/bin/python")
    parser.add_argument("--minilm", type=Path, required=True, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, default=NUM_DOCUMENTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--against", nargs="+", choices=OTHERS, default=list(BATCHINGS))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    others, repeats, documents = arguments.against, arguments.repeats, arguments.documents
    needed = {INFINITY if name == INFINITY else "sentence-transformers" for name in others}
    pythons = {name: arguments.peers.absolute() / name / "bin" / "python" for name in sorted(needed)}
    for path in (*pythons.values(), arguments.minilm):
        if not path.exists():
            raise SystemExit(f"bench-pooling: {path} does not exist")
    flags = ["--repeats", str(repeats), "--threads", str(arguments.threads), "--models", *arguments.models]
    flags += ["--documents", str(documents)] if documents != NUM_DOCUMENTS else []
    flags += ["--against", *others] if others != list(BATCHINGS) else []
    found = facts(make_command("bench-pooling", flags), "no GPU", ("trunkline", "torch"))
    found["versions"] = f"ours: {found['versions']}; " + "; ".join(starmap(versions_of, pythons.items()))
    measured: dict[str, Runs] = {}
    run = partial(measure, pythons, others=others, threads=arguments.threads, repeats=repeats, num_documents=documents)
    with tempfile.TemporaryDirectory() as scratch:
        if "minilm" in arguments.models:
            measured["minilm"] = run(arguments.minilm)
        if "qwen3" in arguments.models:
            reranker, embedder = Path(scratch) / "reranker", Path(scratch) / "qwen3"
            write_reranker(reranker, tokenizer_of(arguments.minilm))
            write_embedder(embedder, reranker)
            measured["qwen3"] = run(embedder)
    for name, runs in measured.items():
        if difference(runs) > MOST_DIFFERENCE:
            raise SystemExit(f"bench-pooling: vectors of {name} differ by {difference(runs):.1e}")
    text = report(found, measured, documents, repeats)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / report_name(arguments.models, others, found["date"])).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
