"""A router as a process, and what its health says."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.router.cluster import PATIENCE_S

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trunkline_router.main",
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def router_process(port: int, *workers: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await start("--port", str(port), "--workers", ",".join(workers), "--stop-timeout-s", "20")
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_health(channel: grpc.aio.Channel, name: str, wanted: int) -> None:
    """Waits until the process is up and says so."""
    async with asyncio.timeout(PATIENCE_S):
        watch = HealthStub(channel).Watch(HealthCheckRequest(service=name), wait_for_ready=True)
        async for response in watch:
            if response.status == wanted:
                watch.cancel()
                return
