"""What an encoder on a CPU does where there are no C kernels, or not those that are asked for."""

from pathlib import Path

import pytest
import torch

from tests.worker.pooled.checkpoints import write_model, write_modules
from trunkline_worker.engine.model_task import ModelTask, pooled_model
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.encoders import encoder_loading
from trunkline_worker.model.encoders.encoder_config import PooledEncoder
from trunkline_worker.model.encoders.encoder_loading import LoadedEncoder, load_encoder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    write_model(tmp_path, "bert", "Model", num_hidden_layers=2)
    write_modules(tmp_path, pooling="pooling_mode_mean_tokens")
    return tmp_path


def loaded(directory: Path, dtype: str = "float32") -> LoadedEncoder:
    model = pooled_model(directory, ModelTask.AUTO)
    assert isinstance(model, PooledEncoder)
    return load_encoder(directory, model, dtype=dtype, device=torch.device("cpu"))


@torch.inference_mode()
def states(model: LoadedEncoder) -> torch.Tensor:
    return model.encoder.forward(torch.arange(5, 40), [30, 5], [0, 0]).float()


def test_without_a_compiler_pytorch_computes_the_same(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels = loaded(bert)
    monkeypatch.setattr(encoder_loading, "library", lambda dtype: None)
    without = loaded(bert)
    torch.testing.assert_close(states(with_kernels), states(without), atol=1e-5, rtol=1e-5)
    assert with_kernels.fingerprint != without.fingerprint, "the last bits may differ"


def test_in_float16_pytorch_computes(bert: Path) -> None:
    torch.testing.assert_close(states(loaded(bert, "float16")), states(loaded(bert)), atol=2e-2, rtol=2e-2)


def test_a_build_that_this_cpu_cannot_run_is_refused_in_one_line(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_MARCH", "no-such-cpu")
    with pytest.raises(ModelError, match=r"^TRUNKLINE_MARCH=no-such-cpu: .*$"):
        loaded(bert)
