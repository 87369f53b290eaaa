"""Every example of docs/client.md runs as it stands, against a router."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.client.certificates import make_certificates
from tests.client.guarded_front import guarded_front
from tests.router.fake_worker import FakeWorker
from tests.router.router_process import router_process
from tests.router.tokenizer_files import CHAT_TEMPLATE, tokenizer_files
from trunkline import Client
from trunkline.v1.worker_pb2 import Capability
from trunkline_bench.servers.ports import free_port

REPOSITORY = Path(__file__).parents[2]
KEY = "tl-example-key"
EXAMPLES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "client.md").read_text(), re.DOTALL)

# What each one prints. The worker answers every choice with three tokens, "xxx".
PRINTED = [
    r"xxx\n",
    r"xxx\n",
    r"length 3 xxx\nlength 3 xxx\n\d+ 6 a\n",
    r"xxx\n",
    r"length xxx\n",
    r"2 2 \d+\nAn owl hoots\. 0\.\d+\n",
    r"tiny 4096\n\[\d+(, \d+)*\]\nOnce upon a time\n",
    r"xxx\n",
    r"xxx\n",
    r"change sampling\.temperature\n",
]


@dataclass(frozen=True)
class Servers:
    """A router in plaintext, a front with TLS before it, and a folder with the authority's ca.pem."""

    router: str
    front: str
    folder: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    folder, port = tmp_path_factory.mktemp("authority"), free_port()
    certificates, router = make_certificates(folder), f"127.0.0.1:{port}"
    worker = await FakeWorker(
        "a",
        files=tokenizer_files(chat_template=CHAT_TEMPLATE + "{{ tools }}"),
        capabilities=[
            Capability.CAPABILITY_GRAMMARS,
            Capability.CAPABILITY_VECTORS,
            Capability.CAPABILITY_SCORES,
        ],
    ).start()
    try:
        async with (
            router_process(port, worker.address),
            guarded_front(router, certificates, lambda key: key == KEY) as front,
        ):
            async with Client(router) as client:
                await client.ready()
            yield Servers(router, f"127.0.0.1:{front}", folder)
    finally:
        await worker.die()


def test_no_example_is_left_out() -> None:
    assert len(EXAMPLES) == len(PRINTED)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", range(len(PRINTED)))
async def test_an_example_runs(number: int, servers: Servers) -> None:
    example = EXAMPLES[number]
    assert "127.0.0.1:50051" in example or "router.example:443" in example
    program = example.replace("127.0.0.1:50051", servers.router).replace("router.example:443", servers.front)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "protos"), "TRUNKLINE_API_KEY": KEY}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", program, cwd=servers.folder, env=environment, stdout=pipe, stderr=pipe
    )
    printed, errors = await process.communicate()
    assert errors.decode() == ""
    assert re.fullmatch(PRINTED[number], printed.decode()), printed.decode()
    assert process.returncode == 0
