"""A cache of the Hugging Face hub that holds one model's tokenizer, for clients that have no network."""

import shutil
from pathlib import Path

REVISION = "0" * 40


def write_hub_cache(home: Path, name: str, model: Path) -> None:
    """Writes what HF_HOME=home needs so that `name`, "owner/model", is found with HF_HUB_OFFLINE=1.

    aiperf does not load a tokenizer from a folder while that is set.
    """
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for file in (*model.glob("*.json"), *model.glob("*.jinja")):
        shutil.copy(file, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)
