"""Trace formats, and errors for invalid lines."""

import gzip
import json
from pathlib import Path

import pytest

from trunkline_bench.simulation.traces.trace_lines import TraceError
from trunkline_bench.simulation.traces.workload import at_rate, read_trace, window

MOONCAKE_LINE = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncake_ids_become_prefixes_that_are_equal_where_the_ids_are(tmp_path: Path) -> None:
    lines = [
        MOONCAKE_LINE,
        {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [1, 3], "lane": "batch", "tenant": "x"},
        {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [1]},
    ]
    requests = read_trace(write(tmp_path / "trace.jsonl", *lines))
    assert [request.arrival_s for request in requests] == [0.0, 1.5, 3.0], "spread until the next bucket"
    first, second, third = (request.prompt() for request in requests)
    assert [len(first), len(second), len(third)] == [700, 1024, 512]
    assert first[:512] == second[:512] == third
    assert first[512:] != second[512:700]
    assert (requests[1].lane, requests[1].tenant) == ("batch", "x")


def test_azure_rows_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE_HEAD + "2023-11-16 18:15:46.6805900,37,4\n2023-11-16 18:15:50.9951690,39,9")
    requests = read_trace(path)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(37, 4), (39, 9)]
    assert requests[1].arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert requests[0].prompt()[:8] != requests[1].prompt()[:8]
    assert requests[0].prompt() == requests[0].prompt()


def test_text_is_tokenized_so_that_prefixes_stay_equal(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    entries = [{"timestamp": t * 1_000_000, "input": "abcdefgh" + "xyz" * t, "output": "done"} for t in (1, 3)]
    path.write_bytes(gzip.compress("".join(json.dumps(entry) + "\n" for entry in entries).encode()))
    first, second = read_trace(path)
    assert second.arrival_s == 2.0
    assert first.prompt()[:2] == second.prompt()[:2]
    assert (first.prompt_tokens, first.output_tokens) == (3, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"timestamp": -1}, "timestamp is -1; it must be a number of at least 0"),
        ({"input_length": "many"}, "input_length is 'many'"),
        ({"output_length": 0}, "output_length is 0"),
        ({"hash_ids": [1]}, "hash_ids has 1 entries; 700 tokens of input_length need 2"),
        ({"hash_ids": "no"}, "hash_ids must be a list of whole numbers"),
        ({"lane": "express"}, "lane is 'express'; it must be one of interactive, standard, batch"),
        ({"tenant": 5}, "tenant is 5; it must be text"),
        ({"tenant": "\ud800"}, "tenant is '\\ud800'; it must be text"),
        ({"timestamp": 10**400}, "timestamp is 1000"),
        ({"timestamp": 1e300}, "timestamp is 1e+300; it must be a number of at least 0 and at most 1e+13"),
        ({"input_length": 10**400}, "input_length is 1000"),
        (
            {"output_length": 10**12},
            "output_length is 1000000000000; it must be a number of at least 1 and at most 1e+09",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = write(tmp_path / "trace.jsonl", MOONCAKE_LINE, MOONCAKE_LINE | change)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: {problem}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 160


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("hello\n", "neither JSON lines nor a CSV"),
        ('{"hash_ids": [1]}\n', "timestamp is missing"),
        ("{\n", "not JSON"),
        (AZURE_HEAD + "yesterday,3,4\n", "TIMESTAMP is 'yesterday', which is not a time"),
        (AZURE_HEAD + "2023-11-16 18:15:46,3,x\n", "GeneratedTokens is 'x', which is not a whole number"),
        (AZURE_HEAD + "2023-11-16 18:15:46,0,1\n", "ContextTokens is 0"),
        ('{"timestamp": 1, "input": "", "output": ""}\n', "input is empty"),
        ("\n \n", "the file is empty"),
        ("\n\nhello\n", ":3: neither JSON lines nor a CSV"),
        (f'{{"timestamp": {10**400}, "input": "a", "output": "b"}}\n', ":1: timestamp is 1000"),
        ("\n" + '{"a":' * 100_000, ":2: JSON is nested too deeply"),
        (json.dumps(MOONCAKE_LINE) + "\n" + "[" * 100_000, ":2: JSON is nested too deeply"),
        (AZURE_HEAD + f"2023-11-16 18:15:46,{'9' * 23},1\n", ":2: ContextTokens is 9999"),
        (AZURE_HEAD + "2023-11-16 18:15:46,3000000000,1\n", ":2: ContextTokens is 3000000000; it must be a number"),
        (AZURE_HEAD + "2023-11-16 18:15:46,5,3\n\n \n2023-11-16 18:15:47,5,x\n", ":5: GeneratedTokens is 'x'"),
        ("\n" + AZURE_HEAD + "\n2023-11-16 18:15:47,5,x\n", ":4: GeneratedTokens is 'x'"),
        (AZURE_HEAD + "2023-11-16 18:15:46,5,3\n2023-11-16 18:15:47,5\n", ":3: GeneratedTokens is ''"),
        (AZURE_HEAD + f'2023-11-16 18:15:46,5,3\n\n"{"x" * 200_000}",1,1\n', ":4: not CSV: field larger than"),
        (
            AZURE_HEAD + '2023-11-16 18:15:46,5,3\n"2023-11-16 18:15:47,1,1\n' + "2023-11-16 18:15:48,1,1\n" * 9,
            ":3: TIMESTAMP is '2023-11-16",
        ),
    ],
)
def test_an_invalid_file_is_named_in_the_error(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"^[^\n]*$") as caught:
        read_trace(path)
    assert problem in str(caught.value)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nowhere")


def test_blank_lines_are_skipped_and_the_limit_counts_requests(tmp_path: Path) -> None:
    line = json.dumps(MOONCAKE_LINE)
    texts = {
        "mooncake.jsonl": f"\n\n{line}\n \n\n{line}\n{line}\n",
        "text.jsonl": "\n" + '\n{"timestamp": 1, "input": "a", "output": "b"}\n' * 3,
        "azure.csv": f"\n{AZURE_HEAD}" + "\n \n2023-11-16 18:15:46,5,3" * 3,
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        assert [len(read_trace(path, limit=limit)) for limit in (None, 1, 2, 9)] == [3, 1, 2, 3], name


def test_lines_after_the_limit_are_not_read(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "trace.jsonl", MOONCAKE_LINE, MOONCAKE_LINE, "rubbish"), limit=2)) == 2


def test_the_production_traces_are_read_whole(shared: Path) -> None:
    traces = shared / "traces"
    mooncake = read_trace(traces / "mooncake_conversation.jsonl")
    assert len(mooncake) == 12_031
    assert 3500 < mooncake[-1].arrival_s < 3600
    assert len(read_trace(traces / "azure_2023_conversation.csv")) == 19_366
    agent = read_trace(traces / "lmcache_miniswe.jsonl.gz", limit=20)
    assert all(len(request.prompt()) == request.prompt_tokens for request in agent)


def test_rates_and_windows_keep_the_rhythm(tmp_path: Path) -> None:
    lines = [MOONCAKE_LINE | {"timestamp": t * 1000} for t in (0, 1, 4, 10)]
    requests = read_trace(write(tmp_path / "trace.jsonl", *lines))
    assert [r.arrival_s for r in at_rate(requests, 4.0)] == pytest.approx([0.0, 0.1, 0.4, 1.0])
    assert [r.arrival_s for r in window(requests, 1.0, 10.0)] == [0.0, 3.0]
    at_once = read_trace(write(tmp_path / "trace.jsonl", *(MOONCAKE_LINE | {"timestamp": t} for t in (0, 5e-305))))
    assert [r.arrival_s for r in at_rate(at_once, 1e-6)] == pytest.approx([0.0, 0.0])


BROKEN_FILES = {
    "infinite length": ("t.jsonl", json.dumps(MOONCAKE_LINE | {"input_length": float("inf")}).encode(), "input_length"),
    "infinite time": ("t.jsonl", json.dumps(MOONCAKE_LINE | {"timestamp": float("inf")}).encode(), "timestamp"),
    "fraction": ("t.jsonl", json.dumps(MOONCAKE_LINE | {"input_length": 700.5}).encode(), "a whole number"),
    "booleans": ("t.jsonl", json.dumps(MOONCAKE_LINE | {"hash_ids": [True, 2]}).encode(), "hash_ids"),
    "not UTF-8": ("t.jsonl", json.dumps(MOONCAKE_LINE).encode() + b"\n\xff\n", ":2: not UTF-8"),
    "not gzip": ("t.jsonl.gz", b"plain\n", ":1: cannot be read"),
    "cut off": ("t.jsonl.gz", gzip.compress(json.dumps(MOONCAKE_LINE).encode() * 99)[:-20], "cannot be read"),
    "half a surrogate": ("t.jsonl", b'{"timestamp": 1, "input": "\\ud800", "output": ""}', ":1: input is not text"),
    "another column": ("t.csv", AZURE_HEAD.replace("edTokens", "edTokensX").encode(), "neither JSON lines nor a CSV"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_broken_file_is_one_line_and_no_traceback(tmp_path: Path, case: str) -> None:
    name, content, problem = BROKEN_FILES[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"^[^\n]*$") as caught:
        read_trace(path)
    assert problem in str(caught.value)
