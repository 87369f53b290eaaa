"""Workers continue one another's requests if their fingerprints are equal: then their outputs are."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.worker.pooled.checkpoints import write_model, write_modules
from tests.worker.pooled.pooled_rig import PooledEngine
from trunkline_worker.model.checkpoint.refusals import ModelError


def fingerprint(folder: Path) -> str:
    return PooledEngine(folder).description.fingerprint


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_the_fingerprint_tells_poolings_activations_and_dense_weights_apart(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, "Model")
    seen = set()
    for pooling in ("pooling_mode_cls_token", "pooling_mode_mean_tokens"):
        for normalize in (True, False):
            write_modules(tmp_path, pooling=pooling, normalize=normalize)
            seen.add(fingerprint(tmp_path))
    for fill in (0.5, 0.25):
        write_modules(tmp_path, pooling="pooling_mode_cls_token", dense=[(8, 48)])
        save_file({"linear.weight": torch.full((8, 48), fill)}, tmp_path / "2_Dense/model.safetensors")
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 6


def test_the_fingerprint_tells_keys_that_are_ignored_apart(tmp_path: Path) -> None:
    write_model(tmp_path, "bert", "Model", layer_norm_eps=1e-2)
    write_modules(tmp_path, pooling="pooling_mode_cls_token")
    ignoring = PooledEngine(tmp_path, ignore_config_keys=("layer_norm_eps",)).description.fingerprint
    assert ignoring != fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_the_fingerprint_does_not_depend_on_where_the_model_is(name: str, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_model(one, name, "Model")
    write_modules(one, pooling="pooling_mode_cls_token", dense=[(40, 48), (24, 40)])
    shutil.copytree(one, other)
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_dense_weights_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name, "Model")
    write_modules(tmp_path, pooling="pooling_mode_cls_token", dense=[(8, 48)])
    save_file({"linear.weight": torch.full((8, 48), float("nan"))}, tmp_path / "2_Dense/model.safetensors")
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors: tensor linear\.weight has NaN"):
        PooledEngine(tmp_path)


def test_the_head_of_a_decoder_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen2", "ForSequenceClassification", num_labels=1)
    with torch.no_grad():
        model.score.weight[0, 3] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"tensor score\.weight has NaN or infinite"):
        PooledEngine(tmp_path)


def test_the_answer_tokens_of_a_head_that_is_not_finite_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, "llama", "ForCausalLM")
    with torch.no_grad():
        model.lm_head.weight[7, 3] = torch.nan
    model.save_pretrained(tmp_path)
    modules = [{"type": f"sentence_transformers.{kind}", "path": kind} for kind in ("Transformer", "LogitScore")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "LogitScore").mkdir()
    (tmp_path / "LogitScore/config.json").write_text(json.dumps({"true_token_id": 7}))
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight has NaN or infinite"):
        PooledEngine(tmp_path)
