"""all-MiniLM-L6-v2 with its real weights, on real texts of mixed lengths."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import normalize
from transformers import AutoModel

from tests.embedding_model import EMBEDDING_MODEL
from tests.worker.pooled.pooled_rig import PooledEngine

NUM_TEXTS = 1000
# The first components of vectors by sentence-transformers 6.2.0 with torch 2.13.0 on a CPU, by text.
GOLDEN = json.loads((Path(__file__).parent / "minilm_vectors.json").read_text())


def tokenizer() -> Tokenizer:
    """Cuts texts as sentence-transformers does, and pads none."""
    found = Tokenizer.from_file(str(EMBEDDING_MODEL / "tokenizer.json"))
    found.no_padding()
    found.enable_truncation(256)
    return found


def texts(shared: Path) -> list[str]:
    lines = (shared / "text/gsm8k_test.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    plays = (shared / "text/tiny_shakespeare.txt").read_text()
    few = questions[: NUM_TEXTS // 2] + [question.split()[0] for question in questions[:100]]
    return few + [plays[900 * index : 900 * index + 3 * index] for index in range(1, NUM_TEXTS - len(few) + 1)]


@pytest.mark.slow
def test_a_thousand_texts_have_the_vectors_of_transformers(shared: Path) -> None:
    served, truth = PooledEngine(EMBEDDING_MODEL), AutoModel.from_pretrained(EMBEDDING_MODEL, dtype=torch.float32)
    prompts = [encoding.ids for encoding in tokenizer().encode_batch(texts(shared))]
    assert len(prompts) == NUM_TEXTS
    assert {3, 256} <= set(map(len, prompts)), "from one word to more than fits"
    for prompt, vector in zip(prompts, served.outputs(prompts), strict=True):
        with torch.inference_mode():
            expected = normalize(truth(input_ids=torch.tensor([prompt])).last_hidden_state[0].mean(0), dim=0)
        assert torch.allclose(vector, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers() -> None:
    served = PooledEngine(EMBEDDING_MODEL)
    prompts = [encoding.ids for encoding in tokenizer().encode_batch(list(GOLDEN))]
    for vector, expected in zip(served.outputs(prompts), GOLDEN.values(), strict=True):
        assert vector[: len(expected)].tolist() == pytest.approx(expected, abs=1e-5)
