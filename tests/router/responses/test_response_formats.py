"""Responses repeat the form of the text that was asked for."""

from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.responses.responses_client import client, new_store, text_of
from trunkline.v1.worker_pb2 import Capability

ABLE = (Capability.CAPABILITY_GRAMMARS,)
TOO_LONG = 10**20  # an integer of more than 64 bits
SCHEMA = {"type": "object", "properties": {"b": {"const": TOO_LONG}, "a": {}}}
NAMED = {"type": "json_schema", "name": "thing", "schema": SCHEMA}
FORMATS: list[tuple[Any, Any]] = [
    (None, {"type": "text"}),
    ({"type": "text"}, {"type": "text"}),
    ({"type": "json_object"}, {"type": "json_object"}),
    (NAMED, {**NAMED, "strict": None}),
    ({"type": "json_schema", "schema": {}}, {"type": "json_schema", "name": "", "schema": {}, "strict": None}),
    ({**NAMED, "description": "A thing.", "strict": True}, {**NAMED, "description": "A thing.", "strict": True}),
]


@pytest.mark.parametrize(("asked", "repeated"), FORMATS)
async def test_a_response_repeats_its_format(asked: Any, repeated: Any) -> None:
    async with client(FakeWorker("w", answer=3, capabilities=ABLE), store=new_store()) as responses:
        whole = await responses.response(text={"format": asked})
        streamed = await responses.streamed(text={"format": asked})
        stored = (await responses.get(whole["id"])).json()
        later = await responses.response(previous_response_id=whole["id"])
    told = [whole, stored, *(event["response"] for event in streamed if "response" in event)]
    assert [response["text"] for response in told] == [{"format": repeated}] * 5
    assert later["text"] == {"format": {"type": "text"}}, "a later response has its own format"
    assert text_of(whole) == "xxx"


async def test_a_response_repeats_tools_with_integers_of_any_size() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"const": TOO_LONG}, "description": None, "strict": None}
    async with client(FakeWorker("w", answer=1)) as responses:
        assert (await responses.response(tools=[tool], tool_choice="none"))["tools"] == [tool]
