"""The documents of the comparison with sentence-transformers."""

import pytest
from tokenizers import Tokenizer

from trunkline_bench.pooling.documents import LONGEST, SHORTEST, SPECIAL_TOKENS, Documents, lengths
from trunkline_bench.servers.demo_model import DEMO_MODEL


def test_lengths_have_a_heavy_tail() -> None:
    found = sorted(lengths(512))
    assert (found[0], found[256], found[-1]) == (SHORTEST, 2 * SHORTEST, LONGEST)
    assert sum(found[-51:]) > sum(found) / 2, "a tenth of the documents has most of the tokens"


def test_documents_have_their_lengths_and_differ_between_seeds() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    documents, wanted = Documents(tokenizer), [SHORTEST, 100, LONGEST]
    texts = documents.draw(wanted, seed=1)
    found = [len(tokenizer.encode(text, add_special_tokens=False).ids) + SPECIAL_TOKENS for text in texts]
    assert found == pytest.approx(wanted, rel=0.02, abs=1)
    assert texts == documents.draw(wanted, seed=1)
    assert not set(texts) & set(documents.draw(wanted, seed=2))
