"""Bodies: what is JSON, what is too much of it, and how long it may hold the event loop."""

import asyncio
import gc
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.http.hostile_bodies import HOSTILE
from tests.router.http.http_rig import connected, post, respond, serving
from trunkline.status import INVALID_REQUEST, RequestRefused
from trunkline_router.edge.http import json_body
from trunkline_router.edge.http.exchange import has_body
from trunkline_router.edge.http.json_body import MAX_DEPTH, check_content_type, parse_object, read_body
from trunkline_router.edge.http.limits import HttpLimits

MIB = 1 << 20
PADDING = b" " * (json_body.ALWAYS_WITHIN_BYTES + 1)  # makes a body long enough to be checked before it is parsed
LIMIT_BYTES = HttpLimits().max_body_bytes
# CPU time of the longest step of the costliest body: 0.06 s on a slow core. A parser that goes back over blanks takes
# more than a second, and so do millions of lists.
MOST_STEP_S = 0.3
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
        (b'{"a" 1}', "expected `:`"),
        (b'{"a": 1 "b": 2}', "is not valid JSON"),
        (b'{"a": 1,}', "is not valid JSON"),
        (b'{"a": [1,]}', "is not valid JSON"),
        (b'{"a": 01}', "is not valid JSON"),
        (b"{'a': 1}", "is not valid JSON"),
        (b'{"a": 1} x', "trailing characters"),
        (b'{"a": "\n"}', "control character"),
        (b'{"secret": 1, "secret": 2}', "has a name twice"),
        (b'{"b": {"secret": 1, "s\\u0065cret": 2}}', "has a name twice"),
        (b'{"a": NaN}', "is not valid JSON"),
        (b'{"a": [-Infinity]}', "is not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "number out of range"),
        (b'{"a": "\xff"}', "invalid unicode"),
        (b'{"a": "\xed\xa0\x80"}', "invalid unicode"),  # a surrogate
        (b'{"a": "\\ud800"}', "hex escape"),
        (b'{"a": "\\uDC00\\ud800"}', "surrogate"),
        (b'{"a": "\\ud83d\\\\\\ude00"}', "hex escape"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "recursion limit"),
        (b'{"a": ' + b"[" * 30_000, "recursion limit"),
    ],
)
def test_what_is_not_one_valid_object_is_refused_and_named(raw: bytes, problem: str, padding: bytes) -> None:
    if not raw and padding:
        problem = "is not valid JSON"
    told = refusal(padding + raw)
    assert problem in told
    assert "\n" not in told
    assert "secret" not in told


@pytest.mark.parametrize("padding", SIZES)
@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800", "c": "\\\\\\"[[[{{", "d": "\\"", "e": "\\\\"}',
        b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}",
        b'{"a": 18446744073709551616, "b": -123456789012345678901234567890, "c": 1.7e308}',
        b'{"a": [' + b"[]," * 1000 + b"[]]}",
        b'{"a": [' + b"1, -2.5, 3e5 ,\n" * 10_000 + b'"x", null, true, {}, 4]}',
        b"{}",
    ],
)
def test_legal_bodies_pass(raw: bytes, padding: bytes) -> None:
    assert parsed(padding + raw) == json.loads(raw)


@pytest.mark.parametrize(
    ("element", "most", "what"),
    [
        (b"[],", json_body.MAX_CONTAINERS, "lists and objects"),
        (b'"",', json_body.MAX_STRINGS, "strings"),
        (b"0,", json_body.MAX_VALUES, "values"),
        (b"9" * 4000 + b",", json_body.MAX_DIGITS // 4000, "digits"),
    ],
)
def test_number_of_values_is_bounded(element: bytes, most: int, what: str) -> None:
    few = most - 10
    assert len(parsed(b'{"a": [' + element * few + b"0]}")["a"]) == few + 1
    assert what in refusal(b'{"a": [' + element * most + b"0]}")


def test_what_is_within_a_text_counts_as_one_string() -> None:
    text = '[{"a": 1, "b": [2]}, "\\\\"]\n' * (2 * json_body.MAX_VALUES // 30)
    assert parsed(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_a_context_of_256_ki_token_ids_fits_a_body() -> None:
    """As Python's own encoder writes them, with a blank after each comma."""
    ids = list(range(100_000, 165_536)) * 4
    raw = json.dumps({"model": "m", "prompt": ids}).encode()
    assert len(raw) <= LIMIT_BYTES
    assert parsed(raw) == {"model": "m", "prompt": ids}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8") | st.sampled_from('\\"[]{},\U0001f600'))
    | st.lists(st.integers(0, 200_000), min_size=15, max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)  # fmt: skip


@pytest.mark.parametrize("padding", SIZES)
@given(value=VALUES, ascii_only=st.booleans())
def test_any_value_is_parsed_like_the_standard_library_does(value: Any, ascii_only: bool, padding: bytes) -> None:
    text = json.dumps({"v": value}, ensure_ascii=ascii_only)
    assert parsed(padding + text.encode()) == {"v": value}


@given(raw=st.binary(max_size=60) | st.text('{}[]"\\:,0eu.-dD8 nul', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    for padded in (raw, PADDING + raw):
        try:
            value: Any = parsed(padded)
        except RequestRefused as error:
            value = error
        assert isinstance(value, dict) or value.reason == INVALID_REQUEST


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_holds_the_event_loop(name: str) -> None:
    """CPU time counts, not time: the machine may be busy."""

    async def longest_step_s(raw: bytes) -> float:
        longest_s = 0.0
        parsing = asyncio.create_task(parse_object(raw))
        while not parsing.done():
            begin_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - begin_s)
        begin_s = time.thread_time()
        result = parsing.exception()
        assert result is None or isinstance(result, RequestRefused)
        del parsing, result
        return max(longest_s, time.thread_time() - begin_s)  # freeing the objects counts, too

    gc.disable()  # a collection would look at all that the tests before have left
    try:
        for size in (LIMIT_BYTES, MIB * 2, MIB // 2, MIB // 8):  # some are too many values, and others just pass
            assert asyncio.run(longest_step_s(HOSTILE[name](size))) < MOST_STEP_S
    finally:
        gc.enable()


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
        await respond(send, json.dumps(await parse_object(await read_body(receive))).encode())

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
