"""Engines whose outputs are constrained, and what their outputs must be."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from tests.worker.engine_rig import DEMO_MODEL, Collected, make_engine
from tests.worker.guided.in_process_link import InProcessLink
from trunkline.names import grammar_digest
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.worker_pb2 import Grammar, GrammarKind, Submit
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.guided_sequences import GuidedSequences
from trunkline_worker.grammar.grammar_link import GrammarLink
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import Matching, compiled

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
VOCAB, EOS = 2048, 1  # the demo model's
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
JSON, REGEX = GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, GrammarKind.GRAMMAR_KIND_REGEX


def grammar(kind: "GrammarKind.ValueType", text: str) -> Grammar:
    made = Grammar(kind=kind, text=text)
    made.digest = grammar_digest(made)
    return made


PERSON = grammar(JSON, json.dumps({
    "type": "object", "additionalProperties": False, "required": ["first_name", "age", "tags"],
    "properties": {
        "first_name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "green"]}},
    },
}))  # fmt: skip
FIXED = grammar(JSON, json.dumps({"const": {"a": [1, 2, 3], "b": "the only text that there is"}}))
OBJECT = grammar(JSON, json.dumps({"type": "object"}))
CODE = grammar(REGEX, r"[1-9][0-9]{2,4}-(ab|cd)+x")
WORDS = grammar(REGEX, r"([a-z]{1,9} ){0,30}\.")


def guided(submit: Submit, constraint: Grammar | None) -> Submit:
    """The submit, constrained; None: as it is."""
    if constraint is not None:
        submit.work.grammar.CopyFrom(constraint)
    return submit


def text_of(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def is_valid(constraint: Grammar, text: str) -> bool:
    """Whether a finished text is of the grammar."""
    if constraint.kind == REGEX:
        return re.fullmatch(constraint.text, text) is not None
    try:
        return Draft202012Validator(json.loads(constraint.text)).is_valid(json.loads(text))
    except ValueError:
        return False


def check(constraint: Grammar, collected: Collected, handle: int) -> None:
    """Asserts that a finished output is of the grammar, and that one that was cut off can become one."""
    tokens = collected.tokens[handle]
    if collected.finished[handle] == STOP and tokens[-1] == EOS:
        assert is_valid(constraint, text_of(tokens)), text_of(tokens)
    else:
        library = LLTokenizer(str(DEMO_MODEL / "tokenizer.json"), n_vocab=VOCAB, eos_token=[EOS])
        Matching(compiled(library, llguidance_grammar(constraint.kind, constraint.text)), library, tokens)


class OneByOne(GuidedSequences):
    """Proposes no runs."""

    def follows(self, sequence: Any) -> bool:
        return False


def guided_engine(
    model: Path = DEMO_MODEL,
    *,
    late: float = 0.0,
    link: GrammarLink | None = None,
    kind: type[GuidedSequences] = GuidedSequences,
    **options: Any,
) -> Engine:
    """late: see InProcessLink; link: None: an InProcessLink"""
    options = {"kv_blocks": 96, "block_size": 8, "itl_target_ms": 0.0, "deterministic": True, **options}
    engine = make_engine(model, **options)
    engine.guided = kind(link or InProcessLink(model, VOCAB, [EOS], late=late), engine.scheduler.sequences, VOCAB)
    return engine


Bits = list[tuple[int, tuple[tuple[int, float], ...]]]


def bits(collected: Collected, handle: int) -> Bits:
    """Each token, with the log-probabilities that came with it."""
    outputs = collected.outputs[handle]
    tokens = [token for output in outputs for token in output.token_ids]
    entries = [entry for output in outputs for entry in output.logprobs]
    found = [tuple((t.token_id, t.logprob) for t in (entry.chosen, *entry.top)) for entry in entries]
    assert len(found) in (0, len(tokens))
    return list(zip(tokens, found or [()] * len(tokens), strict=True))
