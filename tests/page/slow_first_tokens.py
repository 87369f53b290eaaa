"""First tokens that are slow on purpose, each for another reason."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from tests.cluster.processes import descendants, stop_still
from tests.page.cluster import MODEL, PageCluster

STORY = "Once upon a time there was a fox who lived in the big forest with her friends, the bear and the owl. "
PAUSE_S = 1.0  # of what is stopped for a while
STALL_S = 2.0  # for which a client does not read
FEW_PLACES = ("--kv-blocks=512", "--max-running-requests=2")
LITTLE_KV = ("--kv-blocks=72",)  # a context of 1,024 tokens has 64


@dataclass(frozen=True)
class SlowToken:
    """cause: in the page's words;  workers, arguments: of the cluster that it needs;  make: sends the request, and
    returns its id"""

    name: str
    cause: str
    make: Callable[[PageCluster], str]
    arguments: tuple[str, ...] = FEW_PLACES
    workers: int = 2


@contextmanager
def busy(
    cluster: PageCluster, *, streams: int, running: int, prompt: str, max_tokens: int, begun_at: int = 0
) -> Iterator[None]:
    """Streams of the tenant, of which so many have sent `begun_at` events and one at the beginning of the block."""
    begun = threading.Semaphore(0)

    def stream(number: int) -> None:
        with cluster.client("acme") as client:
            answer = client.completions.create(
                model=MODEL,
                prompt=f"{number}. {prompt}",
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for place, _ in enumerate(answer):
                if place == begun_at:
                    begun.release()

    with ThreadPoolExecutor(streams) as pool:
        sent = [pool.submit(stream, number) for number in range(streams)]
        for _ in range(running):
            begun.acquire()
        yield
        for one in sent:
            one.result()


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that stand still during the block."""
    for pid in pids:
        stop_still(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def long_queue(cluster: PageCluster) -> str:
    """Two requests run on each worker, as many as may, and others wait."""
    with busy(cluster, streams=8, running=4, prompt=STORY, max_tokens=400):
        return cluster.complete("acme", "The owl said", max_tokens=4)


def cold_prefix(cluster: PageCluster) -> str:
    """A long prompt that is in no cache."""
    return cluster.complete("acme", " ".join(f"In year {year} the fox" for year in range(100, 200)), max_tokens=4)


def kv_pressure(cluster: PageCluster) -> str:
    """The KV blocks are in use, though there are places."""
    with busy(cluster, streams=1, running=1, prompt=STORY, max_tokens=950, begun_at=200):
        return cluster.complete("acme", " ".join(f"In year {year} the fox" for year in range(200, 320)), max_tokens=4)


def slow_tokenizer(cluster: PageCluster) -> str:
    """The processes that render conversations stand still for a while."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4}
    with cluster.client("acme") as client, ThreadPoolExecutor(1) as pool:

        def ask() -> str:
            return str(client.chat.completions.with_raw_response.create(**chat).headers["x-request-id"])  # type: ignore[call-overload]

        ask()  # starts the processes
        assert cluster.router is not None
        router = cluster.router.popen.pid
        with stopped(*descendants(router) - {router}):
            asked = pool.submit(ask)
            time.sleep(PAUSE_S)
        return asked.result()


def failover(cluster: PageCluster) -> str:
    """The worker that has the prompt's beginning stands still, until the router gives it up."""
    prompt = "The bear and the owl. " + STORY * 4
    worker = cluster.worker_of(cluster.complete("acme", prompt))
    with stopped(*descendants(worker.process.popen.pid)):
        return cluster.complete("acme", prompt, max_tokens=4)


@contextmanager
def unread_answer(cluster: PageCluster, request_id: str) -> Iterator[socket.socket]:
    """A client that has read the first bytes of its answer, and reads no more. The answer is larger than the buffers on
    the way to the client."""
    body = {
        **{"model": MODEL, "prompt": STORY, "stream": True, "n": 8, "logprobs": 5},
        **{"max_tokens": 900, "ignore_eos": True},
    }
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {cluster.keys['acme']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\nX-Request-Id: {request_id}\r\n"
        "Connection: close\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", cluster.port))
        connection.sendall(head.encode() + raw)
        assert b"200 OK" in connection.recv(1024)
        yield connection


def stalled_client(cluster: PageCluster) -> str:
    """A client that does not read for a while."""
    request_id = "a-client-that-does-not-read"
    with unread_answer(cluster, request_id) as connection:
        time.sleep(STALL_S)
        while connection.recv(1 << 16):
            pass
    return request_id


SLOW_TOKENS = (
    SlowToken("queue", "waited in a worker's queue", long_queue),
    SlowToken("prefill", "had its prompt computed", cold_prefix),
    SlowToken("kv", "waited for KV blocks", kv_pressure, LITTLE_KV, workers=1),
    SlowToken("tokenizer", "waited until its prompt was tokenized", slow_tokenizer),
    SlowToken("failover", "waited because a worker was lost", failover),
    SlowToken("client", "Its client did not read for", stalled_client),
)
