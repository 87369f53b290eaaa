"""Clients whose streams end while they are answered, and clients that send what no text is: the log says nothing."""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.runtime.unimplemented_service import UnimplementedService
from trunkline.client.client import Client
from trunkline.errors import TrunklineError
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, ListModelsResponse
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline_bench.attacks.vectors.frames import (
    ACK,
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    grpc_message,
    header,
    request_headers,
)
from trunkline_runtime.server import GrpcServer

SERVICE = "trunkline.v1.InferenceService"
STREAMS = 200
SETTLED = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
MESSAGE = grpc_message(GenerateRequest(text="hi").SerializeToString())


class Answering(UnimplementedService):
    """Answers at once."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        for _ in range(3):
            yield GenerateResponse(request_id="r")

    async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:
        return ListModelsResponse()


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    made = GrpcServer("127.0.0.1", 0, services=[SERVICE])
    add_InferenceServiceServicer_to_server(Answering(), made.grpc)
    await made.start()
    yield made
    await made.stop(0)


async def sent(server: GrpcServer, parts: list[bytes]) -> None:
    """Sends the parts over one connection, then goes."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(SETTLED)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0)
    writer.close()


async def is_served(server: GrpcServer) -> bool:
    async with Client(f"127.0.0.1:{server.port}") as client:
        try:
            await client.list_models()
        except TrunklineError:
            return False
    return True


async def test_streams_that_clients_reset_while_they_are_answered_are_no_errors(
    server: GrpcServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    headers = request_headers(f"/{SERVICE}/Generate")
    parts = []
    for stream in range(1, 2 * STREAMS, 2):
        parts.append(frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, MESSAGE))
        parts.append(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
    for _ in range(3):
        await sent(server, parts)
        assert await is_served(server)
    printed = capsys.readouterr()
    assert "error" not in printed.out + printed.err
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_metadata_that_are_no_text_are_not_logged(
    server: GrpcServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def block(name: str, value: bytes) -> bytes:
        return header(name, "?" * len(value)).replace(b"?" * len(value), value)

    path = f"/{SERVICE}/ListModels".encode()
    plain = request_headers(path.decode())
    odd = (
        plain.replace(path, path[:-1] + b"\xff"),
        plain + block("authorization", b"Bearer canary-\xff"),
    )
    for headers in odd:
        await sent(server, [frame(HEADERS, END_HEADERS, 1, headers) + frame(DATA, END_STREAM, 1, grpc_message(b""))])
        assert await is_served(server)
    printed = capsys.readouterr()
    assert "canary" not in printed.out + printed.err + caplog.text
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
