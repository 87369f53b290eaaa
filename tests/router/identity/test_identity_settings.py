"""Settings of identities that cannot work end the router's start with one line."""

from pathlib import Path
from typing import Any

import pytest

from tests.router.identity.issuer import jwks
from tests.router.identity.key_rig import put, record, write
from trunkline_router.access.identity.authenticator import authenticator_of
from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.keys.new_key import new_key
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.main import router_settings
from trunkline_router.settings import RouterSettings
from trunkline_runtime.tls_settings import is_loopback

SECRET = "a fleet secret of thirty-two bytes"
TOKENS = ("--jwt-issuer=https://issuer.example", "--jwt-audience=trunkline")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--api-keys-in-redis"], "--api-keys-in-redis needs --redis-url"),
        (["--api-keys-in-redis", "--redis-url=redis://127.0.0.1"], "--api-keys-in-redis needs the fleet's secret"),
        (["--fleet-secret=canary"], "--fleet-secret has 6 bytes; allowed: 32 or more"),
        (["--fleet-secret= canary" + " " * 40], "--fleet-secret has 6 bytes; allowed: 32 or more"),
        (["--fleet-secret-file=/none"], "--fleet-secret-file=/none: No such file"),
        ([f"--fleet-secret={SECRET}", "--fleet-secret-file=/none"], "--fleet-secret and --fleet-secret-file are both"),
        (["--jwt-jwks=x.json"], "--jwt-jwks needs --jwt-issuer"),
        (["--jwt-jwks=x.json", "--jwt-issuer=x"], "--jwt-jwks needs --jwt-audience"),
        (["--jwt-jwks=http://issuer.example/x", *TOKENS], "--jwt-jwks is an http URL"),
        (["--jwt-jwks=http://127.0.0.1.example/x", *TOKENS], "--jwt-jwks is an http URL"),
        (["--jwt-jwks=ftp://issuer.example/x", *TOKENS], "--jwt-jwks is not a URL"),
        (["--jwt-jwks=https:///x", *TOKENS], "--jwt-jwks is not a URL"),
        (["--jwt-jwks=https://issuer.example:99999/x", *TOKENS], "--jwt-jwks is not a URL"),
        (["--jwt-jwks=https://u:canary@issuer.example/x", *TOKENS], "--jwt-jwks has a user or password"),
    ],
)
def test_settings_that_cannot_work_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        router_settings(["--workers=127.0.0.1:1", *arguments])
    told = capsys.readouterr().err
    assert exit.value.code == 2
    assert told.startswith(f"trunkline-router: {said}")
    assert told.count("\n") == 1
    assert "canary" not in told


@pytest.mark.parametrize(
    "url", ["https://issuer.example/jwks", "http://127.0.0.1:8080/jwks", "http://[::1]/jwks", "http://localhost/"]
)
def test_a_url_that_is_safe_is_allowed(url: str) -> None:
    assert router_settings(["--workers=127.0.0.1:1", f"--jwt-jwks={url}", *TOKENS]).identity.jwt_jwks == url


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")],
        *[(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example", "")],
    ],
)
def test_loopback_is_this_machine_alone(host: str, wanted: bool) -> None:
    assert is_loopback(host) == wanted


async def test_each_source_that_is_set_is_used(tmp_path: Path) -> None:
    keys, issuer, secret = tmp_path / "keys.json", tmp_path / "jwks.json", tmp_path / "secret"
    write(keys, record(new_key()))
    put(issuer, jwks("rsa"))
    put(secret, SECRET + "\n")
    plain: dict[str, Any] = {"workers": ("127.0.0.1:1",), "redis_url": "redis://127.0.0.1:1"}
    tokens: dict[str, Any] = {"jwt_jwks": str(issuer), "jwt_issuer": "x", "jwt_audience": ("y",)}
    redis: dict[str, Any] = {"api_keys_in_redis": True, "fleet_secret_file": str(secret)}
    assert not authenticator_of(RouterSettings(**plain)).is_configured
    sources: list[dict[str, Any]] = [{"api_keys": str(keys)}, tokens, redis]
    for given in sources:
        authenticator = authenticator_of(RouterSettings(**plain, identity=IdentitySettings(**given)))
        assert authenticator.is_configured
        assert len(authenticator._sources) == 1
    put(issuer, b"{}")
    with pytest.raises(IdentityError, match=f"^--jwt-jwks={issuer}: must be a JSON Web Key Set"):
        await authenticator_of(RouterSettings(**plain, identity=IdentitySettings(**tokens))).start()
