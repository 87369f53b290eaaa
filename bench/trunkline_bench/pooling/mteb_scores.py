"""`make bench-pooling-mteb PEERS=DIR`: scores of mteb with our router and worker, and with sentence-transformers.

DIR/mteb is a virtual environment with mteb and sentence-transformers. mteb's wrapper for servers of vectors calls our
/v1/embeddings. Both sides have all-MiniLM-L6-v2, and tasks that mteb_process.py makes of this project's documentation.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from trunkline_bench.pooling.documents import TEXTS
from trunkline_bench.pooling.sides import NAME, served
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command

REPOSITORY = Path(__file__).parents[3]
MTEB_PROCESS = Path(__file__).parent / "mteb_process.py"
MOST_DIFFERENCE = 1e-4  # of a score: vectors differ by 1e-7, which may change the order of two that are equally near

Scores = dict[str, dict[str, dict[str, float]]]  # by task, metric and side


def report(found: dict[str, str], scores: Scores) -> str:
    rows = {
        f"{task}, {metric}": [f"{sides['server']:.6f}", f"{sides['sentence-transformers']:.6f}"]
        for task, metrics in scores.items()
        for metric, sides in metrics.items()
    }
    return (
        f"# Scores of mteb: our router and worker, and sentence-transformers\n\n{listed(found)}"
        "- model: all-MiniLM-L6-v2, float32\n"
        "- ours: through `OpenAIAPIEncodeWrapper` of mteb, as it comes, and `/v1/embeddings`\n"
        "- tasks: SectionOfHeading finds the section of the documentation below a heading; NearbySections compares the "
        "cosine of two sections with how near they stand\n"
        f"- largest difference: {difference(scores):.1e}\n\n" + table(rows, ("ours", "sentence-transformers"), "task")
    )


def difference(scores: Scores) -> float:
    """Returns the largest difference between the scores of both sides."""
    pairs = [sides for metrics in scores.values() for sides in metrics.values()]
    return max(abs(sides["server"] - sides["sentence-transformers"]) for sides in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with mteb/bin/python")
    parser.add_argument("--minilm", type=Path, required=True, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    python = arguments.peers.absolute() / "mteb/bin/python"
    for needed in (python, arguments.minilm):
        if not needed.exists():
            raise SystemExit(f"bench-pooling-mteb: {needed} does not exist")
    with (
        tempfile.TemporaryDirectory() as scratch,
        served(arguments.minilm, arguments.threads, Path(scratch)) as (url, _),
    ):
        command = [str(python), str(MTEB_PROCESS), str(arguments.minilm), url, NAME, str(TEXTS)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    scores: Scores = told["scores"]
    found = facts(make_command("bench-pooling-mteb", []), "no GPU", ("trunkline", "torch"))
    found["versions"] = f"theirs: {told['versions']}; ours: {found['versions']}"
    text = report(found, scores)
    print(text)
    if difference(scores) > MOST_DIFFERENCE:
        raise SystemExit(f"bench-pooling-mteb: scores differ by {difference(scores):.1e}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"pooling-mteb-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
