"""The requests of coding assistants, without their contents, as they were recorded: docs/assistants.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.assistants.assistants import ASSISTANTS, THOUGHT, Assistant
from tests.playing.families import HERMES
from tests.router.cluster import PATIENCE_S, cluster
from tests.router.fake_worker import FakeWorker
from tests.router.prompts.tool_templates import ALL
from tests.router.tokenizer_files import tokenizer_files
from tests.worker.grammar.byte_matcher import TAGS, accepts, matcher_of
from trunkline.v1.worker_pb2 import Capability
from trunkline_router.edge.http_call import Edge

FIXTURES = (Path(__file__).parent / "fixtures").glob("*.json")
REQUESTS = {file.stem: json.loads(file.read_text()) for file in sorted(FIXTURES)}
ENDS = {"/v1/chat/completions": "[DONE]", "/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}
LEFT_OUT = {"codex": "ignored fields: tools[8], tools[9]"}  # tool_search and web_search
FILES = tokenizer_files(chat_template=f"{ALL}{{# enable_thinking </think> #}}")


def worker(**options: Any) -> FakeWorker:
    most = 1 << 20
    return FakeWorker("w", answer_format="hermes", files=FILES, context_length=most, kv_token_capacity=most, **options)


async def served(recorded: Mapping[str, Any], worker: FakeWorker, **options: Any) -> httpx2.Response:
    async with cluster(worker, edge=Edge, **options) as router:
        root = f"http://127.0.0.1:{router.http_port}"
        async with httpx2.AsyncClient(base_url=root, timeout=PATIENCE_S, trust_env=False) as http:
            body = {**recorded["body"], "model": "tiny"}
            answer = await http.post(recorded["path"], json=body, headers=recorded["headers"])
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_of_an_assistant_is_served_as_it_is(name: str) -> None:
    recorded = REQUESTS[name]
    answer = await served(recorded, worker())
    assert ENDS[recorded["path"].partition("?")[0]] in answer.text
    assert answer.headers.get("x-trunkline-warning") == LEFT_OUT.get(name)


@pytest.mark.parametrize("assistant", ASSISTANTS, ids=lambda assistant: assistant.name)
async def test_a_call_of_an_assistants_tools_is_enforced(assistant: Assistant) -> None:
    able = worker(capabilities=[Capability.CAPABILITY_GRAMMARS])
    await served(REQUESTS[assistant.name], able, enforces_calls=True)
    (submit,) = able.submits
    matcher = matcher_of(TAGS, able.grammars[submit.work.grammar.digest].text)
    for name, arguments in assistant.calls(Path("/folder")):
        assert accepts(matcher, HERMES.thought(THOUGHT) + HERMES.call(name, arguments))
        assert not accepts(matcher, HERMES.call(f"{name}_", arguments))
        for argument in arguments:
            assert not accepts(matcher, HERMES.call(name, {**arguments, argument: [0]}))
