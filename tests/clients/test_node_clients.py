"""npm's `openai`, and `ai` with @ai-sdk/openai-compatible."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.edge import CLIENTS_ENVIRONMENT, Edge

if TYPE_CHECKING:
    from openai import OpenAI

PROGRAM = Path(__file__).parent / "node" / "call.mjs"
INSTALLED = CLIENTS_ENVIRONMENT / "node"  # make clients puts the packages and a copy of the program there


@pytest.fixture(scope="module")
def came(edge: Edge) -> dict[str, object]:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node or npm is absent, and they are optional: its clients were not run")
    assert (INSTALLED / "node_modules").is_dir(), f"{INSTALLED} is absent: make clients"
    # Node looks for packages beside the program.
    program = shutil.copy(PROGRAM, INSTALLED)
    done = subprocess.run(["node", program, edge.root, edge.model], capture_output=True, text=True, cwd=INSTALLED)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_every_way_of_asking_gives_the_same_text(came: dict[str, object], client: "OpenAI", edge: Edge) -> None:
    chat = client.chat.completions.create(
        model=edge.model,
        messages=[{"role": "user", "content": "Tell me a story about a fox."}],
        max_tokens=24,
        temperature=0,
    )
    complete = client.completions.create(model=edge.model, prompt="Once upon a time", max_tokens=24, temperature=0)
    text = chat.choices[0].message.content
    assert text
    ways = ("chat", "chatStreamed", "accumulated", "response", "responseStreamed", "generated", "streamed")
    assert {way: came[way] for way in ways} == dict.fromkeys(ways, text)
    assert came["completion"] == complete.choices[0].text
    assert came["completed"]


def test_ends_usage_models_and_events_are_understood(came: dict[str, object], edge: Edge) -> None:
    assert came["models"] == [edge.model]
    assert came["generatedEnd"] == came["streamedEnd"] == "length"
    assert came["chatTokens"] == came["generatedTokens"] == came["streamedTokens"] == 24
    assert came["events"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_errors_and_aborts_are_understood(came: dict[str, object]) -> None:
    assert came["unknownModel"] == ["NotFoundError", 404, "model_not_found", True]
    assert came["callError"] == [True, 404]
    assert came["aborted"] is True
