"""Checkpoints that are stored quantised: the logits are transformers' with the values that outside code finds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import their_logits
from tests.worker.quantized.stored_formats import FORMATS, write_checkpoint
from trunkline_worker.model.loading import LoadedModel, load_model

PROMPT = [5, 9, 3, 60, 41, 7, 7, 12, 30, 1, 2, 19]


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, **{"dtype": "float32", "device": torch.device("cpu"), **options})


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, FORMATS[name], tie_word_embeddings=name == "fp8-tensor")
    (logits,) = ragged_logits(load(tmp_path, kernels=kernels), [PROMPT])
    expected = their_logits(theirs, PROMPT)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_parts_that_the_config_names_are_not_quantised(tmp_path: Path) -> None:
    form, skipped = FORMATS["fp8-blocks"], ["lm_head", "model.layers.0.self_attn.k_proj", "mlp.down_proj"]
    form = replace(form, config=form.config | {"modules_to_not_convert": skipped})
    theirs = write_checkpoint(tmp_path, form, plain=("0.self_attn.k_proj", "mlp.down_proj"))
    (logits,) = ragged_logits(load(tmp_path), [PROMPT])
    torch.testing.assert_close(logits, their_logits(theirs, PROMPT), atol=1e-4, rtol=0)
