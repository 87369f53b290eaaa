"""A call of a tool goes on at another worker when its own is killed in the middle of the arguments."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.processes import Cluster, running_cluster
from tests.playing.families import FAMILIES
from tests.playing.worker import COMMAND
from trunkline import Client

QUESTION, THOUGHT, TEXT = "Write it all down.", "That is long.", "I write."
ARGUMENTS = {"text": '<tool_call> [TOOL_CALLS] "it" {is} ünd ' * 60, "times": 3}
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}
KEY = "a key of thirty-two bytes, or so"


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers, of which each test kills one."""
    family = FAMILIES[request.param]
    answer = family.thought(THOUGHT) + family.text(TEXT) + family.call("write", ARGUMENTS)
    model = family.write(tmp_path_factory.mktemp(request.param) / "player", {QUESTION: answer})
    environment = {"TRUNKLINE_GRANT_KEY": KEY}
    with running_cluster(
        model, "--dtype=float32", "--kv-blocks=512", workers=3, environment=environment, command=COMMAND
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("direct", [False, True])
async def test_a_call_survives_the_worker_that_writes_it(played: Cluster, direct: bool) -> None:
    pieces, num_parts, is_killed = [], 0, False
    async with Client(played.address, direct=direct, timeout_s=60.0) as client:
        async for piece in client.generate([("user", QUESTION)], n=2, tools=[TOOL]):
            pieces.append(piece)
            num_parts += len([part for part in piece.parts if part.arguments])
            if num_parts and not is_killed:
                is_killed = True
                played.worker(pieces[0].response.prompt.worker_id).process.popen.kill()
    assert pieces[-1].response.usage.resumptions == 1
    for index in range(2):
        own = [piece for piece in pieces if piece.index == index]
        (call,) = [call for piece in own for call in piece.tool_calls]
        assert (call.name, json.loads(call.arguments)) == ("write", ARGUMENTS)
        assert ("".join(piece.reasoning for piece in own), "".join(piece.text for piece in own)) == (THOUGHT, TEXT)
        assert own[-1].finish_reason == "stop"
