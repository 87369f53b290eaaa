"""An invalid setting fails with one line that names the setting and the allowed values."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import SettingError, base_type, flat_fields, parse_settings, setting
from trunkline_worker.front_settings import WorkerSettings


@dataclass(frozen=True)
class Inner:
    depth: int = setting(3, help="a depth", minimum=1, maximum=9)
    kind: str = setting("a", help="a kind", choices=("a", "b"))


@dataclass(frozen=True)
class Shown:
    count: int = setting(help="a number")
    folder: str = setting("", metavar="DIR", help="a folder")
    kind: str = setting("a", help="a kind", choices=("a", "b"))
    wait_s: float = setting(1.5, help="a time")
    pause_ms: float = setting(2.0, help="a time")
    room_mib: int = setting(3, help="memory")
    http_port: int = setting(4, help="a port")
    speed_gb_per_s: float | None = setting(None, metavar="GB/S", help="a speed")
    note: str = setting("", help="a note")


@dataclass(frozen=True)
class Outer:
    inner: Inner
    name: str = setting(help="a name")
    hosts: tuple[str, ...] = setting((), help="hosts")
    ratio: float = setting(0.5, help="a ratio", minimum=0.0)
    fast: bool = setting(False, help="go fast")
    limit: int | None = setting(None, help="a limit", minimum=1)


def parse(*argv: str, **environment: str) -> Outer:
    return parse_settings(Outer, argv, environment, prog="test")


def test_flags_win_over_environment_and_environment_over_defaults() -> None:
    made = parse("--name=x", "--depth", "4", TRUNKLINE_DEPTH="5", TRUNKLINE_RATIO="0.25", TRUNKLINE_FAST="true")
    assert made == Outer(Inner(depth=4), name="x", ratio=0.25, fast=True)


def test_lists_optionals_and_negated_flags() -> None:
    made = parse("--name=x", "--hosts=a:1, b:2,", "--limit=7", "--no-fast", TRUNKLINE_FAST="1")
    assert (made.hosts, made.limit, made.fast) == (("a:1", "b:2"), 7, False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "--name is missing: a name"),
        (("--name=x", "--depth=0"), "--depth=0 is out of range; allowed: 1 to 9"),
        (("--name=x", "--depth=much"), "--depth=much is not a whole number; allowed: 1 to 9"),
        (("--name=x", "--kind=c"), "--kind=c is out of range; allowed: a, b"),
        (("--name=x", "--ratio=nan"), "--ratio=nan is out of range; allowed: 0.0 or more"),
        (("--name=x", "--limit=0"), "--limit=0 is out of range; allowed: 1 or more"),
        (("--name=x", "--nmae=y"), "unrecognized arguments: --nmae=y"),
    ],
)
def test_what_makes_no_sense_is_one_line(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse(*argv)
    assert str(caught.value) == said
    with pytest.raises(SettingError, match="--fast=maybe"):
        parse("--name=x", TRUNKLINE_FAST="maybe")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.json"


def test_a_file_says_what_flags_and_environment_do_not(file: Path) -> None:
    file.write_text(
        '{"name": "f", "depth": 7, "kind": "b", "hosts": ["a:1", "b:2"], "ratio": 2, "fast": true, "limit": null}'
    )
    made = parse("--config", str(file), "--depth=4", TRUNKLINE_KIND="a")
    assert made == Outer(Inner(depth=4, kind="a"), name="f", hosts=("a:1", "b:2"), ratio=2.0, fast=True, limit=None)
    assert isinstance(made.ratio, float)
    assert parse("--no-fast", TRUNKLINE_CONFIG=str(file)).fast is False


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"name": "f", "depth": 0}', ": depth=0 is out of range; allowed: 1 to 9"),
        ('{"name": "f", "depth": "4"}', ': depth="4" is not a whole number; allowed: 1 to 9'),
        ('{"name": "f", "depth": 4.5}', ": depth=4.5 is not a whole number; allowed: 1 to 9"),
        ('{"name": "f", "depth": true}', ": depth=true is not a whole number; allowed: 1 to 9"),
        ('{"name": "f", "ratio": NaN}', ": ratio=NaN is out of range; allowed: 0.0 or more"),
        ('{"name": "f", "fast": 1}', ": fast=1 is not true or false; allowed: true or false"),
        ('{"name": "f", "hosts": "a:1"}', ': hosts="a:1" is not a list of texts; allowed: a list of texts'),
        ('{"name": 7}', ": name=7 is not text; allowed: text"),
        ('{"name": "f", "dpeth": 4, "b": 1}', ": there is no setting b, dpeth"),
        ("[]", " is not a JSON object"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(file: Path, written: str, said: str) -> None:
    file.write_text(written)
    with pytest.raises(SettingError) as caught:
        parse("--config", str(file))
    assert str(caught.value) in (f"{file}{said}", f"--config={file}{said}")


def test_a_file_that_is_not_there_or_not_json_is_one_line(file: Path) -> None:
    with pytest.raises(SettingError, match=f"^--config={file}: No such file or directory$"):
        parse("--config", str(file))
    for written in (b"{", b"\xff", b'{"name": "a", "name": "b"}', b"[" * 100_000):
        file.write_bytes(written)
        with pytest.raises(SettingError, match=f"^--config={file} is not JSON: "):
            parse("--config", str(file))


def test_help_shows_what_a_value_is_and_a_default_only_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(Shown, ["--help"], {}, prog="test")
    assert ended.value.code == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.split("options:")[1].splitlines()]
    assert set(shown) >= {
        "--folder DIR a folder",
        "--kind {a,b} a kind (default: a)",
        "--wait-s SECONDS a time (default: 1.5)",
        "--pause-ms MILLISECONDS",
        "--room-mib MIB memory (default: 3)",
        "--http-port PORT a port (default: 4)",
        "--speed-gb-per-s GB/S",
        "a speed",
        "--count N a number (required)",
        "--note TEXT a note",
    }


@pytest.mark.parametrize("cls", [RouterSettings, WorkerSettings])
def test_each_text_of_a_server_says_what_it_is(cls: type) -> None:
    texts = [item for item, hint in flat_fields(cls) if base_type(hint) in (str, tuple)]
    assert [item.name for item in texts if not {"metavar", "choices"} & set(item.metadata)] == []


def test_a_server_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(Outer, ["--version"], {}, prog="trunkline-router")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"trunkline-router {version('trunkline')}\n")
