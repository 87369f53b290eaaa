"""`trunkline keys` against a real Redis, with the settings of the routers that use the same keys."""

import json
from asyncio import to_thread
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority, TlsDirectory
from tests.cli.keys_rig import SECRET, created, keys
from tests.router.identity.key_rig import answer
from tests.router.relay import Relay
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.identity.authenticator import authenticator_of
from trunkline_router.identity.key_record import ApiKey
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import parse_settings
from trunkline_runtime.tls import ServerTls, TlsFiles

NEXT = "the next secret of the same fleet"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(password="canary-of-redis") as server:
        yield server


async def answers(settings: RouterSettings, *made: ApiKey) -> list[str]:
    """What a router that starts with these settings answers to the keys."""
    authenticator = authenticator_of(settings)
    await authenticator.start()
    try:
        return [answer(authenticator, key.credential) for key in made]
    finally:
        for source in authenticator._key_sources:
            await source.close()  # type: ignore[attr-defined]


async def test_a_secret_is_changed_with_its_file_and_keys_stay_valid(server: RedisServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    place = ("--redis-url", f"--fleet-secret-file={secret}")
    environment = {"TRUNKLINE_REDIS_URL": server.url, "TRUNKLINE_FLEET_SECRET": "the flag comes before this secret"}
    settings = RouterSettings(
        workers=("127.0.0.1:1",),
        redis_url=server.url,
        identity=IdentitySettings(api_keys_in_redis=True, fleet_secret_file=str(secret)),
    )
    secret.write_text(f"{SECRET}\n")
    before, gone = (created("--tenant=acme", *place, **environment) for _ in range(2))
    secret.write_text(f"{NEXT}\n{SECRET}\n")
    during = created("--tenant=acme", *place, **environment)
    assert keys("revoke", gone.key_id, *place, **environment).returncode == 0
    assert await answers(settings, before, gone, during) == ["acme", "the API key has been revoked", "acme"]
    listed = keys("list", *place, **environment)
    assert listed.stderr == "trunkline keys: 1 of them has an earlier secret's seal: run trunkline keys reseal\n"
    resealed = keys("reseal", *place, **environment)
    assert (resealed.returncode, resealed.stdout) == (0, "")
    assert resealed.stderr.startswith("trunkline keys: sealed 1 key with the current secret")
    secret.write_text(NEXT)
    assert await answers(settings, before, gone, during) == ["acme", "the API key has been revoked", "acme"]


async def test_the_routers_file_of_settings_says_where_its_keys_are(server: RedisServer, tmp_path: Path) -> None:
    """As in a pod of the chart: the file has everything but the URL, and Redis a certificate of an own authority."""
    authority, secret, config = Authority("one"), tmp_path / "secret", tmp_path / "router.json"
    files = TlsDirectory(tmp_path / "redis").write(authority.issue("localhost"), authority.pem)
    own = TlsDirectory(tmp_path / "router").write(authority.issue("router"), authority.pem)
    secret.write_text(SECRET)
    config.write_text(json.dumps({
        "workers": ["dns:workers:50061"], "host": "0.0.0.0", "key_prefix": "llm/demo:", "api_keys_in_redis": True,
        "fleet_secret_file": str(secret), "redis_tls_ca": own.ca, "redis_tls_cert": own.cert, "redis_tls_key": own.key,
    }))  # fmt: skip
    async with Relay(server.port, tls=ServerTls(TlsFiles(files.cert, files.key, files.ca)).ssl_context()) as relay:
        port = relay.address.rpartition(":")[2]
        environment = {"TRUNKLINE_REDIS_URL": f"rediss://:canary-of-redis@localhost:{port}/0"}
        made = await to_thread(created, "--tenant=acme", "--redis-url", f"--config={config}", **environment)
        settings = parse_settings(RouterSettings, [f"--config={config}"], environment, prog="test")
        assert await answers(settings, made) == ["acme"]
        plain = await to_thread(keys, "list", "--redis-url", f"--fleet-secret-file={secret}", **environment)
    assert plain.returncode == 2
    assert "CERTIFICATE_VERIFY_FAILED" in plain.stderr
    assert plain.stderr.count("\n") == 1


def test_a_redis_that_refuses_is_one_line_without_its_password(server: RedisServer) -> None:
    environment = {"TRUNKLINE_FLEET_SECRET": SECRET}
    wrong = server.url.replace("canary-of-redis", "canary-wrong")
    for url in (wrong, f"redis://127.0.0.1:{server.port}", "redis://127.0.0.1:1", "redis://no.such.host.invalid:6379"):
        done = keys(
            "create", "--tenant=acme", "--redis-url", "--allow-plaintext", **environment, TRUNKLINE_REDIS_URL=url
        )
        assert (done.returncode, done.stdout) == (2, ""), url
        assert done.stderr.startswith("trunkline keys: Redis: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert "canary" not in done.stderr
