"""Models of the shapes and settings of published ones compute what transformers computes."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from tests.worker.pooled.pooled_rig import PooledEngine, prompts_of
from tests.worker.pooled.published import PUBLISHED, VOCAB, Truth, write_published
from trunkline.v1.worker_pb2 import Submit
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import parse_spec

# A decoder, an encoder and a reranker, of those that take few seconds.
QUICK = {"Qwen3-Embedding-0.6B, one layer", "bge-small-en-v1.5", "ms-marco-MiniLM-L6-v2"}
# From one that is shorter than a block to one that is longer than a window of ModernBERT on both sides.
LENGTHS = (5, 2, 300, 33, 17, 180, 64, 450)
SHARED = 64  # tokens, whole blocks
MOST_BFLOAT16_ERROR = 0.005  # of a probability; that of transformers in bfloat16 is up to 0.02


class Made:
    """A checkpoint, prompts, and what transformers makes of them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.published = PUBLISHED[name]
        truth: Truth = write_published(folder, name)
        self._folder = folder
        first, *_ = self.prompts = prompts_of(LENGTHS, vocab=VOCAB)
        long = self.prompts[2]
        self.prompts.append(long[:SHARED] + first)
        self.expected = [truth.output(prompt, len(prompt) // 2) for prompt in self.prompts]
        self.is_decoder = "num_key_value_heads" in self.published.config

    def engine(self, **options: object) -> PooledEngine:
        task = "embed" if self.published.pooling else "score"
        return PooledEngine(self._folder, task=task, **options)

    def submits(self, engine: PooledEngine) -> list[Submit]:
        of_pairs = 0 if self.published.pooling else 1
        return [
            engine.submit(prompt, first_segment_tokens=of_pairs * len(prompt) // 2, raw=True) for prompt in self.prompts
        ]

    def outputs(self, engine: PooledEngine) -> list[torch.Tensor]:
        """Vectors and logits as the model computes them, of prompts that are submitted together."""
        return engine.run(self.submits(engine))[0]


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("published"), request.param)


def assert_close(found: list[torch.Tensor], made: Made) -> None:
    for values, expected in zip(found, made.expected, strict=True):
        if made.published.pooling:
            values, expected = normalize(values, dim=0), normalize(expected, dim=0)
        assert torch.allclose(values, expected, atol=1e-5, rtol=0)


def test_outputs_of_a_ragged_batch_are_those_of_transformers(made: Made) -> None:
    assert_close(made.outputs(made.engine(dtype="float32")), made)


def test_chunks_and_cached_prefixes_change_no_output(made: Made) -> None:
    served = made.engine(dtype="float32", max_step_tokens=128)
    assert_close(made.outputs(served), made)
    submits = made.submits(served)
    found, collected = served.run(submits)
    assert_close(found, made)
    takes_prefixes = made.is_decoder and made.published.pooling in (None, "pooling_mode_lasttoken")
    assert collected.cached[submits[-1].handle] == (SHARED if takes_prefixes else 0)


def test_deterministic_outputs_do_not_depend_on_the_batch_to_the_bit(made: Made) -> None:
    """Whichever sizes its products have: PyTorch chooses how to compute them by these."""
    served = made.engine(dtype="float32", deterministic=True)
    together = made.outputs(served)
    submits = made.submits(served)
    alone = [served.run([submit])[0][0] for submit in reversed(submits)]
    assert all(map(torch.equal, together, reversed(alone)))


def test_outputs_in_bfloat16_are_nearly_the_same(made: Made) -> None:
    served = made.engine(dtype="bfloat16")
    assert served.description.dtype == "bfloat16"
    for values, expected in zip(made.outputs(served), made.expected, strict=True):
        if made.published.pooling:
            assert cosine_similarity(values, expected, dim=0) >= 0.9999
        else:
            assert torch.allclose(values.sigmoid(), expected.sigmoid(), atol=MOST_BFLOAT16_ERROR, rtol=0)


def test_a_decoder_that_attends_in_both_directions_is_refused() -> None:
    """As gte-Qwen2-1.5B-instruct, whose own code does so because of this key."""
    causal = PUBLISHED["KaLM-embedding-multilingual-mini-instruct-v1"].config
    config = {**causal, "architectures": ["Qwen2ForCausalLM"], "is_causal": False}
    with pytest.raises(ModelError, match="is_causal"):
        parse_spec(config)
