"""Four coding assistants from npm: how each is run without a terminal, and the calls that a model makes through it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.playing.families import HERMES

TASK = "add() of sums.py subtracts. Mend it and run test_sums.py."
THOUGHT, DONE = "One step after the other.", "add() adds now, and its test passes."
WRONG, RIGHT = "return a - b", "return a + b"
BROKEN, MENDED = (f"def add(a, b):\n    {line}\n" for line in (WRONG, RIGHT))
FILES = {"sums.py": BROKEN, "test_sums.py": "from sums import add\n\nassert add(2, 3) == 5\n"}
TEST = "python3 test_sums.py && touch passed"
PATCH = f"*** Begin Patch\n*** Update File: sums.py\n@@\n-    {WRONG}\n+    {RIGHT}\n*** End Patch\n"

Call = tuple[str, Mapping[str, Any]]  # a tool's name and the arguments


@dataclass(frozen=True)
class Assistant:
    """An assistant.

    model: the name under which it asks for the model
    program: of the package, and its arguments before the task
    environment, files: beside the usual, and in its home directory, by the address of the router
    calls: which read the file, edit it and run the test, by the folder that has them
    """

    name: str
    model: str
    program: str
    arguments: tuple[str, ...]
    environment: Callable[[str], dict[str, str]]
    files: Callable[[str], dict[str, str]]
    calls: Callable[[Path], list[Call]]

    def answers(self, folder: Path) -> dict[str, str]:
        """What the model says, by what its prompt has as the last of these."""
        calls = self.calls(folder)
        asked = [TASK, *map(_mark, calls)]
        said = [*(HERMES.thought(THOUGHT) + HERMES.call(*call) for call in calls), HERMES.thought(THOUGHT) + DONE]
        return dict(zip(asked, said, strict=True))


def _mark(call: Call) -> str:
    """What shows in a prompt that a call was made: its last argument. Assistants may add others before it."""
    name, value = list(call[1].items())[-1]
    return f"{json.dumps(name)}: {json.dumps(value)}"


def _codex_files(root: str) -> dict[str, str]:
    provider = f'name = "Trunkline"\nbase_url = "{root}/v1"\nenv_key = "TRUNKLINE_API_KEY"\nwire_api = "responses"\n'
    return {".codex/config.toml": f'model_provider = "trunkline"\n\n[model_providers.trunkline]\n{provider}'}


def _opencode_files(root: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{root}/v1", "apiKey": "any"},
        "models": {"player": {"limit": {"context": 131072, "output": 8192}}},
    }
    return {".config/opencode/opencode.json": json.dumps({"provider": {"trunkline": provider}})}


ASSISTANTS = (
    Assistant(
        "codex",
        model="gpt-5.5",  # for which it has the tool apply_patch, with a grammar
        program="codex",
        arguments=("exec", "--model", "gpt-5.5", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        environment=lambda root: {"TRUNKLINE_API_KEY": "any"},
        files=_codex_files,
        calls=lambda folder: [
            ("exec_command", {"cmd": "cat sums.py"}),
            ("apply_patch", {"input": PATCH}),
            ("exec_command", {"cmd": TEST}),
        ],
    ),
    Assistant(
        "claude-code",
        model="player",
        program="claude",
        arguments=("--model", "player", "--allowedTools", "Read,Edit,Bash", "-p"),
        environment=lambda root: {
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        files=lambda root: {},
        calls=lambda folder: [
            ("Read", {"file_path": str(folder / "sums.py")}),
            ("Edit", {"file_path": str(folder / "sums.py"), "old_string": WRONG, "new_string": RIGHT}),
            ("Bash", {"command": TEST}),
        ],
    ),
    Assistant(
        "opencode",
        model="player",
        program="opencode",
        arguments=("run", "--model", "trunkline/player"),
        environment=lambda root: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files=_opencode_files,
        calls=lambda folder: [
            ("read", {"filePath": str(folder / "sums.py")}),
            ("edit", {"filePath": str(folder / "sums.py"), "oldString": WRONG, "newString": RIGHT}),
            ("bash", {"command": TEST}),
        ],
    ),
    Assistant(
        "qwen-code",
        model="player",
        program="qwen",
        arguments=("--auth-type", "openai", "--yolo", "-p"),
        environment=lambda root: {"OPENAI_BASE_URL": f"{root}/v1", "OPENAI_API_KEY": "any", "OPENAI_MODEL": "player"},
        files=lambda root: {},
        calls=lambda folder: [
            ("read_file", {"file_path": str(folder / "sums.py")}),
            ("edit", {"file_path": str(folder / "sums.py"), "old_string": WRONG, "new_string": RIGHT}),
            ("run_shell_command", {"command": TEST, "is_background": False}),
        ],
    ),
)
