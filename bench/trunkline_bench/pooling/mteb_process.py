"""mteb, in a Python of its own. It imports nothing of this project, which that Python does not have.

usage: python mteb_process.py MODEL URL NAME TEXTS

It runs two tasks, made of the Markdown files in the folder TEXTS, on the model in the folder MODEL with
sentence-transformers, and on the model NAME of the server at URL through mteb's own wrapper. It prints
{"versions": text, "scores": {task: {metric: {"sentence-transformers": number, "server": number}}}}.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import OpenAIAPIEncodeWrapper
from sentence_transformers import SentenceTransformer

TEXTS = Path(sys.argv[4])
NEAR = 5  # sections: pairs of sections that are as far apart, or further, have the score 0
METRICS = ("ndcg_at_10", "map_at_10", "recall_at_10", "cosine_spearman", "cosine_pearson", "euclidean_spearman")


def sections() -> list[tuple[str, str]]:
    """Headings, and the first paragraphs below them."""
    found = []
    for path in sorted(TEXTS.glob("*.md")):
        for part in path.read_text().split("\n## ")[1:]:
            heading, _, text = part.partition("\n")
            paragraph, _, _ = text.strip().partition("\n\n")
            if paragraph:
                found.append((f"{path.stem}: {heading}", paragraph))
    return found


def metadata(kind: str, name: str, main_score: str) -> TaskMetadata:
    return TaskMetadata(
        type=kind, name=name, main_score=main_score, description="made of documentation",
        dataset={"path": "none", "revision": "none"}, category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"],
        date=("2026-01-01", "2026-01-01"), domains=[], task_subtypes=[], license="apache-2.0", dialect=[],
        annotations_creators="derived", modalities=["text"], sample_creation="found", bibtex_citation="",
        reference="https://github.com/embeddings-benchmark/mteb",
    )  # fmt: skip


class SectionOfHeading(AbsTaskRetrieval):  # type: ignore[misc]
    """Finds the text that stands below a heading."""

    metadata = metadata("Retrieval", "SectionOfHeading", "ndcg_at_10")

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        found = sections()
        queries = [{"id": f"q{index}", "text": heading} for index, (heading, _) in enumerate(found)]
        texts = [{"id": f"d{index}", "text": text, "title": ""} for index, (_, text) in enumerate(found)]
        relevant = {f"q{index}": {f"d{index}": 1} for index in range(len(found))}
        split = RetrievalSplitData(
            queries=Dataset.from_list(queries), corpus=Dataset.from_list(texts), relevant_docs=relevant, top_ranked=None
        )
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class NearbySections(AbsTaskSTS):  # type: ignore[misc]
    """Two sections are the more alike the nearer they stand."""

    metadata = metadata("STS", "NearbySections", "cosine_spearman")
    min_score, max_score = 0, NEAR

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        texts = [text for _, text in sections()]
        pairs = [
            (texts[first], texts[(first + apart) % len(texts)], max(0, NEAR - apart))
            for first in range(len(texts))
            for apart in (1, 4, 40)
        ]
        columns = dict(zip(("sentence1", "sentence2", "score"), map(list, zip(*pairs, strict=True)), strict=True))
        self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
        self.data_loaded = True


def scores_of(model: Any) -> dict[str, dict[str, float]]:
    """Scores by task and metric."""
    result = mteb.evaluate(model, [SectionOfHeading(), NearbySections()], cache=None, show_progress_bar=False)
    found = {}
    for task in result.task_results:
        (scores,) = task.scores["test"]
        found[task.task_name] = {name: scores[name] for name in METRICS if name in scores}
    return found


def main() -> None:
    _, model, url, name, _ = sys.argv
    theirs = scores_of(SentenceTransformer(model, device="cpu"))
    ours = scores_of(OpenAIAPIEncodeWrapper(url, name, modalities=["text"], use_chat_template=False))
    scores = {
        task: {
            metric: {"sentence-transformers": value, "server": ours[task][metric]} for metric, value in found.items()
        }
        for task, found in theirs.items()
    }
    packages = ("mteb", "sentence-transformers", "torch")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    print(json.dumps({"versions": versions, "scores": scores}))


if __name__ == "__main__":
    main()
