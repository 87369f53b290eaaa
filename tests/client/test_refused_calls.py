"""Refused calls are sent again, by both clients, against a real server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.client.scripted_service import Kind, ScriptedService, complete, model_names, serving
from trunkline.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotAllowed,
    NoWorker,
    Overloaded,
    TrunklineError,
    Unauthenticated,
)
from trunkline.status import RequestRefused, invalid, no_worker
from trunkline.v1.inference_pb2 import GrantResponse
from trunkline_bench.servers.ports import free_port

both = pytest.mark.parametrize("kind", list(Kind))

FULL = RequestRefused(8, "OVERLOADED", "full", retry_delay_ms=20)
USED_UP = RequestRefused(8, "QUOTA_EXCEEDED", "used up", retry_delay_ms=20)
LOST = no_worker("none", 20)


@both
@pytest.mark.parametrize("refusal", [FULL, USED_UP, LOST], ids=lambda refusal: refusal.reason)
async def test_a_refusal_with_a_delay_is_waited_out_under_the_same_request_id(
    kind: Kind, refusal: RequestRefused
) -> None:
    service = ScriptedService(refusals=[refusal, refusal])
    async with serving(service):
        answer = await complete(kind, service.address)
    assert answer.text == "ab"
    first, second, third = service.asked
    assert second.at_s - first.at_s >= 0.02
    assert third.at_s - second.at_s >= 0.04
    assert first.request_id
    assert first.request_id == third.request_id == answer.request_id


@both
async def test_calls_with_one_response_are_sent_again_too(kind: Kind) -> None:
    service = ScriptedService(refusals=[FULL, LOST])
    async with serving(service):
        assert await model_names(kind, service.address) == ["m"]
    assert len(service.asked) == 3


@both
@pytest.mark.parametrize("retries", [0, 1])
async def test_the_last_refusal_is_raised_with_its_delay_and_its_request(kind: Kind, retries: int) -> None:
    service = ScriptedService(refusals=[FULL] * 5)
    async with serving(service):
        with pytest.raises(Overloaded) as caught:
            await complete(kind, service.address, retries=retries)
    assert len(service.asked) == 1 + retries
    assert caught.value.retry_after_s == 0.02
    assert caught.value.request_id == service.asked[0].request_id


@both
async def test_a_delay_beyond_the_deadline_is_not_waited_for(kind: Kind) -> None:
    service = ScriptedService(refusals=[RequestRefused(8, "OVERLOADED", "full", retry_delay_ms=2_000_000)])
    async with serving(service):
        with pytest.raises(Overloaded):
            await complete(kind, service.address, timeout_s=1900.0)
    assert len(service.asked) == 1


@both
async def test_after_output_nothing_is_sent_again(kind: Kind) -> None:
    service = ScriptedService(late_refusal=FULL)
    async with serving(service):
        with pytest.raises(Overloaded) as caught:
            await complete(kind, service.address)
    assert len(service.asked) == 1
    assert caught.value.request_id == service.asked[0].request_id


@both
@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (invalid("n", "no"), InvalidRequest),
        (RequestRefused(16, "UNAUTHENTICATED", "no", retry_delay_ms=10), Unauthenticated),
        (RequestRefused(7, "FORBIDDEN", "no", retry_delay_ms=10), Forbidden),
        (RequestRefused(13, "INTERNAL", "no", retry_delay_ms=10), TrunklineError),
    ],
    ids=lambda value: getattr(value, "reason", ""),
)
async def test_what_a_retry_would_not_change_is_asked_once(
    kind: Kind, refusal: RequestRefused, error: type[TrunklineError]
) -> None:
    service = ScriptedService(refusals=[refusal])
    async with serving(service):
        with pytest.raises(error) as caught:
            await complete(kind, service.address)
    assert len(service.asked) == 1
    assert isinstance(caught.value, NotAllowed) == (refusal.code in (7, 16))


@both
async def test_a_server_that_starts_between_two_tries_answers(kind: Kind) -> None:
    port, service = free_port(), ScriptedService()
    asking = asyncio.create_task(complete(kind, f"127.0.0.1:{port}", retries=8))
    done, _ = await asyncio.wait({asking}, timeout=0.3)
    assert not done, "the first failed connection was not the end"
    async with serving(service, port):
        assert (await asking).text == "ab"
    assert len(service.asked) == 1


@both
async def test_where_no_server_is_the_error_has_no_reason(kind: Kind) -> None:
    with pytest.raises(NoWorker) as caught:
        await complete(kind, f"127.0.0.1:{free_port()}", retries=1)
    assert caught.value.reason == ""
    assert caught.value.request_id


@both
async def test_the_clients_deadline_counts_for_calls_that_set_none(kind: Kind) -> None:
    service = ScriptedService(endless=True)
    async with serving(service):
        with pytest.raises(DeadlineExceeded):
            await complete(kind, service.address, timeout_s=None, default_timeout_s=0.3)


class GrantsRefused(ScriptedService):
    """A router that is full when it is first asked for a grant, and then gives none."""

    async def Grant(self, request_iterator: Any, context: Any) -> AsyncIterator[GrantResponse]:
        await anext(request_iterator)
        self._arrived("", context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)
        yield GrantResponse()


async def test_a_direct_clients_refused_calls_are_sent_again_with_the_key() -> None:
    service = GrantsRefused(refusals=[FULL])
    async with serving(service):
        answer = await complete(Kind.ASYNC, service.address, direct=True, api_key="k")
    assert answer.text == "ab"
    first, second, routed = service.asked
    assert second.at_s - first.at_s >= 0.02
    assert (first.request_id, second.request_id) == ("", "")
    assert routed.request_id == answer.request_id
    assert {asked.metadata["authorization"] for asked in service.asked} == {"Bearer k"}
