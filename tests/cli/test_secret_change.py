"""The fleet's secret is changed with `trunkline keys` and the shell commands of docs/operations.md."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.keys_rig import SECRET, answers, created, keys
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.settings import RouterSettings

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
WAS_REVOKED, NOT_VALID = "the API key has been revoked", "the API key is not valid"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(password="canary-of-redis") as server:
        yield server


class Fleet:
    """A fleet's file of secrets, and commands and routers that use it."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.file = folder / "secret"
        self.place = ("--redis-url", f"--fleet-secret-file={self.file}")
        self.environment = {
            "TRUNKLINE_REDIS_URL": server.url,
            "TRUNKLINE_FLEET_SECRET": "the flag comes before this secret",
        }
        self.settings = RouterSettings(
            workers=("127.0.0.1:1",),
            redis_url=server.url,
            identity=IdentitySettings(api_keys_in_redis=True, fleet_secret_file=str(self.file)),
        )

    @property
    def lines(self) -> list[str]:
        return self.file.read_text().split()

    def change(self, command: str) -> None:
        subprocess.run(["sh", "-c", command], cwd=self.file.parent, check=True)
        assert self.file.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in self.file.parent.iterdir()] == ["secret"]

    def keys(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return keys(*arguments, *self.place, **self.environment)

    def seals(self) -> list[str]:
        """Of the listed keys."""
        return re.findall("(?:active|revoked) +(current|earlier 1|none) ", self.keys("list").stdout)


def commands(heading: str) -> list[str]:
    """Those of a part of the page that change the file."""
    part = PAGE.read_text().split(f"### {heading}\n")[1].split("\n###")[0]
    return re.findall(r"^ +(\(umask .*)$", part, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "\n"])
async def test_with_the_commands_of_the_page_a_secret_is_changed_and_keys_stay_valid(
    server: RedisServer, tmp_path: Path, end: str
) -> None:
    fleet = Fleet(server, tmp_path)
    add, swap, drop = commands("Planned change")
    fleet.file.write_text(SECRET.replace(" ", "-") + end)
    (old,) = fleet.lines
    made = [created("--tenant=acme", *fleet.place, **fleet.environment) for _ in range(2)]
    fleet.change(add)
    _, new = fleet.lines
    assert fleet.lines == [old, new]
    assert len(new) == 64
    fleet.change(swap)
    assert fleet.lines == [new, old]
    made.append(created("--tenant=acme", *fleet.place, **fleet.environment))
    assert fleet.keys("revoke", made[0].key_id).returncode == 0
    assert await answers(fleet.settings, *made) == [WAS_REVOKED, "acme", "acme"]
    assert sorted(fleet.seals()) == ["current", "current", "earlier 1"]
    assert fleet.keys("list").stderr == (
        "trunkline keys: 1 of them has an earlier secret's seal, and will not count once that is dropped\n"
    )
    resealed = fleet.keys("reseal")
    assert (resealed.returncode, resealed.stdout) == (0, "")
    assert resealed.stderr.startswith("trunkline keys: sealed 1 key with the current secret, and for 3 s no router ")
    assert "A router that could not reach Redis in that time was not seen" in resealed.stderr
    assert "check that all routers were started with this file" in resealed.stderr
    assert "not needed any more" not in resealed.stderr
    assert fleet.seals() == ["current"] * 3
    fleet.change(drop)
    assert fleet.lines == [new]
    assert await answers(fleet.settings, *made) == [WAS_REVOKED, "acme", "acme"]


@pytest.mark.slow
async def test_after_a_leak_the_commands_of_the_page_leave_nothing_of_the_old_secret(
    server: RedisServer, tmp_path: Path
) -> None:
    fleet = Fleet(server, tmp_path)
    (renew,) = commands("After a leak")
    fleet.file.write_text(SECRET)
    before = created("--tenant=acme", *fleet.place, **fleet.environment)
    forged = created("--tenant=acme", "--role=operator", "--acts-for=*", *fleet.place, **fleet.environment)
    fleet.change(renew)
    assert len(fleet.lines) == 1
    assert SECRET not in fleet.file.read_text()
    renewed = created("--tenant=acme", *fleet.place, **fleet.environment)
    assert await answers(fleet.settings, before, forged, renewed) == [NOT_VALID, NOT_VALID, "acme"]
    listed = fleet.keys("list")
    assert [key.key_id in listed.stdout for key in (before, forged, renewed)] == [False, False, True]
    assert listed.stderr.count("is not sealed with this fleet's secret") == 2
