"""sentence-transformers, in a Python of its own. It imports nothing of this project, which that Python does not have.

usage: python peer_process.py MODEL THREADS

It reads a JSON job a line: {"texts": [...], "batching": one of BATCHINGS, "vectors": file to write}. For each it prints
{"seconds", "tokens", "positions"}, where positions are tokens with padding.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

BATCH = 32  # encode()'s default
Vectors = NDArray[np.float32]  # [num_texts, components]


def in_order(model: Any, texts: list[str]) -> Vectors:
    """Batches in the order given: each call of encode() gets one."""
    return np.concatenate([model.encode(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)])


def by_default(model: Any, texts: list[str]) -> Vectors:
    """One call of encode(), which sorts by characters, longest first."""
    found: Vectors = model.encode(texts)
    return found


def sorted_by_tokens(model: Any, texts: list[str]) -> Vectors:
    """Batches of texts that are sorted by their tokens, longest first."""
    ids = model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]
    order = sorted(range(len(texts)), key=lambda index: -len(ids[index]))
    found = in_order(model, [texts[index] for index in order])
    return found[np.argsort(order)]


BATCHINGS: dict[str, Callable[[Any, list[str]], Vectors]] = {
    "given": in_order,
    "default": by_default,
    "sorted": sorted_by_tokens,
}


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model = SentenceTransformer(sys.argv[1], device="cpu")
    counts = {"tokens": 0, "positions": 0}

    def count(module: torch.nn.Module, arguments: tuple[dict[str, torch.Tensor]]) -> None:
        mask = arguments[0]["attention_mask"]
        counts["tokens"] += int(mask.sum())
        counts["positions"] += mask.numel()

    model[0].register_forward_pre_hook(count)
    for line in sys.stdin:
        job = json.loads(line)
        counts.update(tokens=0, positions=0)
        started_s = time.perf_counter()
        vectors = BATCHINGS[job["batching"]](model, job["texts"])
        seconds = time.perf_counter() - started_s
        np.save(job["vectors"], vectors)
        print(json.dumps({"seconds": seconds, **counts}), flush=True)


if __name__ == "__main__":
    main()
