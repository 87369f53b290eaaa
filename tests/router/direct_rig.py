"""Direct clients and raw Grant calls before a router and fake workers, and timers that tests let go off."""

import asyncio
from typing import Any

import grpc
import pytest

from tests.router.cluster import Cluster, refusal, until
from tests.router.fake_worker import FakeChoice, FakeWorker
from trunkline import Client
from trunkline.client.client import Piece
from trunkline.grant import LIFETIME_S
from trunkline.v1.inference_pb2 import ChoiceLedger, DirectLost, GenerateRequest, GrantRequest, GrantResponse, TokenIds
from trunkline.v1.worker_pb2 import Resume
from trunkline_router.request.grant_charge import GrantCharge

KEY = b"a key of thirty-two bytes, or so"
PROMPT = list(range(10, 30))
CALL_TIMEOUT_S = 60.0


def fakes(*names: str, **fields: Any) -> list[FakeWorker]:
    return [FakeWorker(name, **{"answer": None, "grant_key": KEY, **fields}) for name in names]


def direct(router: Cluster, **options: Any) -> Client:
    """A direct client. It makes one try unless told otherwise, so that a test sees every refusal."""
    return Client(f"127.0.0.1:{router.port}", direct=True, **{"retries": 0, **options})


class Stream:
    """A request of a direct client, read in the background."""

    def __init__(self, client: Client, prompt: list[int] = PROMPT, **options: Any) -> None:
        self.pieces: list[Piece] = []
        self.task = asyncio.create_task(self._read(client.generate(prompt, **options)))

    async def _read(self, pieces: Any) -> list[Piece]:
        async for piece in pieces:
            self.pieces.append(piece)
        return self.pieces

    def tokens(self, index: int = 0) -> list[int]:
        return [token for piece in self.pieces if piece.index == index for token in piece.token_ids]

    async def came(self, tokens: int) -> None:
        await until(lambda: sum(len(piece.token_ids) for piece in self.pieces) == tokens)


async def arrival(workers: list[FakeWorker]) -> FakeChoice:
    """The next choice, at whichever worker."""
    await until(lambda: any(not worker.arrived.empty() for worker in workers))
    return next(worker.arrived for worker in workers if not worker.arrived.empty()).get_nowait()


async def choices(workers: list[FakeWorker], count: int) -> list[FakeChoice]:
    """The next ones, in the order of their numbers: each comes on a stream of its own."""
    return sorted([await arrival(workers) for _ in range(count)], key=lambda choice: choice.submit.choice)


class Call:
    """A Grant call that says what the test makes it say."""

    def __init__(self, router: Cluster, prompt: list[int] = PROMPT, **fields: Any) -> None:
        self.call = router.stub.Grant(timeout=CALL_TIMEOUT_S)
        self.first = GrantRequest(request=GenerateRequest(token_ids=TokenIds(ids=prompt), **fields))

    async def begin(self) -> GrantResponse:
        return await self.ask(self.first)

    async def ask(self, message: GrantRequest) -> GrantResponse:
        await self.call.write(message)
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF
        granted: GrantResponse = answer
        return granted

    async def refused(self, message: GrantRequest) -> Any:
        await self.call.write(message)
        return await refusal(Reads(self.call))


class Timers:
    """Of grants: they expire when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._charges: set[GrantCharge] = set()
        grant = GrantCharge.grant

        def noted(charge: GrantCharge, *arguments: Any, **more: Any) -> None:
            self._charges.add(charge)
            grant(charge, *arguments, **more)

        monkeypatch.setattr(GrantCharge, "grant", noted)

    async def go_off(self) -> None:
        await until(lambda: bool(self._charges))
        for charge in self._charges:
            assert charge._expiry is not None
            assert charge._expiry.when() - asyncio.get_running_loop().time() > LIFETIME_S
            if not charge._expiry.cancelled():
                charge._expire()


class Reads:
    """What refusal() takes, of a call that is written to as well."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __await__(self) -> Any:
        return self._call.read().__await__()


def lost(*token_ids: int, **fields: Any) -> GrantRequest:
    output = Resume(output_token_ids=token_ids, text_bytes_sent=len(token_ids))
    return GrantRequest(lost=DirectLost(ledgers=[ChoiceLedger(output=output)] if token_ids else [], **fields))
