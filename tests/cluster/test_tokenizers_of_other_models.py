"""A worker whose tokenizer does not belong to its model, as a process."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster.processes import Process, script
from tests.worker.engine_rig import DEMO_MODEL

EXIT_CANNOT_START = 2


def worker(model: Path) -> Process:
    return Process(script("trunkline-worker"), "--model", str(model), "--port", "0", "--threads", "1")


@pytest.mark.slow
def test_a_tokenizer_of_more_tokens_than_the_model_is_one_line_and_no_chat_is_another(tmp_path: Path) -> None:
    larger, chatless = tmp_path / "larger", tmp_path / "chatless"
    for directory in (larger, chatless):
        shutil.copytree(DEMO_MODEL, directory)
    described = json.loads((larger / "tokenizer.json").read_text())
    described["added_tokens"].append({**described["added_tokens"][-1], "id": 2048, "content": "<extra>"})
    (larger / "tokenizer.json").write_text(json.dumps(described))
    (chatless / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    refused, serving = worker(larger), worker(chatless)
    try:
        line = refused.wait_for('its token "<extra>" has the id 2048, and this model\'s vocabulary ends at 2047')
        assert line.startswith("trunkline-worker: ")
        assert refused.wait(30.0) == EXIT_CANNOT_START
        assert not any("Traceback" in printed for printed in refused.lines)
        serving.wait_for("chat_template.jinja is not UTF-8.*the model is served without chat")
    finally:
        for process in (refused, serving):
            process.stop()
