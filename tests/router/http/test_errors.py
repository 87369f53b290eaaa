"""The error table over HTTP, and headers."""

import json
from typing import Any

import pytest

from tests.router.http.http_rig import connected, echo, error_of, get, serving
from trunkline import status
from trunkline.status import RequestRefused, internal, invalid, no_worker
from trunkline_router.access.access import credential_of
from trunkline_router.edge.http.headers import RequestHeaders, parse_headers, response_headers
from trunkline_router.http_app import App
from trunkline_router.record.error_statuses import ANTHROPIC_PATH, body_for, openai_body, refusal_headers, status_of
from trunkline_router.record.refused_calls import RefusedCalls
from trunkline_runtime.telemetry.trace_context import TraceContext, trace_context

TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("reason", "http", "anthropic"),
    [
        (status.INVALID_REQUEST, 400, "invalid_request_error"),
        (status.CONTEXT_LENGTH_EXCEEDED, 400, "invalid_request_error"),
        (status.MODEL_NOT_FOUND, 404, "not_found_error"),
        (status.UNAUTHENTICATED, 401, "authentication_error"),
        (status.FORBIDDEN, 403, "permission_error"),
        (status.OVERLOADED, 429, "rate_limit_error"),
        (status.QUOTA_EXCEEDED, 429, "rate_limit_error"),
        (status.NO_WORKER, 503, "overloaded_error"),
        (status.DEADLINE_EXCEEDED, 504, "timeout_error"),
        (status.QUARANTINED, 422, "invalid_request_error"),
        (status.INTERNAL, 500, "api_error"),
    ],
)
def test_each_reason_has_the_status_of_the_table(reason: str, http: int, anthropic: str) -> None:
    code = status.code_of(reason)
    assert code is not None
    refused = RequestRefused(code, reason, "it says why")
    assert status_of(refused) == http
    assert error_of(openai_body(refused))["message"] == "it says why"
    assert json.loads(body_for(ANTHROPIC_PATH, refused, "req-1")) == {
        "type": "error",
        "error": {"type": anthropic, "message": "it says why"},
        "request_id": "req-1",
    }
    assert status_of(RequestRefused(code, "OF_A_NEWER_VERSION", "")) == status_of(RequestRefused(code, reason, "")) or (
        reason in (status.CONTEXT_LENGTH_EXCEEDED, status.QUOTA_EXCEEDED)
    )


def test_invalid_field_is_the_param() -> None:
    assert error_of(openai_body(invalid("n", "is 0")))["param"] == "n"
    assert error_of(openai_body(no_worker("none")))["param"] is None


def test_retry_after_is_in_whole_seconds_rounded_up() -> None:
    assert refusal_headers(no_worker("none", 1)) == [(b"retry-after", b"1"), (b"retry-after-ms", b"1")]
    assert refusal_headers(no_worker("none", 2001)) == [(b"retry-after", b"3"), (b"retry-after-ms", b"2001")]
    assert refusal_headers(invalid("n", "is 0")) == []


def test_clients_are_told_where_a_retry_is_useless() -> None:
    never = (b"x-should-retry", b"false")
    for reason in (status.QUARANTINED, status.INTERNAL, status.QUOTA_EXCEEDED):
        assert refusal_headers(RequestRefused(status.code_of(reason) or 0, reason, "")) == [never], reason
    quota = RequestRefused(status.CODE_RESOURCE_EXHAUSTED, status.QUOTA_EXCEEDED, "", retry_delay_ms=120_000)
    assert never not in refusal_headers(quota)
    quota.retry_delay_ms += 1  # Anthropic's client would wait for a month
    assert never in refusal_headers(quota)
    assert refusal_headers(RequestRefused(status.CODE_RESOURCE_EXHAUSTED, status.OVERLOADED, "")) == []


def test_internal_tells_the_request_id_alone() -> None:
    error = error_of(openai_body(internal("req-1")))
    assert "req-1" in error["message"]
    assert error["code"] == "internal"


def test_message_that_quotes_half_a_character_is_still_a_body() -> None:
    assert error_of(openai_body(invalid("a", "\ud800 and " + "x" * 10_000)))["message"].endswith("…")


@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ([], ""),
        ([(b"authorization", b"Bearer xyz")], "xyz"),
        ([(b"authorization", b"bearer  xyz ")], "xyz"),
        ([(b"x-api-key", b"xyz")], "xyz"),
        ([(b"authorization", b"Bearer xyz"), (b"x-api-key", b"xyz")], "xyz"),
    ],
)
def test_credential_is_found_and_not_shown(headers: Any, credential: str) -> None:
    parsed = parse_headers(headers)
    assert credential_of(parsed.metadata) == credential
    assert "xyz" not in repr(parsed)


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ([(b"x-session-affinity", b"ses_1"), (b"x-session-id", b"2")], "ses_1"),  # opencode
        ([(b"x-claude-code-session-id", b"1f0b")], "1f0b"),
        ([(b"session-id", b"01a2")], "01a2"),  # Codex
        ([(b"session-id", b"01a2"), (b"x-trunkline-session", b"mine")], "mine"),
        ([(b"session-id", b"x" * 257)], ""),
        ([(b"session-id", b"\xff"), (b"session-id", b"again")], ""),
    ],
)
def test_a_session_is_named_as_assistants_name_it(headers: Any, session: str) -> None:
    assert dict(parse_headers(headers).metadata or ()).get("x-trunkline-session", "") == session


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Basic abc")],
        [(b"authorization", b"Bearer abc"), (b"x-api-key", b"abd")],
        [(b"x-api-key", b"\xff")],
        [(b"x-api-key", b"a" * 9000)],
    ],
)
def test_unusable_credential_is_refused_without_quoting_it(headers: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        credential_of(parse_headers(headers).metadata)
    assert caught.value.reason == status.UNAUTHENTICATED
    assert "ab" not in caught.value.message


def test_header_given_twice_is_refused() -> None:
    for name in (b"authorization", b"x-request-id", b"x-trunkline-tenant", b"content-type"):
        with pytest.raises(RequestRefused, match="more than once"):
            parse_headers([(name, b"Bearer a"), (name, b"Bearer a")])


def test_request_id_is_the_client_s_or_a_new_one() -> None:
    assert parse_headers([(b"x-request-id", b"req-1")]).request_id == "req-1"
    assert len({parse_headers([]).request_id for _ in range(10)}) == 10
    for unusable in (b"", b"a b", b"\xff", b"a" * 200, b"a\tb"):
        with pytest.raises(RequestRefused, match="x-request-id"):
            parse_headers([(b"x-request-id", unusable)])


def trace_of(headers: RequestHeaders) -> TraceContext | None:
    found = dict(headers.metadata or ())
    return trace_context(str(found.get("traceparent", "")), str(found.get("tracestate", "")))


@pytest.mark.parametrize(
    "unusable",
    [b"", b"00-" + b"0" * 32 + TRACE[35:], TRACE.upper(), TRACE + b"-more", b"ff" + TRACE[2:], TRACE[:-1]],
)
def test_malformed_trace_is_ignored(unusable: bytes) -> None:
    parsed = parse_headers([(b"traceparent", unusable), (b"tracestate", b"a=b")])
    assert trace_of(parsed) is None


def test_trace_is_passed_on() -> None:
    parsed = parse_headers([(b"traceparent", TRACE), (b"tracestate", b"a=b"), (b"tracestate", b"c=d")])
    trace = trace_of(parsed)
    assert trace is not None
    assert (trace.traceparent, trace.tracestate) == (TRACE.decode(), "a=b,c=d")
    assert trace_of(parse_headers([(b"traceparent", b"01" + TRACE[2:] + b"-more")])) is not None


@pytest.mark.parametrize("header", [(b"authorization", b"Bearer "), (b"x-api-key", b"")])
def test_an_empty_credential_is_none(header: tuple[bytes, bytes]) -> None:
    assert credential_of(parse_headers([header]).metadata) == ""


def test_response_headers_tell_what_is_known() -> None:
    assert response_headers("req-1") == [(b"x-request-id", b"req-1"), (b"request-id", b"req-1")]
    assert response_headers("r", worker="w:1", cached_tokens=0)[2:] == [
        (b"x-trunkline-worker", b"w:1"),
        (b"x-trunkline-cached-tokens", b"0"),
    ]


async def test_unknown_paths_and_wrong_methods_get_json() -> None:
    app = App({"GET /a": echo, "DELETE /a/{name}/{rest:path}/end": echo}, RefusedCalls())
    async with serving(app) as server, connected(server) as client:
        client.send(get("/b"))
        http, _, body = await client.response()
        assert (http, error_of(body)["code"]) == (404, "not_found")
        client.send(get("/a").replace(b"GET", b"DELETE"))
        http, headers, body = await client.response()
        assert (http, error_of(body)["code"]) == (405, "method_not_allowed")
        assert set(headers["allow"].split(", ")) == {"GET", "HEAD"}
        for path, status in (("/a/b/c/d/end", 200), ("/a/b//end", 200), ("/a/b/end", 404), ("/a/b/c/d", 404)):
            client.send(get(path).replace(b"GET", b"DELETE"))
            assert (await client.response())[0] == status, path


async def test_errors_under_messages_have_the_shape_of_anthropic() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("broken"):
            raise ValueError(scope["path"])
        await routed(scope, receive, send)

    routed = App({"POST /v1/messages": echo}, RefusedCalls())
    expected = {
        get("/v1/messages"): (405, "invalid_request_error"),
        get("/v1/messages/batches"): (404, "not_found_error"),
        get("/v1/messages/broken"): (500, "api_error"),
        get("/v1/messages?" + "a" * 9000): (414, "invalid_request_error"),
    }
    async with serving(broken) as server:
        for request, (http, kind) in expected.items():
            async with connected(server) as client:
                client.send(request)
                told, headers, body = await client.response()
                error = json.loads(body)
                assert (told, error["type"], error["error"]["type"]) == (http, "error", kind)
                assert error["request_id"] == headers.get("request-id")
        async with connected(server) as client:
            client.send(get("/v1/messages2"))
            _, _, body = await client.response()
            assert error_of(body)["code"] == "not_found", "a path of its own"
