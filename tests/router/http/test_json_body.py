"""Bodies: what is JSON, what is too much of it, and how long it may hold the event loop."""

import asyncio
import gc
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.http.http_rig import connected, post, respond, serving
from trunkline.status import INVALID_REQUEST, RequestRefused
from trunkline_router.http import json_shape
from trunkline_router.http.json_body import check_content_type, has_body, parse_object, read_object
from trunkline_router.http.json_parser import _Parser
from trunkline_router.request.steps import STEP_BYTES

MIB = 1 << 20
PADDING = b" " * (STEP_BYTES + 1)  # makes a body long enough to be parsed in steps
SIZES = [pytest.param(b"", id="short"), pytest.param(PADDING, id="long")]


def parsed(raw: bytes) -> dict[str, Any]:
    return asyncio.run(parse_object(raw))


def refusal(raw: bytes) -> str:
    with pytest.raises(RequestRefused) as caught:
        parsed(raw)
    assert caught.value.reason == INVALID_REQUEST
    assert caught.value.field == "body"
    return caught.value.message


@pytest.mark.parametrize("padding", SIZES)
@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is empty"),
        (b"[1]", "is not a JSON object"),
        (b'"a"', "is not a JSON object"),
        (b"{", "is not valid JSON"),
        (b'{"a" 1}', "':'"),
        (b'{"a": 1 "b": 2}', "is not valid JSON"),
        (b'{"a": 1,}', "is not valid JSON"),
        (b'{"a": [1,]}', "is not valid JSON"),
        (b'{"a": 01}', "is not valid JSON"),
        (b"{'a': 1}", "is not valid JSON"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": "\n"}', "Invalid control character"),
        (b'{"a": 1, "a": 2}', "has a name twice"),
        (b'{"b": {"a": 1, "\\u0061": 2}}', "has a name twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": [' + b"1," * 20 + b"1e999]}", "too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too many digits"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "is not UTF-8"),  # a surrogate
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\\uDC00\\ud800"}', "surrogate"),
        (b'{"a": "\\ud83d\\\\\\ude00"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 deep"),
        (b'{"a": ' + b"[" * 50_000, "nested more than 64 deep"),
    ],
)
def test_what_is_not_one_valid_object_is_refused_and_named(raw: bytes, problem: str, padding: bytes) -> None:
    if not raw and padding:
        problem = "is not valid JSON"
    assert problem in refusal(padding + raw)


@pytest.mark.parametrize("padding", SIZES)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800", "c": "\\\\\\"[[[{{", "d": "\\"", "e": "\\\\"}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"a": [' + b"[]," * 1000 + b"[]]}",
        b'{"a": [' + b"1, -2.5, 3e5 ,\n" * 10_000 + b'"x", null, true, {}, 4]}',
        b"{}",
    ],
)
def test_legal_bodies_pass(raw: bytes, padding: bytes) -> None:
    assert parsed(padding + raw) == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b'{"a": [' + b"[]," * json_shape.MAX_CONTAINERS + b"0]}", "lists and objects"),
        (b'{"a": [' + b'"",' * json_shape.MAX_STRINGS + b"0]}", "strings"),
        (b'{"a": [' + b"0," * json_shape.MAX_VALUES + b"0]}", "values"),
    ],
)
def test_number_of_values_is_bounded(raw: bytes, what: str) -> None:
    assert what in refusal(raw)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8") | st.sampled_from('\\"[]{},\U0001f600'))
    | st.lists(st.integers(0, 200_000), min_size=15, max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)  # fmt: skip


@given(value=VALUES, ascii_only=st.booleans(), step=st.integers(1, 40))
def test_any_value_is_parsed_like_the_standard_library_does(value: Any, ascii_only: bool, step: int) -> None:
    text = json.dumps({"v": value}, ensure_ascii=ascii_only)

    async def run() -> Any:
        shape = json_shape._Shape()  # with cuts at every place
        raw = text.encode()
        for start in range(0, len(raw), step):
            shape.add(raw[start : start + step], is_last=start + step >= len(raw))
        assert (shape._depth, shape._in_string) == (0, False)
        return await _Parser(text).parse()

    assert asyncio.run(run()) == {"v": value}


@given(raw=st.binary(max_size=60) | st.text('{}[]"\\:,0eu.-dD8 nul', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    for padded in (raw, PADDING + raw):
        try:
            value: Any = parsed(padded)
        except RequestRefused as error:
            value = error
        assert isinstance(value, dict) or value.reason == INVALID_REQUEST


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"prompt": [' + b"123456," * MIB + b"1]}", id="token ids"),
        pytest.param(b'{"prompt": "' + b"word " * (4 * MIB // 5) + b'"}', id="text"),
        pytest.param(b'{"prompt": "' + "é".encode() * (2 * MIB) + b'"}', id="text that is not ASCII"),
        pytest.param(
            b'{"messages": [' + b",".join([b'{"role": "user", "content": "' + b"x" * 900 + b'"}'] * 4000) + b"]}",
            id="messages",
        ),
        pytest.param(b'{"a": [' + b"[]," * 60_000 + b" " * 300_000 + b"[]]}", id="lists"),
    ],
)
def test_long_bodies_let_other_tasks_run(raw: bytes) -> None:
    """CPU time counts, not time: the machine may be busy."""

    async def run() -> float:
        longest_s = 0.0
        parsing = asyncio.create_task(parse_object(raw))
        while not parsing.done():
            begin_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - begin_s)
        assert await parsing == json.loads(raw)
        return longest_s

    gc.disable()  # a collection would look at all that the tests before have left
    try:
        longest_s = min(asyncio.run(run()) for _ in range(3))
    finally:
        gc.enable()
    assert longest_s < 0.025  # without steps: 30 to 100 ms; a step takes one or two, on a machine that is not busy


def test_other_types_than_json_are_refused() -> None:
    check_content_type("application/json")
    for content_type in ("text/plain", "", "application/x-www-form-urlencoded"):
        with pytest.raises(RequestRefused, match="content-type: must be application/json"):
            check_content_type(content_type)


async def test_a_handler_can_tell_whether_it_would_wait_for_the_body() -> None:
    asked, answers = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answers.append(has_body(scope))
        asked.set()
        await respond(send, json.dumps(await read_object(receive)).encode())

    whole = post(b'{"a": 1}')
    async with serving(app) as server, connected(server) as client:
        for sent in ([whole], [whole[:-1], whole[-1:]]):
            for part in sent:
                asked.clear()
                client.send(part)
                if part is not sent[-1]:
                    await asked.wait()
            assert json.loads((await client.response())[2]) == {"a": 1}
    assert answers == [True, False]
