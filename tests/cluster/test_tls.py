"""A router and a worker with TLS on every hop, with the certificates of deploy/certs.sh: real processes and streams."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cluster.processes import Process, script, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.client.direct import DirectPath
from trunkline.errors import error_of
from trunkline.tls import ClientTls, open_blocking_channel, open_channel
from trunkline.v1.fleet_pb2 import ListWorkersRequest
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_bench.servers.ports import free_port

CERTS = Path(__file__).parents[2] / "deploy" / "certs.sh"
KEY = "k" * 32
ALONE = (("grpc.use_local_subchannel_pool", 1),)
LONG = GenerateRequest(text="Once", sampling=SamplingParams(max_tokens=400, ignore_eos=True))
SHORT = GenerateRequest(text="Once", sampling=SamplingParams(max_tokens=3, ignore_eos=True))


def make_certificates(directory: Path) -> None:
    subprocess.run([CERTS, directory], check=True, capture_output=True)


@dataclass(slots=True)
class Secured:
    """A router before one worker."""

    router: Process
    worker: Process
    address: str
    worker_address: str
    certificates: Path
    is_drained: bool = False

    def tls(self, name: str = "client") -> ClientTls:
        folder = self.certificates
        return ClientTls(f"{folder}/ca.crt", f"{folder}/{name}.crt", f"{folder}/{name}.key")

    def workers(self) -> list[Any]:
        with open_blocking_channel(self.address, ALONE, self.tls()) as channel:
            stub: Any = FleetServiceStub(channel)
            return list(stub.ListWorkers(ListWorkersRequest(), timeout=60).workers)

    def wait_ready(self) -> None:
        def ready() -> bool:
            with open_blocking_channel(self.address, ALONE, self.tls()) as channel:
                stub: Any = InferenceServiceStub(channel)
                return bool(stub.ListModels(ListModelsRequest(), timeout=60, wait_for_ready=True).models)

        wait_until(ready, "the worker is connected")

    def restart_worker(self) -> None:
        """The new one reads the certificates of now. Returns when the router has connected to it."""
        self.worker.stop()
        self.worker = worker_process(self.certificates, int(self.worker_address.rpartition(":")[2]))
        self.worker.wait_for("worker ready")
        self.is_drained = False
        self.wait_ready()


def worker_process(certificates: Path, port: int) -> Process:
    return Process(
        script("trunkline-worker"), f"--model={DEMO_MODEL}", f"--port={port}", "--threads=1", "--device=cpu",
        "--dtype=float32", "--kv-blocks=512", f"--grant-key={KEY}", "--tls-router-names=trunkline-router",
        f"--tls-cert={certificates}/worker.crt", f"--tls-key={certificates}/worker.key",
        f"--tls-client-ca={certificates}/ca.crt",
    )  # fmt: skip


def router_process(certificates: Path, port: int, worker: str) -> Process:
    return Process(
        script("trunkline-router"), f"--workers={worker}", f"--port={port}", f"--grant-key={KEY}",
        f"--tls-cert={certificates}/router.crt", f"--tls-key={certificates}/router.key",
        f"--tls-client-ca={certificates}/ca.crt", f"--worker-tls-ca={certificates}/ca.crt",
        f"--worker-tls-cert={certificates}/router.crt", f"--worker-tls-key={certificates}/router.key",
        "--worker-tls-name=trunkline-worker",
    )  # fmt: skip


@pytest.fixture(scope="module")
def standing_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    certificates = tmp_path_factory.mktemp("tls") / "certs"
    make_certificates(certificates)
    ports = free_port(), free_port()
    worker = worker_process(certificates, ports[1])
    router = router_process(certificates, ports[0], f"127.0.0.1:{ports[1]}")
    made = Secured(router, worker, f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", certificates)
    try:
        router.wait_for("router listening")
        made.wait_ready()
        yield made
    finally:
        router.stop()
        made.worker.stop()


@pytest.fixture
def secured(standing_pair: Secured) -> Secured:
    """The same for all tests: after one that drains the worker it is started again."""
    if standing_pair.is_drained:
        standing_pair.restart_worker()
    return standing_pair


@asynccontextmanager
async def router_stub(secured: Secured, tls: ClientTls | None) -> AsyncIterator[Any]:
    async with open_channel(secured.address, ALONE, tls) as channel:
        yield InferenceServiceStub(channel)


def tokens_of(response: Any) -> int:
    return sum(len(chunk.token_ids) for chunk in response.chunks)


async def routed(secured: Secured, tls: ClientTls | None) -> int | str:
    """The tokens of a short answer through the router, or the error."""
    async with router_stub(secured, tls) as stub:
        try:
            return sum([tokens_of(response) async for response in stub.Generate(SHORT, timeout=60)])
        except grpc.aio.AioRpcError as error:
            return error_of(error).__class__.__name__


@pytest.mark.slow
async def test_clients_stream_through_the_router_and_directly_and_rotation_cuts_no_stream(secured: Secured) -> None:
    tls = secured.tls()
    assert await routed(secured, tls) == 3
    assert await routed(secured, None) == "NoWorker"
    direct = DirectPath(10.0, ClientTls(tls.ca_file, tls.cert_file, tls.key_file, "", "trunkline-worker"))
    async with router_stub(secured, tls) as stub, router_stub(secured, tls) as other:
        answers = [
            stub.Generate(LONG, timeout=60).__aiter__(),
            direct.responses(other, LONG, deadline_s=None, metadata=()),
        ]
        counts = [tokens_of(await anext(answer)) for answer in answers]
        old = {name: (secured.certificates / name).read_bytes() for name in ("ca.crt", "client.crt", "client.key")}
        (secured.certificates / "ca.crt").unlink()
        make_certificates(secured.certificates)
        former = secured.certificates / "former"
        former.mkdir()
        for name, data in old.items():
            (former / name).write_bytes(data)
        assert await routed(secured, secured.tls()) == 3
        assert (
            await routed(
                secured, ClientTls(f"{secured.certificates}/ca.crt", f"{former}/client.crt", f"{former}/client.key")
            )
            == "NoWorker"
        )
        for number, answer in enumerate(answers):
            counts[number] += sum([tokens_of(response) async for response in answer])
    await direct.close()
    assert counts == [400, 400]
    # The worker is restarted with its new certificate: the router connects with its own new one.
    secured.restart_worker()
    assert await routed(secured, secured.tls()) == 3


def test_the_worker_is_drained_by_a_router_or_an_operator_and_not_by_a_client(secured: Secured) -> None:
    def drained(name: str) -> tuple[int, str]:
        tls = secured.tls(name)
        done = subprocess.run(
            [
                script("trunkline"), "drain", f"--address={secured.worker_address}", f"--grant-key={KEY}",
                f"--tls-ca={tls.ca_file}", f"--tls-cert={tls.cert_file}", f"--tls-key={tls.key_file}",
                "--tls-server-name=trunkline-worker",
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    status, said = drained("client")
    assert status == 1
    assert "--tls-router-names" in said
    secured.is_drained = True
    assert drained("router") == (0, "finished 0, cut off 0\n")
