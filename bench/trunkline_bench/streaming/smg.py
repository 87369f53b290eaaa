"""SMG, a gateway written in Rust, as a process to compare with our router."""

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

NOT_ALIKE = """Differences:

- SMG is written in Rust, the router in Python. CPU time is that of all threads, and "per core" means per second of CPU
  time: SMG's threads work on all cores at once, while the router does nearly everything in one thread.
- SMG serves HTTP, with a connection per stream and a JSON event per token. So does the router over HTTP, with the same
  client. Over gRPC, the router has protobuf and all streams on one connection.
- To its worker, SMG has a gRPC stream per request, with a message per token; the router has one session for all
  requests, with a message per step. Without pacing, SMG's source needs more CPU time than SMG: SMG's tokens/s are
  limited by the source, and its tokens/s per core show what it could do.
- The router merges chunks that a client has not read yet; an event of SMG always has one token. Without pacing, most of
  the router's advantage comes from this; with pacing, neither merges.
- SMG receives token ids and turns them into text; the router passes on the text that its worker made.
- Prompts of SMG's streams are text, those of the router's streams are token ids. Requests of one token are text for
  both, and both tokenize it with the same tokenizer.
- Both route by cache, to one worker that reports no cached blocks. Otherwise SMG has its defaults: its log (discarded,
  as the router's is), its metrics, its limits.
"""


@dataclass(frozen=True, slots=True)
class Gateway:
    address: str
    pid: int


def smg_version(command: Path) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@asynccontextmanager
async def launched(command: Path, worker: str, start_s: float) -> AsyncIterator[Gateway]:
    """SMG with default settings, in front of one worker that speaks vLLM's gRPC. Its log is discarded.

    Raises SystemExit if it is not ready within `start_s`.
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
                        raise SystemExit(f"bench-streaming: {command} exited with {process.returncode} at its start")
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise SystemExit(f"bench-streaming: {command} was not ready after {start_s:.0f} s") from None
        yield Gateway(f"127.0.0.1:{port}", process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(port: int) -> bool:
    """Whether SMG is ready to send requests to a worker."""
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(READY)
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
        finally:
            writer.close()
            await writer.wait_closed()
    return False
