"""Aliases of models: which name wins, and the one line for what is no alias."""

import pytest

from trunkline_router.main import router_settings
from trunkline_router.request.prepare import ModelAliases
from trunkline_router.settings import aliases_problem


def test_an_exact_name_precedes_a_prefix_and_a_longer_prefix_a_shorter_one() -> None:
    aliases = ModelAliases(["*=any", "claude-*=big", "claude-haiku-*=small", "claude-haiku-old=old", "a=b=c"])
    for name, model in {
        "claude-haiku-old": "old",
        "claude-haiku-4": "small",
        "claude-haiku": "big",
        "claude-": "big",
        "gpt": "any",
        "a": "b=c",
        "": None,
    }.items():
        assert aliases.model_of(name) == model, name
    assert ModelAliases(["gpt-4o=m"]).model_of("gpt-4o-mini") is None


@pytest.mark.parametrize("entry", ["gpt", "=m", "gpt=", "=", "g*t=m", "**=m", "gpt=m*", "gpt = m", "gpt=gpt"])
def test_an_entry_that_is_no_alias_is_refused_in_one_line(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(entry) in (aliases_problem([entry]) or "")
    with pytest.raises(SystemExit):
        router_settings(["--workers=localhost:1", f"--model-aliases=x=y,{entry},z=y"])
    told = capsys.readouterr().err
    assert told.startswith("trunkline-router: --model-aliases: ")
    assert told.count("\n") == 1


def test_a_name_may_be_there_once() -> None:
    assert aliases_problem(["a=b", "a*=b", "c=b"]) is None
    assert "'a' is there twice" in (aliases_problem(["a=b", "a=c"]) or "")
    assert "'b' is an alias itself" in (aliases_problem(["a=b", "b=c"]) or "")
