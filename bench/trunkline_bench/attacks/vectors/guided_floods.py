"""Floods of requests with grammars, tools and limits of reasoning, over HTTP."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from trunkline_bench.attacks.vectors.hostile_grammars import CLASSES, structured_outputs
from trunkline_bench.attacks.vectors.http_floods import Strike, flood_of, post

CALLING_MODEL = "calling"  # see calling_model.py
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = {"role": "user", "content": "What now?"}
NO_REASONING = {"thinking_token_budget": 0}
HUGE = (1 << 32) - 1  # tokens: the field has 32 bits
FORMATS = ("date-time", "email", "uri", "ipv6")
PROPERTIES = 1000  # of one object: the most that a schema may have
HEAVY = 500  # properties that take a third of a second to compile
TOOLS = 900  # with the shortest schemas: about as many as a grammar may have
CALLS = 2000  # of a conversation, which may have 4,096 messages
FIXTURES = Path(__file__).parents[4] / "tests" / "assistants" / "fixtures"  # recorded, without their texts
CHARACTERS = 77_000  # of the longest first request of an assistant


def _asked(path: str, **fields: Any) -> bytes:
    return post(json.dumps({"model": CALLING_MODEL, **fields}).encode(), path)


def _completion(grammar: dict[str, Any], max_tokens: int) -> bytes:
    return _asked(COMPLETIONS, prompt="Once", max_tokens=max_tokens, structured_outputs=grammar)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _heavy_schema(draw: Random) -> bytes:
    """Another one each time. It takes most of a second to compile."""
    name = f"{draw.getrandbits(32):x}"
    properties = {f"{name}_{i}": {"type": "string", "format": FORMATS[i % 4]} for i in range(HEAVY)}
    return _completion({"json": _object(properties)}, 64)


def _slow_masks(draw: Random) -> bytes:
    """2,000 optional properties, any of which may come next, in two objects."""
    optional = {f"property_{i}": {"type": "integer"} for i in range(PROPERTIES)}
    schema = _object({"a": _object(optional), "b": _object(optional)}) | {"required": ["a", "b"]}
    return _completion({"json": schema}, 900)


def _hostile_grammar(draw: Random) -> bytes:
    return _completion(structured_outputs(*draw.choice(CLASSES)(draw)), 64)


def _required_call(draw: Random) -> bytes:
    """Other names of tools each time, so that each grammar is compiled."""
    first = draw.getrandbits(16)
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tools = [
        {"type": "function", "function": {"name": f"t{first}_{i}", "parameters": parameters}} for i in range(TOOLS)
    ]
    return _asked(CHAT, messages=[QUESTION], tools=tools, tool_choice="required", max_tokens=64, **NO_REASONING)


def _conversation(draw: Random) -> bytes:
    """Too long for the context together with its answer, so that it is refused once it is rendered and tokenized."""
    messages: list[dict[str, Any]] = [QUESTION]
    for number in range(CALLS):
        function = {"name": "look", "arguments": json.dumps({"at": draw.randrange(1000)})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": "ok"})
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    return _asked(CHAT, messages=messages, tools=tools, tool_choice="required", max_tokens=8000, **NO_REASONING)


def _reasoning(draw: Random) -> bytes:
    limit = draw.choice([1, HUGE])
    return _asked(CHAT, messages=[QUESTION], thinking_token_budget=limit, max_tokens=900, ignore_eos=True)


def _assistant(draw: Random) -> bytes:
    """A request as an assistant sends it, with texts that no other one has."""
    recorded = json.loads(draw.choice(sorted(FIXTURES.glob("*.json"))).read_text())
    text = json.dumps(recorded["body"] | {"model": CALLING_MODEL}, ensure_ascii=False)
    length = (CHARACTERS - len(text)) // text.count("…")
    sentences = "The little dog ran to the park. " * (length // 32 + 1)
    filled = re.sub("…", lambda _: f"{draw.getrandbits(32)} {sentences}"[:length], text)
    return post(filled.encode(), recorded["path"])


_FLOODS: Mapping[str, tuple[Callable[[Random], bytes], int]] = {
    "300 heavy schemas at once": (_heavy_schema, 300),
    "hostile grammars, 16 at once": (_hostile_grammar, 16),
    "900 tools of which one must be called, 16 at once": (_required_call, 16),
    "conversations of 2,000 calls and results, 8 at once": (_conversation, 8),
    "schemas with slow masks, 16 at once": (_slow_masks, 16),
    "limits of reasoning, 1 and huge, 64 at once": (_reasoning, 64),
    "64 requests of coding assistants at once": (_assistant, 64),
}
GUIDED_FLOODS: Mapping[str, Strike] = {
    name: partial(flood_of, draw, at_once) for name, (draw, at_once) in _FLOODS.items()
}
