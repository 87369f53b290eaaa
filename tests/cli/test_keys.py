"""`trunkline keys`, as processes: keys are shown once and work at once, and no key is lost."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cluster.processes import script
from tests.router.identity.key_rig import answer
from trunkline.v1.generation_pb2 import Lane
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_cli.main import KEYS
from trunkline_router.identity import keys_command
from trunkline_router.identity.authenticator import Authenticator, authenticator_of
from trunkline_router.identity.identity import Identity, Role
from trunkline_router.identity.key_record import ApiKey
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.quotas.quota import Quotas
from trunkline_router.settings import RouterSettings

SECRET = "a fleet secret of thirty-two bytes"


def keys(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [script("trunkline"), "keys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=with_own(environment))


def with_own(environment: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRUNKLINE_")}
    return own | dict(environment)


def created(*arguments: str, **environment: str) -> ApiKey:
    done = keys("create", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    key = ApiKey.parse(done.stdout.removesuffix("\n"))
    assert key is not None, "standard output has nothing but the key"
    assert key.secret not in done.stderr
    return key


def of_file(path: Path) -> Authenticator:
    return authenticator_of(RouterSettings(workers=("127.0.0.1:1",), identity=IdentitySettings(api_keys=str(path))))


async def test_a_key_in_a_file_is_created_listed_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    place = f"--file={path}"
    key = created(
        "--tenant=acme", "--role=user", "--role=operator", "--acts-for=b", "--lane=interactive", "--model=m",
        "--requests-per-minute=60", "--tokens-in-flight=9", "--may-salt", "--hide-cache", "--expires-in=90d",
        "--note=for tests", place,
    )  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600
    authenticator = of_file(path)
    await authenticator.start()
    found = authenticator.identify(key.credential)
    roles = frozenset({Role.USER, Role.OPERATOR})
    assert found == Identity(
        f"key:{key.key_id}", "acme", roles, frozenset({"b"}), Lane.LANE_INTERACTIVE, frozenset({"m"}),
        Quotas(60, None, 9), may_salt=True, sees_cache=False, expires_unix_s=found.expires_unix_s,
    )  # fmt: skip
    assert found.expires_unix_s is not None
    assert 89.9 * 86400 < found.expires_unix_s - time.time() < 90 * 86400
    listed = keys("list", place).stdout
    assert [word in listed for word in (key.key_id, "acme", "operator,user", "active", "for tests")] == [True] * 5
    assert key.secret not in listed
    assert key.digest.hex() not in listed
    revoked = keys("revoke", key.key_id, place)
    assert (revoked.returncode, revoked.stdout) == (0, "")
    assert "revoked" in keys("list", place).stdout
    authenticator = of_file(path)
    await authenticator.start()
    assert answer(authenticator, key.credential) == "the API key has been revoked"


async def test_a_key_in_redis_is_created_listed_and_revoked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    with RedisServer(password="canary-of-redis") as server:
        environment = {"TRUNKLINE_REDIS_URL": server.url, "TRUNKLINE_FLEET_SECRET": SECRET}
        by_environment = created("--tenant=acme", "--redis-url", **environment)
        by_file = created("--tenant=acme", f"--redis-url={server.url}", f"--fleet-secret-file={secret}")
        settings = RouterSettings(
            workers=("127.0.0.1:1",),
            redis_url=server.url,
            identity=IdentitySettings(api_keys_in_redis=True, fleet_secret_file=str(secret)),
        )

        async def answers() -> list[str]:
            authenticator = authenticator_of(settings)
            await authenticator.start()
            said = [answer(authenticator, key.credential) for key in (by_environment, by_file)]
            for source in authenticator._key_sources:
                await source.close()  # type: ignore[attr-defined]
            return said

        assert await answers() == ["acme", "acme"]
        assert keys("list", "--redis-url", **environment).stdout.count("active") == 2
        assert keys("revoke", by_file.key_id, "--redis-url", **environment).returncode == 0
        assert await answers() == ["acme", "the API key has been revoked"]
        listed = keys("list", "--redis-url", **environment).stdout
        assert [listed.count(state) for state in ("active", "revoked")] == [1, 1]
        other = keys("list", "--redis-url", **environment | {"TRUNKLINE_FLEET_SECRET": "x" * 32})
        assert len(other.stdout.splitlines()) == 1, "the table has no row of another fleet's key"
        assert other.stderr.count("is not sealed with this fleet's secret") == 2
    down = keys("create", "--tenant=t", "--redis-url", **environment)
    assert (down.returncode, down.stdout) == (1, "")
    assert down.stderr.startswith("trunkline keys: Redis: ")
    assert "canary" not in down.stderr + other.stderr


def test_processes_that_create_keys_at_the_same_time_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    command = [sys.executable, "-P", "-m", KEYS, "create", "--tenant=acme", f"--file={path}"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    made = {process.communicate(timeout=60)[0].split("-")[1] for process in started}
    assert len(made) == 6
    assert json.loads(path.read_text())["keys"].keys() == made
    assert sorted(file.name for file in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("create", 2, "the following arguments are required"),
        ("create --tenant=acme", 2, "one of the arguments --file --redis-url is required"),
        ("create --tenant=acme --file=F --redis-url", 2, "not allowed with argument"),
        ("create --tenant=acme --file=F --role=root", 2, "argument --role: invalid choice"),
        ("create --tenant=acme --file=F --expires-in=3y", 2, "argument --expires-in: must be"),
        ("create --tenant=acme --file=F --expires-in=0d", 2, "argument --expires-in: must be"),
        ("create --tenant=acme --file=F --requests-per-minute=-1", 2, "argument --requests-per-minute"),
        ("create --tenant=acme --file=F --requests-per-minute=0", 1, "quotas must have whole numbers"),
        ("create --tenant=* --file=F", 1, "tenant must be"),
        ("create --tenant= --file=F", 1, "tenant must be"),
        ("create --tenant=acme --file=/proc/none/keys.json", 1, "No such file"),
        ("list --file=F", 1, "No such file"),
        ("revoke abcdefghijkl --file=F", 1, "No such file"),
        ("revoke tl-abcdefghijkl-canary --file=F", 1, "the argument is not the id of a key"),
        ("list --redis-url", 1, "TRUNKLINE_REDIS_URL is not set"),
        ("list --redis-url=http://canary", 1, "the fleet's secret"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: str, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("TRUNKLINE_REDIS_URL", "TRUNKLINE_FLEET_SECRET", "TRUNKLINE_FLEET_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["keys", *arguments.replace("=F", f"={tmp_path}/keys.json").split(" ")])
    with pytest.raises(SystemExit) as exit:
        keys_command.main()
    printed, told = capsys.readouterr()
    assert (exit.value.code, printed) == (status, "")
    assert told.startswith("trunkline keys")
    assert said in told
    assert told.count("\n") == 1
    assert "canary" not in told
    assert list(tmp_path.glob("keys.json")) == []


def run(*arguments: str, first: str, **environment: str) -> tuple[int, str]:
    """The status and the standard error of the command behind `trunkline keys`, after some code."""
    code = f"import sys; {first}; sys.argv = ['keys', *{list(arguments)!r}]; from {KEYS} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=with_own(environment)
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_keys_in_redis_need_the_routers_packages_and_keys_in_a_file_do_not(tmp_path: Path) -> None:
    absent = "sys.modules.update(dict.fromkeys(['redis', 'jwt', 'structlog', 'opentelemetry', 'uvloop']))"
    environment = {"TRUNKLINE_FLEET_SECRET": SECRET}
    code, told = run("list", "--redis-url=redis://127.0.0.1:1", first=absent, **environment)
    assert code == 1
    assert told.startswith("trunkline keys: keys in Redis need the router's packages")
    assert "pip install 'trunkline[router]'" in told
    assert told.count("\n") == 1
    path = tmp_path / "keys.json"
    path.write_text('{"keys": {}}')
    assert run("revoke", "abcdefghijkl", f"--file={path}", first=absent) == (
        1,
        f"trunkline keys: {path} has no key abcdefghijkl\n",
    )
