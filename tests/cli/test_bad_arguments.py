"""An invalid argument prints one line that names the flag, and never a traceback."""

import contextlib
import io
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine_rig import DEMO_MODEL
from trunkline.sampling_params import TABLE
from trunkline_cli import drain, generate, launcher, main
from trunkline_cli.plan import ClusterPlan

NOT_UTF8 = os.fsdecode(b"\xff")
NO_WHOLE = ["", "x", "1.5", "nan", "-1", "9" * 40, "9" * 5000, "1e3", NOT_UTF8]
NO_PORT = [*NO_WHOLE, "0", "65536"]
NO_NUMBER = ["", "x", "1,5", NOT_UTF8]
NO_TIME = [*NO_NUMBER, "nan", "inf", "-1", "1e300"]
NO_ADDRESS = [
    "",
    "x",
    ":50051",
    "x:",
    "x:0",
    "127.0.0.1:-1",
    "x:65536",
    "http://x:1",
    "::1:5",
    "a b:1",
    "[::1]",
    NOT_UTF8,
]
NO_TEXT = [NOT_UTF8]
REQUIRED = {
    "serve": ("--model", str(DEMO_MODEL)), "generate": ("Once",), "models": (), "drain": (),
}  # fmt: skip
BAD: dict[str, dict[str, list[str]]] = {
    "serve": {
        "--workers": [*NO_WHOLE, "0"],
        "--port": NO_PORT,
        "--worker-port": NO_PORT,
        "--metrics-port": [port for port in NO_PORT if port not in ("0", "-1")],
        "--threads": [*NO_WHOLE, "0", "4097"],
        "--host": ["", "a b", "[::1]", "a/b", NOT_UTF8],
        "--name": NO_TEXT,
    },
    "generate": {
        "--server": NO_ADDRESS,
        "--timeout-s": NO_TIME,
        "--lane": ["", "express"],
        "--logit-bias": ["", "5", "=1", "x=1", "1=x", "-1=1", "9999999999=1"],
        **dict.fromkeys(["--model", "--system", "--stop"], NO_TEXT),
        **{
            "--" + name.replace("_", "-"): NO_NUMBER if row.kind is float else NO_WHOLE
            for name, row in TABLE.items()
            if row.kind in (float, int)
        },
        **dict.fromkeys(["--n", "--stop-token-id"], NO_WHOLE),
    },
    "models": {"--server": NO_ADDRESS},
    "drain": {"--address": NO_ADDRESS, "--timeout-s": NO_TIME, "--grant-key": NO_TEXT},
}
CASES = [(command, flag, value) for command, flags in BAD.items() for flag, values in flags.items() for value in values]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The commands that would have run. None is run."""
    done: list[object] = []

    def do(what: Namespace | ClusterPlan, **_: object) -> int:
        done.append(what)
        return 0

    monkeypatch.setattr(launcher, "serve", do)
    for module, name in ((generate, "run"), (generate, "list_models"), (drain, "run")):
        monkeypatch.setattr(module, name, do)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return done


def status_of(*arguments: str) -> tuple[int, str]:
    """The command's exit status and its standard error, encoded as for a terminal."""
    told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stderr(told):
        patched.setattr(sys, "argv", ["trunkline", *arguments])
        with pytest.raises(SystemExit) as exit:
            main.main()
    code = exit.value.code
    return int(code or 0), told.buffer.getvalue().decode()


@pytest.mark.parametrize(("command", "flag", "value"), CASES)
def test_a_bad_value_is_one_line_that_names_its_flag(
    command: str, flag: str, value: str, started: list[object]
) -> None:
    status, told = status_of(command, *REQUIRED[command], f"{flag}={value}")
    assert status == 2
    assert told.startswith(f"trunkline {command}: argument {flag}")
    assert told.count("\n") == 1
    assert not started


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "trunkline: the following arguments are required: COMMAND"),
        ("bogus", "trunkline: argument COMMAND: invalid choice: 'bogus'"),
        ("serve", "trunkline serve: the following arguments are required: --model"),
        ("serve --model", "trunkline serve: argument --model: expected one argument"),
        ("generate", "trunkline generate: the following arguments are required: prompt"),
        (f"generate {NOT_UTF8}", "trunkline generate: argument prompt: '\\udcff' is not UTF-8"),
        ("models extra", "trunkline: unrecognized arguments: extra"),
        ("serve --model m --nope 3", "trunkline serve: unrecognized arguments: --nope 3"),
        ("serve --model m --tls-cert a", "trunkline serve: --tls-cert cannot be passed on: "),
        ("bench", "trunkline bench: the following arguments are required: COMMAND"),
        ("bench bogus", "trunkline bench: argument COMMAND: invalid choice: 'bogus'"),
    ],
)
def test_a_command_that_is_not_whole_is_one_line(arguments: str, said: str) -> None:
    status, told = status_of(*arguments.split())
    assert status == 2
    assert told.startswith(said)
    assert told.count("\n") == 1


FLAGS = [(command, flag) for command, flags in BAD.items() for flag in flags]
WORDS = st.one_of(
    st.sampled_from(sorted({value for _, _, value in CASES})),
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=20),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(flag=st.sampled_from(FLAGS), value=WORDS)
def test_whatever_stands_behind_a_flag_is_taken_or_refused_in_one_line(flag: tuple[str, str], value: str) -> None:
    command, name = flag
    status, told = status_of(command, *REQUIRED[command], f"{name}={value}")
    assert status == (2 if told else 0)
    assert told == "" or (told.startswith(f"trunkline {command}: ") and told.count("\n") == 1)


def test_a_model_that_cannot_be_looked_for_is_one_line(tmp_path: Path, started: list[object]) -> None:
    for name, problem in {
        "": "there is no model directory ''",
        str(tmp_path / ("a" * 300)): "File name too long",
        str(DEMO_MODEL / "config.json"): "is a file: a model is a GGUF file, or a directory with config.json",
        str(DEMO_MODEL / "config.json" / "x"): "there is no model directory ",
        "x\ny/z": "could not be downloaded",
    }.items():
        status, told = status_of("serve", f"--model={name}")
        assert status == 1
        *before, last = told.splitlines()
        assert last.startswith("trunkline serve: ")
        assert problem in last
        assert [line.rsplit(": ", 1)[1] for line in before] == ["looking on the Hugging Face hub"] * len(before)
    assert not started


def test_a_models_directory_that_is_no_text_needs_a_name(tmp_path: Path, started: list[object]) -> None:
    folder = tmp_path / NOT_UTF8
    folder.mkdir()
    status, told = status_of("serve", f"--model={folder}")
    assert status == 1
    assert "is not UTF-8: give the model another one with --name" in told
    assert told.count("\n") == 1
    assert status_of("serve", f"--model={folder}", "--name=m") == (0, "")
    (plan,) = started
    assert isinstance(plan, ClusterPlan)
    assert plan.name == "m"


@pytest.mark.parametrize("command", ["router", "worker"])
def test_a_console_script_that_is_missing_is_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "script", lambda name: f"/nowhere/{name}")
    monkeypatch.setattr(sys, "argv", ["trunkline", command])
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == f"trunkline {command}: /nowhere/trunkline-{command}: No such file or directory"
