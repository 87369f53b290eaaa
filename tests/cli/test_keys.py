"""`trunkline keys`, as processes: keys are shown once and work at once, and no key is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.keys_rig import SECRET, created, keys, with_own
from tests.router.identity import key_rig
from tests.router.identity.key_rig import answer
from trunkline.v1.generation_pb2 import Lane
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_cli.main import KEYS
from trunkline_router.access.identity import watched_file
from trunkline_router.access.identity.authenticator import Authenticator, authenticator_of
from trunkline_router.access.identity.identity import Identity, IdentityError, Role
from trunkline_router.access.identity.redis_keys import RedisKeys
from trunkline_router.access.keys import key_file, keys_command
from trunkline_router.access.keys.key_file import FileRecords, changing
from trunkline_router.access.keys.new_key import new_key
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.quotas.quota import Quotas
from trunkline_router.settings import RouterSettings


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
    assert [word in listed for word in (key.key_id, "acme", "operator,user", "active", "none")] == [True] * 5
    quotas = "quotas=requests_per_minute:60,tokens_in_flight:9"
    terms = f"acts_for=b lane=interactive models=m {quotas} may_salt=true sees_cache=false"
    assert listed.endswith(f'  {terms}  "for tests"\n')
    assert key.secret not in listed
    assert key.digest.hex() not in listed
    revoked = keys("revoke", key.key_id, place)
    assert (revoked.returncode, revoked.stdout) == (0, "")
    assert "revoked" in keys("list", place).stdout
    authenticator = of_file(path)
    await authenticator.start()
    assert answer(authenticator, key.credential) == "the API key has been revoked"


@pytest.mark.slow
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
                assert isinstance(source, RedisKeys)
                await source.close()
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
    assert (down.returncode, down.stdout) == (2, "")
    assert down.stderr.startswith("trunkline keys: Redis: ")
    assert "canary" not in down.stderr + other.stderr


def test_a_list_is_one_line_for_each_key_and_no_name_looks_like_another_cell(tmp_path: Path) -> None:
    place = f"--file={tmp_path / 'keys.json'}"
    created("--tenant=acme", place)
    created("--tenant=x   user", "--model=m  may_salt=true", "--model=ü,b", "--acts-for=*", "--note=x  default", place)
    created("--tenant=many", *(f"--model=model-{number:03}" for number in range(200)), place)
    titles, *rows = keys("list", place).stdout.splitlines()
    assert titles.split() == ["ID", "TENANT", "ROLES", "STATE", "SEAL", "CREATED", "EXPIRES", "TERMS", "NOTE"]
    (plain,), (odd,), (many,) = ([row for row in rows if part in row] for part in (" acme ", "x   user", " many "))
    assert plain.endswith("  never    default"), "the row of a key with many models does not make others long"
    assert '  "x   user"  user   active  none  ' in odd
    assert r'acts_for=* models="m  may_salt=true","\u00fc,b"  "x  default"' in odd
    assert "models=model-000,model-001," in many


def test_processes_that_create_keys_at_the_same_time_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    command = [sys.executable, "-P", "-m", KEYS, "create", "--tenant=acme", f"--file={path}"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    made = {process.communicate(timeout=60)[0].split("-")[1] for process in started}
    assert len(made) == 6
    assert json.loads(path.read_text())["keys"].keys() == made
    assert sorted(file.name for file in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("create", "the following arguments are required"),
        ("create --tenant=acme", "one of the arguments --file --redis-url is required"),
        ("create --tenant=acme --file=F --redis-url", "not allowed with argument"),
        ("create --tenant=acme --file=", "argument --file: must be the path of a file"),
        ("create --tenant=acme --file=F --role=root", "argument --role: invalid choice"),
        ("create --tenant=acme --file=F --lane=express", "argument --lane: invalid choice"),
        ("create --tenant=acme --file=F --expires-in=3y", "argument --expires-in: must be"),
        ("create --tenant=acme --file=F --expires-in=0d", "argument --expires-in: must be"),
        ("create --tenant=acme --file=F --requests-per-minute=-1", "argument --requests-per-minute: must be"),
        ("create --tenant=acme --file=F --requests-per-minute=0", "argument --requests-per-minute: must be"),
        ("create --tenant=acme --file=F --tokens-in-flight=1000000000001", "argument --tokens-in-flight: must be"),
        ("create --tenant=* --file=F", "--tenant must be"),
        ("create --tenant= --file=F", "--tenant must be"),
        ("create --tenant=acme --acts-for=é --file=F", "--acts-for must be"),
        ("create --tenant=acme --model= --file=F", "--model must be"),
        ("create --tenant=acme --note=\x1b[31m --file=F", "--note must be one line"),
        ("create --tenant=acme --file=/proc/none/keys.json", "/proc/none/keys.json.lock: No such file"),
        ("create --tenant=acme --file=/dev/null/keys.json", "/dev/null/keys.json: Not a directory"),
        ("create --tenant=acme --file=/tmp", "/tmp is not a regular file"),
        ("list --file=/dev/zero", "/dev/zero is not a regular file"),
        ("list --file=F", "No such file"),
        ("list --file=F --key-prefix=x", "--key-prefix is for keys in Redis, and --file is given"),
        ("list --file=F --allow-plaintext", "--allow-plaintext is for keys in Redis, and --file is given"),
        ("revoke abcdefghijkl --file=F", "No such file"),
        ("revoke tl-abcdefghijkl-canary --file=F", "the argument is not the id of a key"),
        ("reseal --file=F", "unrecognized arguments"),
        ("list --redis-url", "TRUNKLINE_REDIS_URL"),
        ("list --redis-url=http://u:canary@x", "--redis-url is not the URL of a Redis"),
        ("list --redis-url=redis://127.0.0.1:1", "keys in Redis need the fleet's secret"),
        ("list --redis-url=redis://:canary@10.0.0.1:1", "--redis-url is not on the loopback interface"),
        ("list --redis-url=redis://127.0.0.1:1 --key-prefix={x}", "--key-prefix='{x}' is not a prefix"),
        ("list --redis-url=redis://127.0.0.1:1 --fleet-secret-file=/none", "--fleet-secret-file=/none: No such file"),
        ("list --redis-url=rediss://127.0.0.1:1 --redis-tls-ca=/none", "/none"),
        ("list --redis-url=rediss://127.0.0.1:1 --redis-tls-cert=/none", "--redis-tls-key"),
        ("list --redis-url --config=/none", "--config=/none: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("TRUNKLINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["keys", *arguments.replace("=F", f"={tmp_path}/keys.json").split(" ")])
    with pytest.raises(SystemExit) as exit:
        keys_command.main()
    printed, told = capsys.readouterr()
    assert (exit.value.code, printed) == (2, "")
    assert told.startswith("trunkline keys")
    assert said in told
    assert told.count("\n") == 1
    assert "canary" not in told
    assert list(tmp_path.iterdir()) == [], "nor does it leave anything behind"


def test_a_key_that_could_not_be_printed_is_named_to_be_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", KEYS, "create", "--tenant=acme", f"--file={path}"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    (key_id,) = json.loads(path.read_text())["keys"]
    assert done.returncode == 2
    assert f"so revoke {key_id} and create another one" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_routers_would_not_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_file.MOST_BYTES == watched_file.MOST_FILE_BYTES
    path, record = tmp_path / "keys.json", key_rig.record(new_key())
    key_rig.write(path, record)
    monkeypatch.setattr(key_file, "MOST_BYTES", path.stat().st_size + 100)
    before = path.read_bytes()
    with pytest.raises(IdentityError, match="would have more than"):
        FileRecords(path).create(key_rig.record(new_key()))
    assert path.read_bytes() == before
    monkeypatch.setattr(key_file, "MOST_BYTES", 10)
    with pytest.raises(IdentityError, match="has more than"):
        FileRecords(path).listed()


def test_ctrl_c_while_another_process_writes_ends_quietly(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with changing(path):
        command = [sys.executable, "-P", "-m", KEYS, "create", "--tenant=acme", f"--file={path}"]
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not _has_open(waiting.pid, Path(f"{path.resolve()}.lock")):
            assert waiting.poll() is None
            time.sleep(0.02)
        waiting.send_signal(signal.SIGINT)
        printed, told = waiting.communicate(timeout=60)
    assert (waiting.returncode, printed) == (130, "")
    assert "Traceback" not in told


def _has_open(pid: int, path: Path) -> bool:
    with suppress(OSError):  # a file was closed meanwhile
        return any(os.readlink(file) == str(path) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


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
    assert code == 2
    assert told.startswith("trunkline keys: keys in Redis need the router's packages")
    assert "pip install 'trunkline[router]'" in told
    assert told.count("\n") == 1
    path = tmp_path / "keys.json"
    path.write_text('{"keys": {}}')
    assert run("revoke", "abcdefghijkl", f"--file={path}", first=absent) == (
        2,
        f"trunkline keys: {path} has no key abcdefghijkl\n",
    )
