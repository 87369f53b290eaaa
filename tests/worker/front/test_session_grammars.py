"""A session keeps the grammars that it is sent, and its submits name them by their digests."""

from typing import Any

import grpc
import pytest

from tests.router.cluster import refusal
from tests.worker.front.served_front import MODEL, ServedFront, served_front
from trunkline.grant import GrantKeys, sign_grant
from trunkline.names import grammar_digest
from trunkline.status import INVALID_REQUEST
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    Capability,
    GetModelResponse,
    Grammar,
    GrammarKind,
    SessionRequest,
    Submit,
    Work,
    WorkerServiceGenerateRequest,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline.validation import MAX_GRAMMAR_BYTES
from trunkline_runtime.channel import open_channel

ABLE = GetModelResponse()
ABLE.CopyFrom(MODEL)
ABLE.capabilities.append(Capability.CAPABILITY_GRAMMARS)
ABLE.max_session_grammar_bytes = 2 * MAX_GRAMMAR_BYTES


def regex(text: str) -> Grammar:
    grammar = Grammar(kind=GrammarKind.GRAMMAR_KIND_REGEX, text=text)
    grammar.digest = grammar_digest(grammar)
    return grammar


def submit(handle: int, grammar: Grammar) -> Submit:
    sampling = SamplingParams(seed=1, max_tokens=1)
    return Submit(handle=handle, prompt_token_ids=[5, 6], sampling=sampling, work=Work(grammar=grammar))


def named(handle: int, grammar: Grammar) -> Submit:
    return submit(handle, Grammar(digest=grammar.digest))


class Router:
    """A router's end of a session."""

    def __init__(self, worker: ServedFront, channel: grpc.aio.Channel) -> None:
        self.worker = worker
        self.session: Any = WorkerServiceStub(channel).Session()

    async def ask(self, request: SessionRequest) -> None:
        await self.session.write(request)

    async def ends_of(self, *submits: Submit) -> dict[int, str]:
        """How each submit ends: "answered", or its error's message."""
        await self.ask(SessionRequest(submits=submits))
        ends: dict[int, str] = {}
        while len(ends) < len(submits):
            for output in (await self.session.read()).outputs:
                assert not output.HasField("error") or output.error.field == "grammar"
                ends[output.handle] = output.error.message or "answered"
        return ends

    async def refusal(self) -> str:
        async def rest() -> None:
            while await self.session.read() is not grpc.aio.EOF:
                pass

        refused = await refusal(rest())
        assert (refused.reason, refused.field) == (INVALID_REQUEST, "grammar")
        return refused.message


@pytest.fixture
async def router() -> Any:
    async with served_front(model=ABLE) as worker, open_channel(worker.address) as channel:
        yield Router(worker, channel)


SMALL, LARGE = regex("a+"), regex("b" * MAX_GRAMMAR_BYTES)


async def test_the_engine_gets_the_grammar_that_a_digest_names(router: Router) -> None:
    await router.session.read()
    await router.ask(SessionRequest(grammars=[SMALL, LARGE]))
    ends = await router.ends_of(named(1, SMALL), named(2, LARGE), named(3, SMALL), named(4, regex("c")))
    unknown = ends.pop(4)
    assert "names no grammar of this session" in unknown
    assert set(ends.values()) == {"answered"}
    assert [one.work.grammar for one in router.worker.engine.submits] == [SMALL, LARGE, SMALL]


async def test_what_is_dropped_makes_room(router: Router) -> None:
    await router.session.read()
    for text in "cdef":
        grammar = regex(text * MAX_GRAMMAR_BYTES)
        await router.ask(SessionRequest(grammars=[grammar]))
        assert await router.ends_of(named(1, grammar)) == {1: "answered"}
        await router.ask(SessionRequest(dropped_grammars=[grammar.digest, b"never known"]))
        assert "names no grammar" in (await router.ends_of(named(2, grammar)))[2]
    for _ in range(3):  # sending one again takes no more room
        await router.ask(SessionRequest(grammars=[LARGE]))
    assert await router.ends_of(named(3, LARGE)) == {3: "answered"}


async def test_a_session_with_too_many_grammars_ends(router: Router) -> None:
    await router.session.read()
    await router.ask(SessionRequest(grammars=[LARGE]))
    await router.ask(SessionRequest(grammars=[SMALL, regex("c" * MAX_GRAMMAR_BYTES)]))
    assert f"more than {2 * MAX_GRAMMAR_BYTES} bytes" in await router.refusal()


@pytest.mark.parametrize(
    "invalid", [Grammar(kind=GrammarKind.GRAMMAR_KIND_REGEX), regex("b" * MAX_GRAMMAR_BYTES + "b")]
)
async def test_a_session_with_an_invalid_grammar_ends(router: Router, invalid: Grammar) -> None:
    await router.session.read()
    await router.ask(SessionRequest(grammars=[invalid]))
    await router.refusal()


@pytest.mark.parametrize("kind", [0, 99, 1 << 20])
async def test_a_grammar_of_a_kind_that_a_newer_router_knows_costs_its_submit_alone(router: Router, kind: Any) -> None:
    await router.session.read()
    await router.ask(SessionRequest(grammars=[Grammar(digest=b"new", kind=kind, text="a"), SMALL]))
    ends = await router.ends_of(named(1, Grammar(digest=b"new")), named(2, SMALL))
    assert "names no grammar" in ends[1]
    assert ends[2] == "answered"


async def test_workers_trust_no_digest(router: Router) -> None:
    """Compiled grammars are shared, so one tenant's must not take the name of another one's."""
    await router.session.read()
    false = Grammar(digest=SMALL.digest, kind=LARGE.kind, text="never")
    await router.ask(SessionRequest(grammars=[false]))
    ends = await router.ends_of(named(1, SMALL), named(2, regex("never")))
    assert "names no grammar" in ends[1]
    assert ends[2] == "answered"


async def test_sessions_share_no_grammars(router: Router) -> None:
    await router.session.read()
    await router.ask(SessionRequest(grammars=[SMALL]))
    async with open_channel(router.worker.address) as channel:
        other = Router(router.worker, channel)
        await other.session.read()
        assert "names no grammar" in (await other.ends_of(named(1, SMALL)))[1]
        other.session.cancel()
    assert await router.ends_of(named(1, SMALL)) == {1: "answered"}


@pytest.mark.parametrize("key", [b"", b"k" * 32])
async def test_a_direct_client_brings_its_grammar(key: bytes) -> None:
    async with served_front(key, model=ABLE) as worker, open_channel(worker.address) as channel:

        async def generate(grammar: Grammar) -> str:
            asked = submit(1, grammar)
            request = WorkerServiceGenerateRequest(submit=asked)
            if key:
                assert GrantKeys(key).newest == key
                grant = sign_grant(key, asked, epoch=ABLE.epoch, expires_unix_ms=1 << 50)
                request = WorkerServiceGenerateRequest(grant=grant)
            call: Any = WorkerServiceStub(channel).Generate(request)
            try:
                return f"{len([response async for response in call])} responses"
            except grpc.aio.AioRpcError as error:
                return str(error.details())

        unnamed, misnamed = Grammar(kind=SMALL.kind, text="d"), Grammar(digest=b"x", kind=SMALL.kind, text="e")
        for grammar in (SMALL, LARGE, unnamed, misnamed):
            assert await generate(grammar) == "1 responses"
        found = [one.work.grammar for one in worker.engine.submits]
        assert [one.digest for one in found] == [grammar_digest(one) for one in found]
        assert "not 1 to" in await generate(Grammar(kind=SMALL.kind, digest=SMALL.digest))
