"""Two tenants with API keys of their own before a real worker: each finds its own cached tokens and never the other's,
as their clients, the worker's engine and the worker's block names tell."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx2

from tests.cluster.processes import START_S, Cluster, Process, Worker, script, wait_until
from tests.router.access.callers import Headers, Keys, bearer
from trunkline.block_hash import HASH_BYTES, prompt_hashes, root_hash
from trunkline.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline.v1.worker_pb2 import GetModelRequest, GetStatsRequest, WatchCacheRequest
from trunkline_bench.servers.ports import free_port
from trunkline_router.access.access import Caller, Tenant
from trunkline_router.access.identity.fleet_secret import derived_key
from trunkline_router.access.identity.identity import Identity
from trunkline_router.serving import SALT_PURPOSE

MODEL = "tiny-tales"
SECRET = "a fleet's secret that no tenant knows"
TALE = (
    "Once upon a time there was a small grey mouse who lived under the stairs of an old mill, and every evening, when "
    "the wheel stood still and the miller had gone to bed, she climbed up to the window to count the stars over the "
)
VICTIM, ATTACKER = "victim", "attacker"


class Counts(NamedTuple):
    """What the engine counts of one tenant, in tokens of prompts."""

    computed: int
    cached: int

    def since(self, before: "Counts") -> "Counts":
        return Counts(self.computed - before.computed, self.cached - before.cached)


@dataclass
class Guarded:
    """A router that asks for API keys, before a worker. Each tenant has a key; the attacker's may set salts."""

    worker: Worker
    http_port: int
    headers: Mapping[str, Headers]
    stub: Any

    def over_grpc(self, tenant: str, prompt: str, salt: str = "") -> int:
        """The cached tokens that the client is told of."""
        request = GenerateRequest(model=MODEL, text=prompt, cache_salt=salt)
        request.sampling.max_tokens = 1
        metadata = tuple(self.headers[tenant].items())
        responses = list(self.stub.Generate(request, metadata=metadata, timeout=START_S))
        cached: int = responses[-1].usage.cached_tokens
        assert cached == responses[0].prompt.cached_tokens
        return cached

    def over_http(self, tenant: str, prompt: str, salt: str = "") -> int:
        """The same."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
        answer = self.post("/v1/completions", tenant, body)
        cached = int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == int(answer.headers["x-trunkline-cached-tokens"])
        return cached

    def post(self, path: str, tenant: str, body: Mapping[str, Any]) -> httpx2.Response:
        url = f"http://127.0.0.1:{self.http_port}{path}"
        answer = httpx2.post(url, json=body, headers=self.headers[tenant], timeout=START_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer

    def token_ids(self, prompt: str) -> list[int]:
        metadata = tuple(self.headers[ATTACKER].items())
        return list(self.stub.Tokenize(TokenizeRequest(model=MODEL, text=prompt), metadata=metadata).token_ids)

    def counts(self, tenant: str) -> Counts:
        """What the worker's engine has counted so far."""
        stats = self.worker.stub.GetStats(GetStatsRequest(), timeout=START_S)
        of_tenant = [entry for entry in stats.tenants if entry.tenant == tenant]
        return Counts(sum(one.input_tokens for one in of_tenant), sum(one.cached_tokens for one in of_tenant))

    def block_hashes(self) -> set[bytes]:
        """The names of all blocks that the worker holds now."""
        watch, names = self.worker.stub.WatchCache(WatchCacheRequest(), timeout=START_S), b""
        for item in watch:
            names += item.snapshot.block_hashes
            if item.snapshot.last:
                break
        watch.cancel()
        return {names[start : start + HASH_BYTES] for start in range(0, len(names), HASH_BYTES)}


@contextmanager
def guarded(worker: Worker, folder: Path) -> Iterator[Guarded]:
    keys = Keys(folder / "keys.json")
    headers = {
        VICTIM: bearer(keys.add(tenant=VICTIM)),
        ATTACKER: bearer(keys.add(tenant=ATTACKER, may_salt=True)),
    }
    with ExitStack() as stack:
        port, http_port = free_port(), free_port()
        router = Process(
            script("trunkline-router"),
            *(f"--workers={worker.address}", f"--port={port}", f"--http-port={http_port}"),
            f"--api-keys={keys.path}",
            environment={"TRUNKLINE_FLEET_SECRET": SECRET},
        )
        stack.callback(router.stop)
        router.wait_for("router listening")
        url = f"http://127.0.0.1:{http_port}/ready"
        wait_until(
            lambda: httpx2.get(url, headers=headers[VICTIM], timeout=START_S, trust_env=False).status_code == 200,
            "the router is ready",
        )
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        yield Guarded(worker, http_port, headers, InferenceServiceStub(channel))


Ask = Callable[[Guarded, str, str], int]
WAYS: tuple[Ask, ...] = (Guarded.over_grpc, Guarded.over_http)


def test_a_tenant_finds_its_own_cached_tokens_and_never_anothers(cluster: Cluster, tmp_path: Path) -> None:
    with guarded(cluster.workers[0], tmp_path) as fleet:
        block_size = fleet.worker.stub.GetModel(GetModelRequest(), timeout=START_S).block_size
        for number, (first, other) in enumerate((WAYS, WAYS[::-1])):
            prompt = f"Tale {number}. {TALE}"
            num_tokens = len(fleet.token_ids(prompt))
            most_cached = (num_tokens - 1) // block_size * block_size
            assert most_cached >= 2 * block_size
            before = {tenant: fleet.counts(tenant) for tenant in (VICTIM, ATTACKER)}
            assert first(fleet, VICTIM, prompt) == 0
            assert [ask(fleet, ATTACKER, prompt) for ask in (first, other)] == [0, most_cached], "then its own"
            assert [ask(fleet, VICTIM, prompt) for ask in (other, first)] == [most_cached] * 2, "over either protocol"
            hit, missed = most_cached, num_tokens - most_cached
            assert fleet.counts(VICTIM).since(before[VICTIM]) == (num_tokens + 2 * missed, 2 * hit)
            assert fleet.counts(ATTACKER).since(before[ATTACKER]) == (num_tokens + missed, hit)


def test_neither_salts_nor_block_names_that_a_tenant_can_make_up_lead_to_anothers_tokens(
    cluster: Cluster, tmp_path: Path
) -> None:
    prompt = f"A tale of one tenant alone. {TALE}"
    nothing = Identity("nothing", VICTIM, frozenset())

    def salt_of(secret: bytes) -> bytes:
        key = derived_key(secret, SALT_PURPOSE) if secret else b""
        return Caller(VICTIM, nothing, Tenant(), False, key).cache_salt()

    with guarded(cluster.workers[0], tmp_path) as fleet:
        assert fleet.over_http(VICTIM, prompt) == 0
        model = fleet.worker.stub.GetModel(GetModelRequest(), timeout=START_S)
        ids = fleet.token_ids(prompt)

        def names(salt: bytes) -> set[bytes]:
            return set(prompt_hashes(root_hash(model.fingerprint, salt=salt), ids, model.block_size))

        real = salt_of(SECRET.encode())
        wait_until(lambda: names(real) <= fleet.block_hashes(), "the worker tells its blocks, by names as the fleet's")
        held = fleet.block_hashes()
        for salt in (b"", VICTIM.encode(), f"tenant\0{VICTIM}".encode(), salt_of(b""), salt_of(b"x" * 32)):
            assert not names(salt) & held, salt

        before = fleet.counts(ATTACKER)
        forged = ("", VICTIM, f"tenant\0{VICTIM}", real.hex(), real.hex().upper(), real.decode("latin-1"))
        for ask, salt_text in zip(cycle((fleet.over_grpc, fleet.over_http)), forged, strict=False):  # each salt once
            assert ask(ATTACKER, prompt, salt_text) == 0, salt_text
        assert fleet.counts(ATTACKER).since(before).cached == 0
