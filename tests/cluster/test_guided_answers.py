"""Whatever the model is, and however hot: answers over HTTP are of their grammars, or beginnings of such."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from jsonschema_rs import Draft202012Validator
from llguidance import LLTokenizer

from tests.chat_model import CHAT_MODEL
from tests.cluster.processes import Process, Worker, script
from tests.worker.engine_rig import DEMO_MODEL
from tests.worker.grammar.byte_matcher import CHOICE, REGEX, SCHEMA, matcher_of, sample
from trunkline_bench.servers.ports import free_port
from trunkline_worker.model.checkpoint.model_file import read_file

TIMEOUT_S = 120.0
AT_ONCE = 16
MAX_TOKENS = 48  # some answers are whole by then, and others are cut off
MOST_BYTES = 10_000  # of a text that was cut off, once it is complete
ANIMALS = ["dog", "cat", "a small brown bear"]
SHORT: dict[str, Any] = {"type": "string", "maxLength": 12}


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS: list[Any] = [
    {"type": "object"},
    object_of(name=SHORT, animal={"enum": ANIMALS}, legs={"type": "integer", "minimum": 0, "maximum": 8}),
    object_of(story={"type": "string", "minLength": 200}),
    object_of(is_real={"type": "boolean"}, weight={"type": "number", "exclusiveMinimum": 0, "maximum": 99.5}),
    {"type": "array", "items": object_of(key=SHORT, value={"type": ["integer", "null"]}), "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [SHORT, {"type": "boolean"}], "items": {"const": "the end"}, "maxItems": 4},
    {"anyOf": [object_of(cat=SHORT), object_of(dog={"type": "array", "items": SHORT, "maxItems": 2})]},
    {"oneOf": [object_of(kind={"const": "yes"}, why=SHORT), object_of(kind={"const": "no"})]},
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": object_of(leaf=SHORT) | {"properties": {"leaf": SHORT, "tree": {"$ref": "#/$defs/tree"}}}},
    },
    object_of(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,6}$"}, day={"type": "string", "format": "date"}),
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
    object_of(
        id={"type": "string", "format": "uuid"},
        at={"type": "string", "format": "date-time"},
        even={"multipleOf": 2, "type": "integer"},
    ),
]
REGEXES = [r"[1-9][0-9]{2,4}-(ab|cd)+x", r"(Yes|No), because [a-z ]{1,40}\.", r"([A-ZÄÖÜ][a-zäöü]{1,9} ){3,}"]
GRAMMARS: list[tuple[Any, str, dict[str, Any]]] = [  # kind, text, fields of a request
    *(
        (
            SCHEMA,
            json.dumps(one),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": one}}},
        )
        for one in SCHEMAS
    ),
    *((REGEX, one, {"structured_outputs": {"regex": one}}) for one in REGEXES),
    (CHOICE, json.dumps(ANIMALS), {"structured_outputs": {"choice": ANIMALS}}),
]
ARE_DOGS_REAL = (
    "The question of whether dogs are real is a topic of ongoing debate and scientific inquiry. While dogs have been "
    "observed in various forms of life, including humans, they are not considered to be a living being in the "
    "scientific sense. Dogs are a domesticated animal that has been used for various purposes, including companionship"
)
SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.5, "seed": 1}]


@contextmanager
def edge_of(model: Path, *arguments: str) -> Iterator[httpx.Client]:
    """A router before one worker."""
    worker = Worker(model, "--served-model-name=m", "--context-length=1024", *arguments)
    http_port = free_port()
    router = Process(script("trunkline-router"), f"--workers={worker.address}", "--port=0", f"--http-port={http_port}")
    try:
        worker.wait_ready()
        router.wait_for("router listening")
        with httpx.Client(base_url=f"http://127.0.0.1:{http_port}/v1", timeout=TIMEOUT_S) as client:
            yield client
    finally:
        router.stop()
        worker.stop()


def is_of(kind: Any, grammar: str, text: str) -> bool:
    if kind == SCHEMA:
        return Draft202012Validator(json.loads(grammar), validate_formats=True).is_valid(json.loads(text))
    return text in ANIMALS if kind == CHOICE else re.fullmatch(grammar, text) is not None


def check_answers(client: httpx.Client, tokenizer: Path) -> None:
    library = LLTokenizer(str(tokenizer))
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(fields: dict[str, Any], sampling: dict[str, Any]) -> Any:
            chat = [{"role": "user", "content": "Describe a dog, in JSON."}]
            asked = {"model": "m", "messages": chat, "max_tokens": MAX_TOKENS, "return_token_ids": True}
            answer = client.post("/chat/completions", json=asked | fields | sampling).raise_for_status()
            (choice,) = answer.json()["choices"]
            return choice

        asked = [(grammar, pool.submit(ask, grammar[2], sampling)) for grammar in GRAMMARS for sampling in SAMPLING]
        ends = []
        for (kind, text, _), answer in asked:
            choice = answer.result()
            content = choice["message"]["content"]
            if choice["finish_reason"] == "length":
                begun = library.decode_bytes(choice["token_ids"])
                assert begun.decode(errors="ignore") in content
                whole = sample(matcher_of(kind, text), Random(1), MOST_BYTES, begun)
                assert whole is not None, content
                content = whole
            assert is_of(kind, text, content), (text, content)
            ends.append(choice["finish_reason"])
    assert {*ends} == {"stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["auto", "dummy"])
def test_answers_of_the_demo_model_and_of_random_weights_are_of_their_grammars(weights: str) -> None:
    with edge_of(DEMO_MODEL, f"--load-format={weights}") as client:
        check_answers(client, DEMO_MODEL / "tokenizer.json")


@pytest.mark.slow
def test_a_real_chat_model_answers_as_in_transformers_and_by_the_grammars(tmp_path: Path) -> None:
    """The answer without a grammar is that of transformers 5.23 in float32."""
    (tmp_path / "tokenizer.json").write_bytes(read_file(CHAT_MODEL / "tokenizer.json"))
    with edge_of(CHAT_MODEL, "--dtype=float32") as client:
        chat = [{"role": "user", "content": "Are dogs real?"}]
        asked = {"model": "m", "messages": chat, "temperature": 0, "max_tokens": 60}
        answer = client.post("/chat/completions", json=asked).raise_for_status().json()
        assert answer["usage"]["prompt_tokens"] == 34
        assert answer["choices"][0]["message"]["content"] == ARE_DOGS_REAL
        check_answers(client, tmp_path / "tokenizer.json")
