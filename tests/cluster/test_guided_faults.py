"""Accidents to workers under streams with grammars: no token changes, and every answer is of its grammar."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator
from llguidance import LLTokenizer

from tests.cluster.harmed_fleet import INTER_TOKEN_TIMEOUT, HarmedFleet
from tests.cluster.processes import alive, descendants, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.client.client_requests import generate_request
from trunkline_bench.faults.fleet import running_fleet
from trunkline_bench.faults.main import worker_flags
from trunkline_bench.faults.scenarios import ACCIDENTS, struck, undisturbed
from trunkline_bench.faults.streams import Order, Record, orders
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import Matching, compiled

pytestmark = pytest.mark.asyncio(loop_scope="package")

STREAMS, SOME, FEW = 50, 16, 8
VOCAB, EOS = 2048, 1  # the demo model's
TOKENS = (150, 400)  # the shorter ones are cut off

# Long names of required properties are runs of forced tokens, in which streams break off as well.
TALE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["title_of_the_tale", "the_animals_in_it", "what_happens_in_the_end"],
    "properties": {
        "title_of_the_tale": {"type": "string", "minLength": 10, "maxLength": 40},
        "the_animals_in_it": {
            "type": "array",
            "minItems": 3,
            "maxItems": 4,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name_of_the_animal", "kind_of_the_animal", "number_of_its_legs"],
                "properties": {
                    "name_of_the_animal": {"type": "string", "minLength": 3, "maxLength": 12},
                    "kind_of_the_animal": {"enum": ["a small brown bear", "a small brown bird", "an old grey wolf"]},
                    "number_of_its_legs": {"type": "integer", "minimum": 2, "maximum": 8},
                },
            },
        },
        "what_happens_in_the_end": {"type": "string", "minLength": 40, "maxLength": 120},
    },
}
LINES = r"(chapter (one|two|three|four|five): [a-z ]{20,60}\n){4,6}the end\."
GRAMMARS: Sequence[dict[str, Any]] = (
    {"json_schema": TALE},
    {"regex": LINES},
    {"json_schema": {"type": "object", "required": ["once"], "properties": {"once": {"const": "upon a time " * 12}}}},
    {"json_schema": {"type": "array", "minItems": 12, "maxItems": 20, "items": {"$ref": "#/$defs/tale"},
                     "$defs": {"tale": {"type": "string", "minLength": 8, "maxLength": 16}}}},
)  # fmt: skip


def guided(count: int) -> list[Order]:
    """As orders(), each with a grammar, without texts that would cut answers off."""
    made = []
    for order, grammar in zip(orders(count, tokens=TOKENS), cycle(GRAMMARS), strict=False):
        options = {name: value for name, value in order.options.items() if not name.startswith(("stop", "include"))}
        made.append(Order(order.prompt, options | {"grammar": grammar}))
    return made


def endings(wanted: Sequence[Order], records: Sequence[Record]) -> Iterator[str]:
    """Asserts that whole answers are of their grammars, and that others begin like one. Yields the finish reasons."""
    library = LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), n_vocab=VOCAB, eos_token=[EOS])
    for order, record in zip(wanted, records, strict=True):
        ((kind, value),) = order.options["grammar"].items()
        named = generate_request("", model="", n=1, request_id="", lane=None, grammar=order.options["grammar"]).grammar
        assert record.token_ids.keys() == record.finish.keys()
        for choice, reason in record.finish.items():
            text = record.text[choice]
            if reason == "length":
                matcher = compiled(library, llguidance_grammar(named.kind, named.text))
                Matching(matcher, library, record.token_ids[choice])
            elif kind == "regex":
                assert re.fullmatch(value, text), text
            else:
                assert Draft202012Validator(value).is_valid(json.loads(text)), text
            yield reason


def nothing_of(pids: set[int]) -> bool:
    return not alive(pids)


async def test_no_token_changes_when_an_engine_is_killed_under_streams_with_grammars(fleet: HarmedFleet) -> None:
    wanted = guided(FEW)
    expected = await undisturbed(fleet.routed, wanted)
    assert "stop" in endings(wanted, expected)
    below = descendants(fleet.routed.workers[0].process.pid)
    assert len(below) > 2, "grammars are compiled in processes of their own"
    outcome = await struck(fleet.routed, wanted, expected, ACCIDENTS["kill -9 of an engine"])
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
    assert outcome.resumed > 0, "no stream was hit"


@pytest.mark.slow
@pytest.mark.parametrize("accident", ["kill -9 of an engine", "kill -9 of a front"])
async def test_no_token_of_a_direct_answer_with_a_grammar_changes(fleet: HarmedFleet, accident: str) -> None:
    wanted = guided(SOME)
    expected = await undisturbed(fleet.routed, wanted)
    outcome = await struck(fleet.direct, wanted, expected, ACCIDENTS[accident])
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
    assert outcome.resumed > 0, "no stream was hit"
    assert set(endings(wanted, outcome.records)) == {"stop", "length"}


@pytest.mark.slow
async def test_no_token_of_fifty_streams_with_grammars_changes_by_any_accident() -> None:
    wanted = guided(STREAMS)
    flags = worker_flags(deterministic=True)
    async with running_fleet(DEMO_MODEL, *flags, router_arguments=(INTER_TOKEN_TIMEOUT,)) as fleet:
        expected = await undisturbed(fleet, wanted)
        assert set(endings(wanted, expected)) == {"stop", "length"}
        for name in ("kill -9 of an engine", "kill -9 of a front", "drain that hands over after 0.2 s"):
            below = {pid for worker in fleet.workers for pid in descendants(worker.process.pid)}
            outcome = await struck(fleet, wanted, expected, ACCIDENTS[name])
            assert outcome.is_clean, (name, outcome.errors, outcome.differing, outcome.seams)
            assert outcome.resumed > 0, f"{name}: no stream was hit"
            now = {pid for worker in fleet.workers for pid in descendants(worker.process.pid)}
            wait_until(partial(nothing_of, below - now), f"{name}: the processes below a dead one end")
