"""The record of a stream over HTTP: what it holds does not depend on how tokens are put into events."""

import json
from typing import Any

from trunkline_bench.faults.http_streams import HttpStreams
from trunkline_bench.faults.streams import Record


def record_of(*logprobs: dict[str, Any]) -> Record:
    record, streams = Record(), HttpStreams(port=0)
    for one in logprobs:
        streams._take(record, json.dumps({"choices": [{"index": 0, "text": "", "logprobs": one}]}))
    return record


def columns(*rows: tuple[str, float]) -> dict[str, Any]:
    tokens, values = [token for token, _ in rows], [value for _, value in rows]
    tops = [{token: value} for token, value in rows]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": [*range(len(rows))]}


def test_merged_log_probabilities_equal_those_of_single_tokens() -> None:
    once = {"tokens": ["b"], "token_logprobs": [-2.0], "top_logprobs": [{"b": -2.0}], "text_offset": [1]}
    merged = record_of(columns(("a", -1.0), ("b", -2.0))).outcome()
    assert record_of(columns(("a", -1.0)), once).outcome() == merged
    assert record_of(columns(("a", -1.0)), {**once, "token_logprobs": [-2.5]}).outcome() != merged

    first, second = {"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}
    assert record_of({"content": [first]}, {"content": [second]}).outcome() == (
        record_of({"content": [first, second]}).outcome()
    )
