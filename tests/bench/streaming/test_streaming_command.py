"""The streaming benchmark's command without a working gateway."""

import sys
from pathlib import Path

import pytest

from trunkline_bench.streaming.main import main
from trunkline_bench.streaming.smg import launched
from trunkline_bench.streaming.tables import NO_SMG, beside_smg


def test_without_the_gateway_the_report_says_so_in_one_line() -> None:
    assert beside_smg(None, {}, {}, {}) == NO_SMG + "\n"
    assert "\n" not in NO_SMG


def test_a_missing_gateway_command_is_an_error_before_any_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench-streaming", "--smg", str(tmp_path / "smg")])
    with pytest.raises(SystemExit):
        main()
    assert f"--smg: there is no {tmp_path / 'smg'}" in capsys.readouterr().err


async def test_a_gateway_that_exits_at_its_start_is_an_error_of_one_line(tmp_path: Path) -> None:
    command = tmp_path / "smg"
    command.write_text("#!/bin/sh\nexit 3\n")
    command.chmod(0o755)
    with pytest.raises(SystemExit, match=r"^bench-streaming: .*/smg exited with 3 at its start$"):
        async with launched(command, "127.0.0.1:1", start_s=30):
            pass
