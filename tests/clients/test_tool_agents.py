"""openai-agents with a tool of an MCP server, pydantic-ai, litellm, and npm's `openai` and `ai`: each calls a tool and
answers with its result."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import ANSWER, CITY, FIRST_THOUGHT, LAST_THOUGHT, QUESTION
from tests.clients.edge import CLIENTS_ENVIRONMENT, Edge

PROGRAMS = Path(__file__).parent / "programs"
NODE_PROGRAM = Path(__file__).parent / "node" / "tools.mjs"
INSTALLED = CLIENTS_ENVIRONMENT / "node"  # make clients puts the packages there

pytestmark = pytest.mark.slow  # the imports take seconds


def came_from(*command: str | Path, player: Edge, directory: Path | None = None) -> dict[str, Any]:
    # litellm would fetch its table of prices from another host.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    asked = [*command, player.root, player.model, QUESTION]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr[-4000:]
    came: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return came


def test_agents_call_a_tool_of_an_mcp_server(player: Edge, clients_python: Path) -> None:
    came = came_from(clients_python, PROGRAMS / "tools_of_agents.py", player=player)
    assert {*came} == {"chat", "responses"}
    for one in came.values():
        thinks = "reasoning_item"
        expected = [thinks, "tool_call_item", "tool_call_output_item", thinks, "message_output_item"]
        assert one["streamed"] == [expected, ANSWER]
        if one is came["chat"]:  # of a whole answer, it reads no field `reasoning`
            expected = [name for name in expected if name != thinks]
        assert one["whole"] == [expected, ANSWER]
        assert {"tool_called", "tool_output", "message_output_created"} <= {*one["events"]}


def test_pydantic_ai_calls_a_function(player: Edge, clients_python: Path) -> None:
    came = came_from(clients_python, PROGRAMS / "tools_of_pydantic_ai.py", player=player)
    assert {*came} == {"chat", "responses"}
    for one in came.values():
        assert one["whole"] == one["streamed"] == ANSWER
        assert one["calls"] == [["get_weather", {"city": CITY}]]
        assert one["thoughts"] == [FIRST_THOUGHT, LAST_THOUGHT]


def test_litellm_passes_calls_and_results_on(player: Edge, clients_python: Path) -> None:
    came = came_from(clients_python, PROGRAMS / "tools_of_litellm.py", player=player)
    assert came == {provider: [ANSWER, ANSWER] for provider in ("openai", "hosted_vllm", "anthropic")}


def test_clients_of_node_run_tools(player: Edge) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node or npm is absent, and they are optional: its clients were not run")
    assert (INSTALLED / "node_modules").is_dir(), f"{INSTALLED} is absent: make clients"
    program = shutil.copy(NODE_PROGRAM, INSTALLED)  # Node looks for packages beside the program
    came = came_from("node", program, player=player, directory=INSTALLED)
    assert came["runner"] == came["runnerStreamed"] == ANSWER
    steps = [[FIRST_THOUGHT, [{"city": CITY}], "tool-calls"], [LAST_THOUGHT, [], "stop"]]
    assert came["generated"] == came["streamed"] == [steps, ANSWER]
    assert {"reasoning-delta", "tool-input-delta", "tool-call", "tool-result", "text-delta"} <= {*came["parts"]}
