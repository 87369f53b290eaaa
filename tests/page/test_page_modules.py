"""Modules of the page on their own, in the browser that runs them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.page.browser import Browser
from tests.page.cluster import PageCluster
from trunkline_router.routing.earlier_prompts import CacheMiss

UNKNOWN = "\N{EN DASH}"


class Modules:
    """The page's modules. They are imported as the page imports them."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def call(self, module: str, body: str) -> Any:
        """What a function body returns in which `it` is the module."""
        return self._browser.value(f"const it = await import('/page/{module}.js'); {body}")

    def shown(self, function: str, values: Sequence[float | None]) -> list[str]:
        """Numbers as format.js shows them."""
        return list(self.call("format", f"return {json.dumps(values)}.map(it.{function});"))


@pytest.fixture(scope="module")
def modules(browser: Browser, cluster: PageCluster) -> Iterator[Modules]:
    browser.open(cluster.url, cluster.keys["operator"])
    browser.wait("#freshness", "Live")
    yield Modules(browser)
    browser.check_behaviour("TrustedHTML")  # as a test below wants
    browser.close()


def test_numbers_have_three_digits_and_a_unit(modules: Modules) -> None:
    seconds = [0.00003, 0.0004, 0.012, 0.9996, 1.3249, 41.26, 185, 7384, 0, None]
    durations = ["< 0.1 ms", "0.4 ms", "12 ms", "1.00 s", "1.32 s", "41.3 s", "3 min 5 s", "2 h 3 min", "0 ms", UNKNOWN]
    assert modules.shown("duration", seconds) == durations
    assert modules.shown("count", [0, 950, 1250.4, 48_230, 3_100_000, None]) == [
        "0",
        "950",
        "1,250",
        "48.2 k",
        "3.1 M",
        UNKNOWN,
    ]
    assert modules.shown("percent", [0, 0.004, 0.974, 1, None]) == ["0 %", "< 1 %", "97 %", "100 %", UNKNOWN]


def test_events_are_the_same_however_the_stream_is_cut(modules: Modules) -> None:
    stream = ': keep-alive\n\nevent: update\r\ndata: {"a":\r\ndata:  1}\r\n\r\ndata: [DONE]\n\ndata: not ended'
    body = f"""
      const text = {json.dumps(stream)};
      return [1, 2, 5, text.length].map((size) => {{
        const parser = new it.EventParser();
        const events = [];
        for (let at = 0; at < text.length; at += size) events.push(...parser.take(text.slice(at, at + size)));
        return events;
      }});
    """
    expected = [{"event": "update", "data": '{"a":\n 1}'}, {"event": "message", "data": "[DONE]"}]
    assert modules.call("sse", body) == [expected] * 4


def test_plots_have_round_scales_and_holes_where_nothing_was_sampled(modules: Modules) -> None:
    assert modules.call("stacked_plot", "return [0, 0.7, 3, 10, 4100].map(it.niceAbove);") == [1, 0.8, 3, 10, 6000]
    body = """
      const at = (at, value) => ({ at, values: [value, value] });
      return it.runsOf([at(0, 1), at(5, 2), at(40, 3), at(41, null), at(42, 4)]).map((run) => run.map((one) => one.at));
    """
    assert modules.call("stacked_plot", body) == [[0, 5], [40, 42]]


def test_the_verdict_names_the_longest_part_of_the_time_to_first_token(modules: Modules) -> None:
    def verdict(**fields: Any) -> str:
        parts = [("queue", 0.0, 1.5), ("prefill", 1.5, 0.5), ("queue", 2.0, 1.0), ("network", 3.0, 1.0)]
        told = [{"part": part, "start_s": start, "duration_s": took, "note": ""} for part, start, took in parts]
        request = {
            "ttft_s": 4.0,
            "e2e_s": 6.0,
            "stalled_s": 0.0,
            "cause": "queue",
            "ttft_parts": told,
            "is_failed": False,
        }
        request |= {"outcome": "length", "refused_by": "", "refused_field": ""} | fields
        return str(modules.call("ttft_parts", f"return it.verdict({json.dumps(request)});"))

    waited = "For 2.50 s of it (63 %) the request waited in a worker's queue."
    assert verdict() == f"First token after 4.00 s. {waited}"
    assert verdict(stalled_s=1.25) == f"First token after 4.00 s. {waited} Its client did not read for 1.25 s in all."
    stalled = "First token after 4.00 s. Its client did not read for 9.50 s in all."
    assert verdict(stalled_s=9.5, cause="stalled_client") == stalled
    assert verdict(ttft_s=None) == f"It ended without a token, 6.00 s after the start. {waited}"
    assert verdict(ttft_s=None, ttft_parts=[]) == "It ended without a token, 6.00 s after the start."
    assert verdict(ttft_s=None, outcome="cancelled", ttft_parts=[]).startswith(
        "Its client cancelled it without a token"
    )
    failed = {
        "is_failed": True,
        "outcome": "CONTEXT_LENGTH_EXCEEDED",
        "refused_by": "checks",
        "refused_field": "prompt",
    }
    refused = "after the start, when its parameters and its length were checked: CONTEXT_LENGTH_EXCEEDED (prompt)."
    assert verdict(ttft_s=None, e2e_s=0.002, **failed) == f"It was refused 2.0 ms {refused}"
    assert verdict(ttft_s=None, **failed) == f"It was refused 6.00 s {refused} {waited}"
    lost = verdict(is_failed=True, outcome="NO_WORKER", refused_by="worker")
    assert lost.startswith(
        "First token after 4.00 s. The answer broke off 6.00 s after the start, on its worker: NO_WORKER."
    )
    assert lost.endswith("For 2.50 s of the time to the first token (63 %) the request waited in a worker's queue.")


def test_each_part_that_the_router_names_has_words(modules: Modules) -> None:
    from trunkline_router.record import request_record, ttft_parts

    names = {value for name, value in vars(ttft_parts).items() if name.isupper() and isinstance(value, str)}
    names -= {request_record.COMPLETE, request_record.GRANTED}  # outcomes, which it imports
    assert len(names) > 5
    assert names == set(modules.call("ttft_parts", "return Object.keys(it.CAUSES);"))


def test_the_advice_says_why_a_worker_has_told_nothing(modules: Modules) -> None:
    part = {"part": "worker", "start_s": 0.0, "duration_s": 1.0, "note": "w: the worker was lost later (NO_WORKER)"}
    request = {"ttft_s": 1.0, "cause": "worker", "ttft_parts": [part], "is_failed": False}
    advice = modules.call("ttft_parts", f"return it.advice({json.dumps(request)});")
    assert advice == "A worker tells it when the request has ended there. w: the worker was lost later (NO_WORKER)."


def test_each_stage_that_can_refuse_has_words(modules: Modules) -> None:
    from trunkline_router.record import request_record as stages

    names = {stages.ARRIVAL, stages.CHECKS, stages.MODEL, stages.TOKENIZER, stages.QUOTAS, stages.PLACEMENT}
    names |= {stages.WORKER, stages.SLOW_CLIENT}
    assert names == set(modules.call("refusal", "return Object.keys(it.STAGES);"))


def test_each_reason_of_a_cache_miss_has_words_and_names_the_place(modules: Modules) -> None:
    assert {str(miss) for miss in CacheMiss} == set(modules.call("cache_miss", "return Object.keys(it.MISSES);"))

    def said(miss: str, seen_tokens: int = 208) -> list[str]:
        request = {"cache_miss": miss, "seen_tokens": seen_tokens, "prompt_tokens": 6204}
        body = f"const request = {json.dumps(request)}; return [it.shortMiss(request), it.missSentence(request)];"
        return list(modules.call("cache_miss", body))

    short, sentence = said("changed")
    assert short == "changed after 208"
    assert "earlier prompts share only the first 208 of its 6,204 tokens (3 %)." in sentence
    assert said("changed", 0)[0] == "changed"
    assert said("new", 0) == ["new", "No earlier prompt begins like this one."]
    assert said("new", 5008)[1] == "Earlier prompts share the first 5,008 of its 6,204 tokens (81 %); the rest is new."
    assert said("lost")[0] == "worker lost"
    assert said("", 0) == ["", ""]
    requests = [{"cache_miss": miss} for miss in ("new", "", "evicted", "new")]
    counts = modules.call("cache_miss", f"return it.missCounts({json.dumps(requests)});")
    assert counts == "3 of these 4 found little in a cache: evicted 1, new 2."


def test_text_cannot_become_markup(modules: Modules) -> None:
    body = "try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; }"
    assert modules.call("dom", body) == "TypeError"


def test_arguments_are_indented_and_otherwise_as_they_were_written(modules: Modules) -> None:
    def indented(json_text: str) -> Any:
        return modules.call("answer_view", f"return it.indented({json.dumps(json_text)});")

    assert indented('{"a":[1.0, 12345678901234567890],\n"b{,":{"c" :"x, \\"y\\": [ ]"},"d":{ },"e":[]}') == (
        '{\n  "a": [\n    1.0,\n    12345678901234567890\n  ],\n'
        '  "b{,": {\n    "c": "x, \\"y\\": [ ]"\n  },\n  "d": {},\n  "e": []\n}'
    )
    assert indented('{"a": "b') is None


def test_an_answer_is_shown_in_its_order_and_only_a_call_without_an_end_is_marked(modules: Modules) -> None:
    def shown(deltas: list[dict[str, Any]], *, is_complete: bool) -> list[list[str]]:
        """Tag and text of each part."""
        body = f"""
          const output = document.createElement("div");
          const view = new it.AnswerView(output);
          const brought = {json.dumps(deltas)}.map((delta) => view.add(delta));
          if (brought.pop() || brought.includes(false)) return "only the last delta brings nothing";
          view.end({json.dumps(is_complete)});
          return [...output.childNodes].map((part) => [part.nodeName, part.textContent]);
        """
        answer: list[list[str]] = modules.call("answer_view", body)
        return answer

    def call(index: int, arguments: str, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": {**function, "arguments": arguments}}]}

    deltas = [
        *({"reasoning": "Hm"}, {"reasoning_content": " <b>!"}, {"content": "a"}, {"content": "<i>"}),
        *(call(0, "", name="f"), call(0, '{"x"'), call(0, ": 1}"), call(1, "{", name="g<b>"), call(1, "}")),
        {"content": None, "reasoning": ""},
    ]
    before = [["DETAILS", "ReasoningHm <b>!"], ["#text", "a<i>"], ["FIGURE", 'Calls f{\n  "x": 1\n}']]
    assert shown(deltas, is_complete=True) == [*before, ["FIGURE", "Calls g<b>{}"]]
    assert shown(deltas, is_complete=False) == [*before, ["FIGURE", "Calls g<b> · cut off{}"]]
    assert shown([call(0, '{"x', name="f"), {}], is_complete=True) == [["FIGURE", 'Calls f · cut off{"x']]
