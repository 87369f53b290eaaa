"""The flags about models, and what an operator reads, with a real worker."""

import json
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.cluster.processes import Worker
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_runtime.settings import parse_settings
from trunkline_worker.front.text.tokenizer_files import read_tokenizer_files
from trunkline_worker.front_settings import WorkerSettings
from trunkline_worker.main import answer_format
from trunkline_worker.settings import EngineSettings


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The demo model with a key that nobody knows, and without an end-of-sequence token."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    for name, changes in (("config.json", {"secret_sauce": 1, "eos_token_id": None}), ("generation_config.json", {})):
        path = tmp_path / "model" / name
        values = {key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token_id"}
        path.write_text(json.dumps({**values, **changes}))
    return tmp_path / "model"


def test_a_refused_model_ends_the_worker_with_one_line(directory: Path) -> None:
    worker = Worker(directory)
    try:
        worker.process.wait_for("trunkline-worker: .*config.json: secret_sauce is not known for LlamaForCausalLM")
        assert worker.process.wait() == 2
        assert not any("Traceback" in line for line in worker.process.lines)
    finally:
        worker.stop()


def test_a_damaged_gguf_file_ends_the_worker_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    worker = Worker(tmp_path / "model.gguf")
    try:
        worker.process.wait_for("trunkline-worker: .*model.gguf is damaged or cut short: ")
        assert worker.process.wait() == 2
    finally:
        worker.stop()


def test_a_chat_template_that_cannot_be_parsed_ends_the_worker_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ bos_token }}\n{% endfor %}")
    worker = Worker(DEMO_MODEL, f"--chat-template={tmp_path / 'chat.jinja'}")
    try:
        worker.process.wait_for("trunkline-worker: --chat-template .*chat.jinja: line 2: ")
        assert worker.process.wait() == 2
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("template", "value", "chosen", "reason"),
    [
        ("<tool_call>{{ messages }}", "auto", "hermes", "the chat template has <tool_call>"),
        ("{{ messages }}", "auto", "", "the chat template has the marks of no format"),
        ("<tool_call>{{ messages }}", "none", "", "--answer-format"),
        ("<tool_call>{{ messages }}", "mistral", "mistral", "--answer-format"),
    ],
)
def test_the_format_of_answers_is_that_of_the_template_unless_it_is_set(
    directory: Path, template: str, value: str, chosen: str, reason: str
) -> None:
    (directory / "chat_template.jinja").write_text(template)
    settings = parse_settings(WorkerSettings, ["--model", str(directory), f"--answer-format={value}"], {}, prog="w")
    with capture_logs() as logs:
        assert answer_format(settings, read_tokenizer_files(directory)) == chosen
    assert logs[-1]["answer_format"] == (chosen or "none")
    assert logs[-1]["reason"] == reason


def test_templates_of_tokenizer_config_json_show_the_format_too(directory: Path) -> None:
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "[TOOL_CALLS]"}]
    for template in ("[TOOL_CALLS]", named, {"default": "[TOOL_CALLS]"}):
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        settings = parse_settings(WorkerSettings, ["--model", str(directory)], {}, prog="w")
        assert answer_format(settings, read_tokenizer_files(directory)) == "mistral"


@pytest.mark.slow
def test_a_model_without_an_end_of_sequence_token_is_warned_of(directory: Path) -> None:
    worker = Worker(directory, "--ignore-config-keys=secret_sauce,other", "--kv-blocks=64")
    try:
        line = json.loads(worker.wait_ready().process.wait_for("no end-of-sequence token"))
        assert line["level"] == "warning"
    finally:
        worker.stop()


def test_settings_are_the_same_after_their_way_to_the_engine() -> None:
    settings = EngineSettings("model", ignore_config_keys=("a", "b.c"))
    assert EngineSettings.from_json(settings.to_json()) == settings
    assert EngineSettings.from_json(EngineSettings("model").to_json()) == EngineSettings("model")
