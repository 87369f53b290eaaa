"""JSON bodies at and beyond every edge, whole and damaged, to every endpoint that takes one."""

import http.client
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.json_bodies import ENDPOINTS, bodies_of, damaged, json_bytes, with_large_numbers
from tests.fuzz.target import GOOD_S, Target

FEW, MANY = 25, int(os.environ.get("TRUNKLINE_FUZZ_EXAMPLES", "150"))
ANSWERED, REFUSED = (200,), (400, 404, 422, 429)
GROWN_MIB = 64.0  # by thousands of requests
INTERNAL = (b'"internal"', b'"api_error"', b"internal error")


def asked(connection: http.client.HTTPConnection, path: str, body: bytes) -> None:
    """Fails unless the request is answered or refused, in the shape of its endpoint, within the time of a good one."""
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except OSError as error:
        connection.close()  # the next request opens another one
        raise AssertionError(f"{path}: {body[:2000]!r}: {error!r}") from None
    case = f"{path}: {body[:2000]!r} → {response.status} {answer[:2000]!r}"
    assert response.status in (*ANSWERED, *REFUSED), case
    assert not any(word in answer for word in INTERNAL), case
    if response.headers["content-type"] == "application/json":
        assert isinstance(json.loads(answer), dict), case
    else:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8", case
        assert answer.endswith(b"\n\n"), case
    if response.status in REFUSED:
        message = json.loads(answer)["error"]["message"]
        assert message, case
        assert len(message) <= 401, case


def fuzz(target: Target, path: str, *, examples: int) -> None:
    model, base = ENDPOINTS[path]
    connection = http.client.HTTPConnection("127.0.0.1", target.http_port, timeout=GOOD_S)
    whole = bodies_of(model, base).map(json_bytes)
    bodies = st.one_of(whole, whole, whole, whole.flatmap(damaged))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies)
    def ask(body: bytes) -> None:
        asked(connection, path, body)

    try:
        ask()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_body_is_answered_or_refused(target: Target, path: str) -> None:
    fuzz(target, path, examples=FEW)
    target.check_unharmed()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_number_makes_the_router_grow(target: Target, path: str) -> None:
    before = target.check_unharmed()
    connection = http.client.HTTPConnection("127.0.0.1", target.http_port, timeout=GOOD_S)
    try:
        for body in with_large_numbers(*ENDPOINTS[path]):
            asked(connection, path, json_bytes(body))
    finally:
        connection.close()
    after = target.check_unharmed()
    assert after.rss_mib - before.rss_mib < GROWN_MIB


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_many_bodies_leave_no_trace(target: Target, path: str) -> None:
    before = target.check_unharmed()
    fuzz(target, path, examples=MANY)
    after = target.check_unharmed()
    assert after.rss_mib - before.rss_mib < GROWN_MIB
