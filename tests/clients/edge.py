"""A cluster of real processes with an HTTP port, as a client outside sees it: an address and the name of a model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import START_S, Cluster, Process, Worker, script
from trunkline.v1.inference_pb2 import ListModelsRequest
from trunkline_bench.servers.ports import free_port

CLIENTS_ENVIRONMENT = Path(__file__).parents[2] / ".venv-clients"
ANY_KEY = "any"  # clients insist on a key; a cluster that is open takes every one


@dataclass(frozen=True)
class Edge:
    """`root` is the address without a path, `url` the one that OpenAI's clients take."""

    root: str
    model: str
    context_length: int
    cluster: Cluster

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


@contextmanager
def running_edge(
    model: Path,
    *worker_arguments: str,
    command: Sequence[str] = (),
    num_workers: int = 1,
    router_arguments: Sequence[str] = (),
) -> Iterator[Edge]:
    """A router with gRPC and HTTP before workers on the CPU, all ready."""
    with ExitStack() as stack:
        workers = []
        for _ in range(num_workers):
            worker = Worker(model, "--dtype=float32", "--kv-blocks=512", *worker_arguments, command=command)
            stack.callback(worker.stop)
            workers.append(worker)
        port, http_port = free_port(), free_port()
        router = Process(
            script("trunkline-router"),
            f"--workers={','.join(worker.address for worker in workers)}",
            f"--port={port}",
            f"--http-port={http_port}",
            "--max-stored-responses=64",
            *router_arguments,
        )
        stack.callback(router.stop)
        router.wait_for("router listening")
        cluster = Cluster(router, f"127.0.0.1:{port}", workers)
        stack.callback(cluster.channel.close)
        cluster.wait_ready(num_workers)
        [served] = cluster.stub.ListModels(ListModelsRequest(), timeout=START_S).models
        yield Edge(f"http://127.0.0.1:{http_port}", served.name, served.context_length, cluster)
