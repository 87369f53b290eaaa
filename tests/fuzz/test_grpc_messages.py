"""Requests at and beyond every edge, whole and damaged, to every RPC of the router."""

import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.grpc_messages import RPCS, damaged, requests_of
from tests.fuzz.target import GOOD_S, Target
from trunkline_router.access.identity.needed_roles import METHODS

FEW, MANY = 20, int(os.environ.get("TRUNKLINE_FUZZ_EXAMPLES", "150"))
GROWN_MIB = 64.0
REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED"}
# Clients of this call may say that they have lost a worker, and there is no other one.
LOSES = "/trunkline.v1.InferenceService/Grant"
OTHERS = ("/grpc.health.v1.", "/grpc.reflection.")  # not ours


def outcome(channel: grpc.Channel, method: str, raws: list[bytes]) -> str:
    """How a call with these messages ends."""
    rpc = RPCS[method]
    kind = ("stream" if rpc.streams_requests else "unary") + ("_stream" if rpc.streams_responses else "_unary")
    call: Any = getattr(channel, kind)(method)
    request = iter(raws) if rpc.streams_requests else raws[0]
    try:
        answered = call(request, timeout=GOOD_S)
        if not rpc.ends:
            next(answered)
            answered.cancel()
        elif isinstance(answered, Iterator):
            for _ in answered:
                pass
        return "OK"
    except grpc.RpcError as error:
        return error.code().name


def fuzz(target: Target, method: str, *, examples: int) -> None:
    base = RPCS[method].base
    whole = requests_of(base).map(lambda message: message.SerializeToString())
    refused = REFUSED | {"UNAVAILABLE"} if method == LOSES else REFUSED
    messages = st.lists(st.one_of(whole, whole, whole.flatmap(damaged)), min_size=1, max_size=3)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}", options=options) as channel:

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
        @given(messages)
        def ask(raws: list[bytes]) -> None:
            ended = outcome(channel, method, raws)
            assert ended == "OK" or ended in refused, (ended, raws)

        ask()


def test_every_rpc_of_ours_is_fuzzed() -> None:
    assert RPCS.keys() == {method for method in METHODS if not method.startswith(OTHERS)}


@pytest.mark.parametrize("method", RPCS)
def test_every_message_is_answered_or_refused(target: Target, method: str) -> None:
    fuzz(target, method, examples=FEW)
    target.check_unharmed()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", RPCS)
def test_many_messages_leave_no_trace(target: Target, method: str) -> None:
    before = target.check_unharmed()
    fuzz(target, method, examples=MANY // 3 if method == LOSES else MANY)  # it waits for workers that are lost
    after = target.check_unharmed()
    assert after.rss_mib - before.rss_mib < GROWN_MIB
