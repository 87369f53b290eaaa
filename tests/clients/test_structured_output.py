"""Clients get objects from a model that knows nothing of JSON: OpenAI's and Anthropic's own, langchain, pydantic-ai,
litellm, instructor and npm's `ai`. vLLM's other constraints hold, too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel

from tests.clients.edge import ANY_KEY, CLIENTS_ENVIRONMENT, Edge

if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import MessageParam
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

PROGRAM = Path(__file__).parent / "programs" / "objects_of_clients.py"
NODE_PROGRAM = Path(__file__).parent / "node" / "objects.mjs"
INSTALLED = CLIENTS_ENVIRONMENT / "node"  # make clients puts the packages there

QUESTION = "Tell me a story about a fox."
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
MESSAGES: list[MessageParam] = [{"role": "user", "content": QUESTION}]
HOT: dict[str, Any] = {"temperature": 2.0, "seed": 7}


class Friend(BaseModel):
    kind: Literal["owl", "pig"]
    is_brave: bool


class Story(BaseModel):
    """Any of its texts is short, so that the model cannot go on until its context is full."""

    hero: Literal["fox", "pig", "owl"]
    age: Literal[1, 2, 3]
    friend: Friend | None


def assert_is_story(text: str) -> None:
    """Fails unless it is a story, written as Python writes JSON."""
    story = Story.model_validate_json(text, strict=True)
    assert text == json.dumps(story.model_dump())


@pytest.fixture(scope="module")
def anthropic(edge: Edge) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=edge.root, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, HOT])
def test_openai_parses_each_choice_of_a_chat(client: OpenAI, edge: Edge, sampling: dict[str, Any]) -> None:
    asked: Any = {"model": edge.model, "messages": CHAT, "response_format": Story, "n": 3, **sampling}
    whole = client.chat.completions.parse(**asked, logprobs=True)
    for choice in whole.choices:
        assert isinstance(choice.message.parsed, Story)
        assert_is_story(choice.message.content or "")
        assert (choice.finish_reason, choice.message.refusal) == ("stop", None)
        assert choice.logprobs is not None
        assert "".join(entry.token for entry in choice.logprobs.content or ()).startswith(choice.message.content or "?")
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    assert [choice.message.parsed for choice in streamed.choices] == [choice.message.parsed for choice in whole.choices]


def test_openai_parses_a_response_and_the_conversation_goes_on(client: OpenAI, edge: Edge) -> None:
    asked: Any = {"model": edge.model, "input": QUESTION, "text_format": Story, "temperature": 0.0}
    whole = client.responses.parse(**asked)
    assert_is_story(whole.output_text)
    assert whole.output_parsed == Story.model_validate_json(whole.output_text)
    assert whole.text is not None
    assert whole.text.format is not None
    assert whole.text.format.type == "json_schema"
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == whole.output_parsed
    free = client.responses.create(
        model=edge.model, previous_response_id=whole.id, input="And then?", max_output_tokens=8, temperature=0.0
    )
    assert free.usage is not None
    assert free.usage.output_tokens == 8
    with pytest.raises(json.JSONDecodeError):
        json.loads(free.output_text)


def test_anthropic_parses_a_message(anthropic: Anthropic, edge: Edge) -> None:
    asked: Any = {"model": edge.model, "messages": MESSAGES, "max_tokens": 200, "output_format": Story}
    message = anthropic.messages.parse(**asked)
    [block] = message.content
    assert block.type == "text"
    assert_is_story(block.text)
    assert (message.stop_reason, message.parsed_output) == ("end_turn", Story.model_validate_json(block.text))
    with anthropic.messages.stream(**asked) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Story)


def test_langchain_parses_an_answer(edge: Edge) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(model=edge.model, base_url=edge.url, api_key=SecretStr(ANY_KEY), temperature=0.0)
    assert isinstance(model.with_structured_output(Story, method="json_schema").invoke(QUESTION), Story)


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"(fox|pig): \d{1,3}"}, r"(fox|pig): \d{1,3}"),
    ({"choice": ["a \"fox\"", "a pig\\"]}, r'a "fox"|a pig\\'),
    ({"json": {"enum": ["fox", "pig"]}}, '"(fox|pig)"'),
    ({"grammar": 'start: animal ("," animal)?\nanimal: "fox" | "pig"'}, "(fox|pig)(,(fox|pig))?"),
    ({"grammar": 'root ::= animal ("," animal)?\nanimal ::= "fox" | "pig"'}, "(fox|pig)(,(fox|pig))?"),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "pattern"), CONSTRAINTS)
def test_constraints_of_vllm_hold_at_each_endpoint(
    client: OpenAI, edge: Edge, constraint: dict[str, Any], pattern: str
) -> None:
    asked: Any = {"model": edge.model, "temperature": 2.0, "extra_body": {"structured_outputs": constraint, "seed": 7}}
    texts = [
        client.chat.completions.create(messages=CHAT, **asked).choices[0].message.content or "",
        client.responses.create(input=QUESTION, **asked).output_text,
        *(choice.text for choice in client.completions.create(prompt=["Once", "A fox"], n=2, **asked).choices),
    ]
    assert len(texts) == 6
    for text in texts:
        assert re.fullmatch(pattern, text), text


def test_a_schema_that_cannot_be_enforced_is_refused_by_name(client: OpenAI, anthropic: Anthropic, edge: Edge) -> None:
    import anthropic as anthropic_client
    import openai

    schema: dict[str, object] = {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema"}}}
    with pytest.raises(openai.BadRequestError, match="ref") as refused:
        client.chat.completions.create(
            model=edge.model,
            messages=CHAT,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        )
    assert refused.value.param == "response_format.json_schema.schema"
    with pytest.raises(anthropic_client.BadRequestError, match=r"output_config\.format\.schema: .*ref"):
        anthropic.messages.create(
            model=edge.model,
            messages=MESSAGES,
            max_tokens=8,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )


def objects_from(*command: str | Path, edge: Edge, directory: Path | None = None) -> dict[str, Any]:
    """Returns the stories that a program has got."""
    # litellm would fetch its table of prices from another host.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    asked = [*command, edge.root, edge.model, QUESTION]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr[-4000:]
    came: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for one in came.values():
        Story.model_validate(one, strict=True)
    return came


@pytest.mark.slow  # the imports take seconds
def test_other_clients_of_python_get_objects(edge: Edge, clients_python: Path) -> None:
    came = objects_from(clients_python, PROGRAM, edge=edge)
    assert {*came} == {
        *(f"pydantic-ai {way} {how}" for way in ("chat", "responses") for how in ("whole", "streamed")),
        *("litellm openai", "litellm hosted_vllm"),
        *("instructor whole", "instructor streamed"),
    }


@pytest.mark.slow
def test_ai_of_node_gets_objects(edge: Edge) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node or npm is absent, and they are optional: its clients were not run")
    assert (INSTALLED / "node_modules").is_dir(), f"{INSTALLED} is absent: make clients"
    program = shutil.copy(NODE_PROGRAM, INSTALLED)  # Node looks for packages beside the program
    came = objects_from("node", program, edge=edge, directory=INSTALLED)
    assert {*came} == {"generated", "streamed", "output"}
