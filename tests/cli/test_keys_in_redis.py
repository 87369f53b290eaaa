"""`trunkline keys` against a real Redis, with the settings of the routers that use the same keys."""

import json
from asyncio import to_thread
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority, TlsDirectory
from tests.cli.keys_rig import SECRET, answers, created, keys
from tests.router.relay import Relay
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import parse_settings
from trunkline_runtime.tls import ServerTls, TlsFiles


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(password="canary-of-redis") as server:
        yield server


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


@pytest.mark.slow
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
