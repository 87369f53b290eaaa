"""Ten thousand idle connections, opened by another process."""

import asyncio
import resource
import sys
from pathlib import Path

import pytest

from tests.router.http.http_rig import connected, post, serving
from trunkline_router.edge.http.server import HOST_SHARE

OPENED = 10_000
MOST = 4096
MAX_BYTES_EACH = 24 << 10


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
async def test_ten_thousand_idle_connections_cost_bounded_memory_and_keep_no_request_out() -> None:
    client_script = Path(__file__).with_name("idle_connections.py")
    async with serving(max_connections=MOST) as server:
        before = resident_bytes()
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, str(client_script), str(server.port), str(OPENED)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert other.stdin is not None
        assert other.stdout is not None
        async with asyncio.timeout(60):
            assert await other.stdout.readline()
        assert server.num_connections <= MOST * HOST_SHARE
        assert server.num_connections > MOST // 2
        assert resident_bytes() - before < MOST * MAX_BYTES_EACH
        async with connected(server) as client:
            client.send(post(b"{}"))
            assert (await client.response())[0] == 200
        other.stdin.close()
        await other.wait()
