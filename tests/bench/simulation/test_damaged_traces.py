"""Traces with damaged lines: refused in one line that names file, line and switch, or read without those lines."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.simulation.commands import status_of
from trunkline_bench.simulation import main as simulate
from trunkline_bench.simulation.fleet import main as simulate_fleet
from trunkline_bench.simulation.traces.trace_lines import (
    NAMED_LINES,
    InvalidLineError,
    SkippedLines,
    TraceError,
)
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.traces.workload import read_trace

AZURE_HEAD = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake_line(draw: random.Random) -> bytes:
    tokens = draw.randint(1, 1600)
    ids = [draw.randint(0, 5) for _ in range(-(-tokens // 512))]
    entry = {"timestamp": 1000 * draw.randint(0, 9), "input_length": tokens, "output_length": draw.randint(1, 9)}
    return json.dumps(entry | {"hash_ids": ids}).encode()


def text_line(draw: random.Random) -> bytes:
    words = " ".join(draw.choice(["fox", "día", "麤"]) for _ in range(draw.randint(1, 30)))
    return json.dumps({"timestamp": draw.randint(0, 10**7), "input": words, "output": "", "session_id": "a"}).encode()


def azure_line(draw: random.Random) -> bytes:
    second = f"{draw.randint(0, 59):02}.{draw.randint(0, 10**7 - 1):07}"
    return f"2023-11-16 18:15:{second},{draw.randint(1, 999)},{draw.randint(1, 99)}".encode()


MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "mooncake": mooncake_line, "text": text_line, "azure": azure_line,
}  # fmt: skip

# What JSON lets a field be, and no trace: beside what is of the wrong kind, numbers that no length or time may be.
WRONG: list[object] = [
    None, True, -1, 0.5, "7", "", [], [1, "x"], {}, float("nan"), float("inf"), -float("inf"), 10**400, "\ud800"
]  # fmt: skip
JUNK = [b"rubbish", b"{", b"[1]", b"null", b"\xff\xfe", b'{"a":' * 50_000, b"{}", b'"', b"\x00", b",,,,"]
FIELDS = {
    "mooncake": ["timestamp", "input_length", "output_length", "hash_ids", "lane", "tenant"],
    "text": ["timestamp", "input", "output", "session_id", "lane", "tenant"],
}
FINE = {("tenant", "7"), ("tenant", ""), ("session_id", "7"), ("session_id", ""), ("input", "7"), ("output", "7"),
        ("output", ""), ("timestamp", "0.5"), ("output", "'\\ud800'")}  # fmt: skip
AZURE_WRONG = ["", "-1", "0", "1.5", "nan", "x", "9" * 23, '"', "2023-13-16 18:15:46", "2023-11-16 18:15:46.68junk"]


def damaged(kind: str, line: bytes, draw: random.Random) -> bytes:
    """The line with one defect."""
    if draw.random() < 0.4:
        return draw.choice(JUNK)
    if draw.random() < 0.2:
        return line[: draw.randint(1, len(line) - 1)] if kind != "azure" else line[: draw.randint(1, line.index(b","))]
    if kind == "azure":
        cells = line.decode().split(",")
        cells[draw.randrange(3)] = draw.choice(AZURE_WRONG)
        return ",".join(cells).encode()
    entry = json.loads(line)
    name = draw.choice(FIELDS[kind])
    value = draw.choice(WRONG)
    shown = value if isinstance(value, str) and value != "\ud800" else repr(value)
    if (name, shown) in FINE:
        value = {}
    if name in ("timestamp", "input", "input_length", "hash_ids") and draw.random() < 0.3:
        del entry[name]
    else:
        entry[name] = value
    return json.dumps(entry).encode()


def written(path: Path, kind: str, lines: list[bytes]) -> Path:
    content = (AZURE_HEAD if kind == "azure" else b"") + b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def shown(requests: list[TraceRequest]) -> list[tuple[object, ...]]:
    """The fields of all requests, including tokens."""
    return [
        (r.arrival_s, r.prompt_tokens, r.output_tokens, r.prompt(), r.lane, r.tenant, r.conversation) for r in requests
    ]


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.1, 0.5, 0.9]), compressed=st.booleans())
def test_skipping_damaged_lines_keeps_exactly_the_undamaged_ones(
    kind: str, tmp_path_factory: pytest.TempPathFactory, seed: int, share: float, compressed: bool
) -> None:
    draw = random.Random(seed)
    folder = tmp_path_factory.getbasetemp()
    whole = [MAKERS[kind](draw) for _ in range(draw.randint(1, 30))]
    bad = {index for index in range(len(whole)) if draw.random() < share}
    bad -= {draw.randrange(len(whole))}  # at least one line is left
    suffix = ".gz" if compressed else ""
    # A blank line replaces each damaged one, since an Azure prompt depends on its line number.
    expected = written(folder / f"left{suffix}", kind, [b"" if i in bad else line for i, line in enumerate(whole)])
    lines = [damaged(kind, line, draw) if i in bad else line for i, line in enumerate(whole)]
    path = written(folder / f"damaged{suffix}", kind, lines)
    skipped = SkippedLines()
    assert shown(read_trace(path, skipped=skipped)) == shown(read_trace(expected))
    numbers = [index + (2 if kind == "azure" else 1) for index in sorted(bad)]
    assert (skipped.count, skipped.first) == (len(bad), numbers[:NAMED_LINES])
    if not bad:
        assert str(skipped) == ""
        return
    assert str(skipped).startswith(f"skipped {len(bad)} invalid line")
    assert "\n" not in str(skipped)
    with pytest.raises(InvalidLineError, match=r"^[^\n]*$") as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{numbers[0]}: ")
    limit = draw.randint(1, len(whole))
    assert shown(read_trace(path, limit=limit, skipped=SkippedLines())) == shown(read_trace(expected, limit=limit))


def test_lines_may_be_in_any_order(tmp_path: Path) -> None:
    """Production traces are not sorted: a line may be earlier than the one before."""
    lines = [json.dumps({"timestamp": t, "input": "abcd" * (t + 1), "output": ""}).encode() for t in (3, 1, 2, 0)]
    skipped = SkippedLines()
    requests = read_trace(written(tmp_path / "trace", "text", lines), skipped=skipped)
    assert [request.prompt_tokens for request in requests] == [1, 2, 3, 4]
    assert skipped.count == 0


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("t", b"", "the file is empty"),
        ("t", b"rubbish\n{}\n", ":1: neither JSON lines nor a CSV"),
        ("t", AZURE_HEAD + b"x,1,1\n", "no requests; skipped 1 invalid line: 2 (line 2: TIMESTAMP is 'x'"),
        (
            "t",
            b"TIMESTAMP,GeneratedTokens,ContextTokens\n2023-11-16 18:15:46,1,1\n",
            ":1: neither JSON lines nor a CSV",
        ),
        (
            "t.gz",
            gzip.compress(b'{"timestamp": 1, "input": "a", "output": ""}\n' * 99, mtime=0)[:-20],
            "cannot be read",
        ),
    ],
)
def test_a_file_without_requests_or_with_a_lost_rest_is_refused_even_with_skipping(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"^[^\n]*$") as caught:
        read_trace(path, skipped=SkippedLines())
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("module", "prog", "needed"),
    [
        (simulate, "simulate", ()),
        pytest.param(
            simulate_fleet,
            "simulate-fleet",
            ("--copies", 2, "--duration-s", 5, "--ramp-s", 0, "--workers", 1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_command_refuses_a_damaged_trace_or_reports_the_skipped_lines_below_its_table(
    module: ModuleType, prog: str, needed: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fine = [
        json.dumps({"timestamp": 200_000 * number, "input": f"{number} and so on", "output": "abcd"}).encode()
        for number in range(12)
    ]
    empty = json.dumps({"timestamp": 5, "input": "", "output": ""}).encode()
    path = written(tmp_path / "trace.jsonl", "text", [empty, *fine[:4], b"[", *fine[4:], empty])
    output = tmp_path / "out"
    arguments = ("--trace", path, *needed, "--output", output)
    assert status_of(module.main, *arguments) == 2
    told = capsys.readouterr()
    flag = "--skip-invalid leaves such lines out"
    assert told.err == f"trunkline bench {prog}: {path}:1: input is empty; {flag}\n"
    assert not told.out
    assert status_of(module.main, *arguments, "--skip-invalid") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{path}: skipped 3 invalid lines: 1, 6, 15 (line 1: input is empty)"
    if module is simulate_fleet:
        assert [run["skipped_lines"] for run in json.loads((output / "fleet.json").read_text())] == [3]
    assert status_of(module.main, *arguments[:-2], "--skip-invalid") == 0
    written(path, "text", fine)
    assert status_of(module.main, *arguments[:-2], "--skip-invalid") == 0
    assert "skipped" not in capsys.readouterr().out.splitlines()[-1]
