"""What tests of the engine share."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.worker.engine_rig import DEMO_MODEL


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model without its upper half: interpreted kernels take as long for every layer."""
    folder = tmp_path_factory.mktemp("models") / "shallow"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"] // 2
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    kept = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "layers." not in name or int(name.split("layers.")[1].split(".")[0]) < num_layers
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
