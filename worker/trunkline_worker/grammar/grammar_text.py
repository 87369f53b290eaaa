"""What llguidance is given for each kind of grammar that a request can have. Needs no llguidance."""

from collections.abc import Callable
from typing import Any

from trunkline.status import invalid
from trunkline.v1.worker_pb2 import GrammarKind
from trunkline_worker.grammar.lark_text import checked_lark, gbnf_as_lark, lark_grammar, lark_string
from trunkline_worker.grammar.portable_regex import portable_regex
from trunkline_worker.grammar.schema_check import parsed_json, schema_text
from trunkline_worker.grammar.structural_format import structural_grammar
from trunkline_worker.grammar.structural_literals import AddedTokens

MAX_CHOICES = 10_000
NO_TOKENS = AddedTokens({})


def llguidance_grammar(
    kind: int, text: str, tokens: AddedTokens = NO_TOKENS, compiles: Callable[[str], bool] = lambda _: True
) -> str:
    """The grammar for LLMatcher. Raises RequestRefused (INVALID_REQUEST) if it cannot be enforced.

    tokens: of the model's tokenizer
    compiles: whether the library takes a grammar
    """
    match kind:
        case GrammarKind.GRAMMAR_KIND_JSON_SCHEMA:
            return '{"grammars": [{"json_schema": ' + schema_text(parsed_json(text)) + "}]}"
        case GrammarKind.GRAMMAR_KIND_REGEX:
            return lark_grammar(f"start: /(?:{portable_regex(text)})/")
        case GrammarKind.GRAMMAR_KIND_EBNF:
            return lark_grammar(gbnf_as_lark(text))
        case GrammarKind.GRAMMAR_KIND_LARK:
            return lark_grammar(checked_lark(text))
        case GrammarKind.GRAMMAR_KIND_CHOICE:
            return lark_grammar(_choice(parsed_json(text)))
        case GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG:
            return structural_grammar(parsed_json(text), tokens, compiles)
        case _:
            raise invalid("grammar", "this kind is not known")


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise invalid("grammar", "choices are an array of strings that are not empty")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise invalid("grammar", f"the number of choices must be from 1 to {MAX_CHOICES}")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(lark_string, choices))
