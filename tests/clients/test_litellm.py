"""litellm, through each of its providers that speak what the edge serves."""

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.edge import Edge

if TYPE_CHECKING:
    from openai import OpenAI

PROGRAM = Path(__file__).parent / "programs" / "call_litellm.py"

pytestmark = pytest.mark.slow  # the import takes seconds


@pytest.fixture(scope="module")
def came(edge: Edge, clients_python: Path) -> dict[str, object]:
    done = subprocess.run(
        [clients_python, PROGRAM, edge.root, edge.model],
        capture_output=True,
        text=True,
        # litellm would fetch its table of prices from another host.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_every_provider_gives_the_same_text(came: dict[str, object], client: "OpenAI", edge: Edge) -> None:
    chat = client.chat.completions.create(
        model=edge.model,
        messages=[{"role": "user", "content": "Tell me a story about a fox."}],
        max_tokens=24,
        temperature=0,
    )
    complete = client.completions.create(model=edge.model, prompt="Once upon a time", max_tokens=24, temperature=0)
    text = chat.choices[0].message.content
    assert text
    for way in ("chat", "streamed", "streamed_asynchronously", "vllm", "responses", "anthropic"):
        assert came[way] == text, way
    assert came["completion"] == complete.choices[0].text


def test_ends_and_usage_are_passed_on(came: dict[str, object]) -> None:
    assert came["finish_reason"] == "length"
    assert came["completion_tokens"] == 24
    assert came["streamed_usage"] == [24]


def test_errors_become_those_of_litellm(came: dict[str, object]) -> None:
    assert came["unknown_model"] == "NotFoundError"
    assert came["bad_field"] == "BadRequestError"
    assert came["too_long"] == "ContextWindowExceededError"
