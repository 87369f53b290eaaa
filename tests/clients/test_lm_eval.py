"""lm-eval scores a task through /v1/completions: its log-likelihoods are those that transformers computes."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.clients.edge import Edge, running_edge

CLOSE = 1e-3

# A beginning, and two ends of it to choose from.
TALES = [
    ("Once upon a time, there was a little", (" girl named Lily.", " boat that ran sums.")),
    ("Tom had a big red", (" ball. He liked to play with it.", " never. It so the and.")),
    ("The dog and the cat were very good", (" friends.", " raining!")),
    ("Lily was sad because", (" she lost her toy.", " blue eat the sky of.")),
    ("One day, a bird saw a big tree. The", (" bird was happy.", " under said three went.")),
    ('"I am sorry," said Tim. His mom gave him a', (" hug.", " of and the to.")),
]


@pytest.fixture(scope="module")
def stories(shared: Path) -> Path:
    return shared / "models" / "stories260k"


@pytest.fixture(scope="module")
def stories_edge(stories: Path) -> Iterator[Edge]:
    with running_edge(stories) as running:
        yield running


def write_task(folder: Path) -> None:
    lines = [json.dumps({"begin": begin, "ends": ends}) for begin, ends in TALES]
    (folder / "tales.jsonl").write_text("\n".join(lines) + "\n")
    task = {
        "task": "tales",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "tales.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tales.yaml").write_text(json.dumps(task))


def log_likelihood(model: torch.nn.Module, begin: Sequence[int], end: Sequence[int]) -> tuple[float, bool]:
    """Sum over the end's tokens, and whether greedy sampling would have written them."""
    ids = [*begin, *end]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)  # [num_tokens, vocab]
    rows = logprobs[len(begin) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(end)[:, None])[:, 0]
    return float(chosen.sum()), bool((rows.argmax(-1) == torch.tensor(end)).all())


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_log_likelihoods_equal_those_of_transformers(
    stories_edge: Edge, stories: Path, clients_python: Path, tmp_path: Path, batch: int
) -> None:
    write_task(tmp_path)
    arguments = {
        "model": stories_edge.model,
        "base_url": f"{stories_edge.url}/completions",
        "tokenizer": str(stories),
        "max_length": stories_edge.context_length,
        "num_concurrent": batch,
        "max_retries": 1,
    }
    done = subprocess.run(
        [
            clients_python.with_name("lm_eval"),
            "run",
            "--model=local-completions",
            "--model_args=" + ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--tasks=tales",
            f"--include_path={tmp_path}",
            f"--batch_size={batch}",
            f"--output_path={tmp_path / 'report'}",
            "--log_samples",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [samples] = (tmp_path / "report").rglob("samples_tales_*.jsonl")
    scored = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(scored) == len(TALES)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stories)
    reference = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    for sample in scored:
        begin, ends = TALES[sample["doc_id"]]
        begin_ids = tokenizer(begin, add_special_tokens=False).input_ids
        for end, [[given, greedy]] in zip(ends, sample["resps"], strict=True):
            whole = tokenizer(begin + end, add_special_tokens=False).input_ids
            expected, by_greedy = log_likelihood(reference, begin_ids, whole[len(begin_ids) :])
            assert float(given) == pytest.approx(expected, abs=CLOSE), (begin, end)
            assert str(greedy) == str(by_greedy), (begin, end)
