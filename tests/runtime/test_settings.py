"""Settings fail loudly, with the name of the setting and what is allowed."""

from dataclasses import dataclass

import pytest

from trunkline_runtime.settings import SettingError, parse_settings, setting


@dataclass(frozen=True)
class Inner:
    depth: int = setting(3, help="a depth", minimum=1, maximum=9)
    kind: str = setting("a", help="a kind", choices=("a", "b"))


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
