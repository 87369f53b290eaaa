"""SMG, a gateway in Rust, as a process to be measured beside our router."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.servers.ports import free_port

SMG, SMG_DIRECT = "SMG", "direct, SMG's source"
POLL_INTERVAL_S = 0.05
READY = b"GET /readiness HTTP/1.1\r\nHost: smg\r\nConnection: close\r\n\r\n"

NOT_ALIKE = """What is not alike:

- SMG is Rust, the router Python. CPU time is that of all threads, and "per core" is per second of it: SMG's threads
  work on all cores at once, the router does nearly everything in one.
- SMG takes HTTP: a connection for each stream, an event of JSON for each token. The router takes gRPC: protobuf, all
  streams on one connection.
- Behind it, SMG has a gRPC stream for each request, with a message for each token; the router one session for all, with
  a message for each step. As fast as it goes, SMG's source needs more CPU time than SMG: its tokens/s are the source's
  limit, its tokens/s per core are what it could do.
- The router merges what a client has not read yet; an event of SMG's is always one token. As fast as it goes, that is
  most of what the router saves; paced, neither merges.
- SMG is given token ids and makes text of them; the router passes on the text that its worker made.
- SMG's streams have their prompts as text, the router's as token ids. The requests of one token are text for both, and
  both make ids of it with the same tokenizer.
- Both route by cache, to one worker that reports no cached blocks. SMG has its defaults else: its log (thrown away, as
  the router's is), its metrics, its limits.
"""


@dataclass(frozen=True, slots=True)
class Gateway:
    address: str
    pid: int


def smg_version(command: Path) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@asynccontextmanager
async def launched(command: Path, worker: str, start_s: float) -> AsyncIterator[Gateway]:
    """With one worker that speaks vLLM's gRPC, and its own defaults; its log is written, and thrown away.

    Raises SystemExit where it does not become ready in `start_s`.
    """
    port, metrics_port = free_port(), free_port()
    flags = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": str(metrics_port),
        "--worker-urls": f"grpc://{worker}",
        "--policy": "cache_aware",
        "--model-path": str(DEMO_MODEL),
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        *(str(command), "launch", *(part for flag in flags.items() for part in flag)),
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        try:
            async with asyncio.timeout(start_s):
                while not await _ready(port):
                    if process.returncode is not None:
                        raise SystemExit(f"bench-streaming: {command} ended with {process.returncode} as it started")
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise SystemExit(f"bench-streaming: {command} has no worker after {start_s:.0f} s") from None
        yield Gateway(f"127.0.0.1:{port}", process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(port: int) -> bool:
    """Whether it has a worker that it would send a request to."""
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(READY)
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
        finally:
            writer.close()
            await writer.wait_closed()
    return False
