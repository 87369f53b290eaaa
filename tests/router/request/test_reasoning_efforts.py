"""An effort of reasoning at each endpoint: what becomes of it depends on the model's chat template."""

import json
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, client
from tests.router.tokenizer_files import byte_tokenizer, tokenizer_files
from trunkline.v1.worker_pb2 import Capability
from trunkline_router.main import router_settings
from trunkline_router.prompts.reasoning_effort import DEFAULT_LIMITS, effort_limits

LEVELS = "{{ reasoning_effort|default('-') }}{# content </think> #}<think>"
SWITCH = "{{ enable_thinking|default('-') }}{# content #}<think>{% if enable_thinking is false %}</think>{% endif %}"
ALWAYS = "x{# content </think> #}<think>"
NEVER = "x{# content #}"

Json = dict[str, Any]


def chat(effort: str, **more: Any) -> tuple[str, Json, str]:
    return "/v1/chat/completions", {"messages": CHAT, "reasoning_effort": effort, **more}, "reasoning_effort"


def response(effort: str, **more: Any) -> tuple[str, Json, str]:
    return "/v1/responses", {"input": "hi", "reasoning": {"effort": effort, **more}}, "reasoning.effort"


def message(effort: str, **more: Any) -> tuple[str, Json, str]:
    body: Json = {"messages": CHAT, "max_tokens": 9, "output_config": {"effort": effort}, **more}
    return "/v1/messages", body, "output_config.effort"


ENDPOINTS = pytest.mark.parametrize("asking", [chat, response, message])


def worker(template: str, *capabilities: "Capability.ValueType", answer_format: str = "hermes") -> FakeWorker:
    files = tokenizer_files(chat_template=template)
    return FakeWorker("w", answer=1, files=files, answer_format=answer_format, capabilities=capabilities)


def able(template: str) -> FakeWorker:
    return worker(template, Capability.CAPABILITY_GRAMMARS)


async def done(fake: FakeWorker, *asked: tuple[str, Json, str]) -> list[tuple[str, int | None, bool]]:
    """Of each request the prompt, the limit of reasoning, and whether a header says that the effort is ignored."""
    found = []
    async with client(fake) as asks:
        for path, body, field in asked:
            answer = await asks.post(path, {"model": "tiny", **body})
            assert answer.status_code == 200, answer.text
            warning = answer.headers.get("x-trunkline-warning")
            assert warning in (None, f"ignored fields: {field}")
            submit = fake.submits[-1]
            work = submit.work
            limit = limit_of(fake.grammars[work.grammar.digest].text) if work.HasField("grammar") else None
            found.append((byte_tokenizer().decode(list(submit.prompt_token_ids)), limit, warning is not None))
    return found


def limit_of(grammar: str) -> int:
    thought = json.loads(grammar)["format"]["elements"][0]
    return 0 if thought == {"type": "const_string", "value": "</think>"} else int(thought["content"]["max_tokens"])


@ENDPOINTS
async def test_a_level_is_a_variable_of_a_template_that_knows_levels(asking: Any) -> None:
    efforts = ("low", "none", "a level of its own")
    found = await done(able(LEVELS), *map(asking, efforts))
    assert found == [(f"{effort}<think>", None, False) for effort in efforts]


@ENDPOINTS
async def test_an_effort_limits_the_reasoning_of_a_model_without_levels(asking: Any) -> None:
    limits = {"none": 0, "minimal": 512, "medium": 8192, "high": None}
    found = await done(able(ALWAYS), *map(asking, limits))
    assert found == [("x<think>", limit, False) for limit in limits.values()]


@ENDPOINTS
async def test_an_effort_also_sets_the_switch_of_a_template(asking: Any) -> None:
    assert await done(able(SWITCH), *map(asking, ("none", "low", "high"))) == [
        ("False<think></think>", None, False),
        ("True<think>", 2048, False),
        ("True<think>", None, False),
    ]
    assert await done(worker(SWITCH), asking("low")) == [("True<think>", None, False)]  # it has no grammars


@ENDPOINTS
async def test_a_model_that_does_not_reason_ignores_an_effort_and_says_so(asking: Any) -> None:
    for fake in (able(NEVER), worker(NEVER, answer_format="")):
        found = await done(fake, *map(asking, ("none", "low", "high")))
        assert found == [("x", None, is_ignored) for is_ignored in (False, True, True)]
    path, body, field = asking("low")
    async with client(able(NEVER)) as asks:
        answer = await asks.post(path, {"model": "tiny", "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-trunkline-warning"] == f"ignored fields: {field}"


async def test_an_effort_whose_limit_cannot_be_enforced_is_no_reason_to_refuse() -> None:
    fake = worker("x{# content <channel|> #}", Capability.CAPABILITY_GRAMMARS, answer_format="gemma4")
    assert await done(fake, chat("low")) == [("x", None, False)]


async def test_an_explicit_limit_precedes_an_effort() -> None:
    enabled, disabled = {"type": "enabled", "budget_tokens": 7}, {"type": "disabled"}
    assert await done(
        able(ALWAYS),
        chat("low", thinking_token_budget=7),
        response("low", max_tokens=7),
        message("low", thinking=enabled),
        message("high", thinking=disabled),
        message("low", thinking={"type": "adaptive"}),
    ) == [("x<think>", limit, False) for limit in (7, 7, 7, 0, 2048)]


@ENDPOINTS
async def test_what_is_no_effort_is_refused_by_name(asking: Any) -> None:
    path, body, field = asking("hihg")
    async with client(able(ALWAYS)) as asks:
        answer = await asks.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400
    assert f"{field}: must be one of none, minimal, low" in answer.json()["error"]["message"]


def test_limits_are_read() -> None:
    assert effort_limits(DEFAULT_LIMITS) == {"none": 0, "minimal": 512, "low": 2048, "medium": 8192}
    assert effort_limits(["max=1048576"]) == {"none": 0, "max": 1048576}


@pytest.mark.parametrize("entry", ["low", "low=", "=1", "low=0", "low=-1", "low=1e3", "low=1048577", "no=1", "none=1"])
def test_what_is_no_limit_is_refused_in_one_line(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        router_settings(["--workers=localhost:1", f"--reasoning-efforts=high=9,{entry}"])
    told = capsys.readouterr().err
    assert told.startswith(f"trunkline-router: --reasoning-efforts: {entry!r} is no limit; allowed: EFFORT=TOKENS")
    assert told.count("\n") == 1
    with pytest.raises(ValueError, match="'low=2' is no limit"):
        effort_limits(["low=1", "low=2"])
