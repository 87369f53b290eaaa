"""Grammars of answers with calls, and what parsers read of an answer."""

import json
from collections.abc import Sequence
from typing import Any

from trunkline.answer.answer_grammar import answer_grammar, needs_grammar
from trunkline.answer.answer_items import AnswerItem, AnswerItems
from trunkline.answer.answer_parser import PARSERS
from trunkline.answer.output_reader import AnswerContext
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.inference_pb2 import ChatMessages, GenerateRequest, Tool
from trunkline.v1.worker_pb2 import Grammar, GrammarKind

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "enum": ["Graz", "a </tool_call>\n b", 'say "no"', "50"]},
        "days": {"type": "integer", "enum": [1, 20]},
        "parts": {"type": "array", "enum": [[], [{"of": "day"}]]},
    },
}
NOW = {"type": "object", "properties": {}}
TOOLS = [Tool(name="weather", parameters=json.dumps(WEATHER)), Tool(name="time.now", parameters=json.dumps(NOW))]
# A grammar of patches, as Codex asks for them, and a patch.
PATCH_GRAMMAR = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = "*** Begin Patch\n*** Update File: a\\b.py\n@@ say('\u00e4'):\n-\tx < \"1\"\r\n+x </arg>\n*** End Patch\n"
PATCH_TOOL = Tool(
    name="apply_patch",
    parameters='{"type": "object", "properties": {"input": {"type": "string"}}}',
    input_grammar=Grammar(kind=GrammarKind.GRAMMAR_KIND_LARK, text=PATCH_GRAMMAR),
)
# What the templates of some formats have, so that another style of calls is theirs.
TEMPLATES = [
    ("deepseek_v3", "```json"),
    ("mistral", "[ARGS]"),
    ("deepseek_dsml", "tool_calls>"),
    ("deepseek_dsml", "function_calls>"),
]
DSML = "\uff5cDSML\uff5c"
UNENFORCED = ("gemma4", "kimi_k3")
STYLES = [(name, "") for name in PARSERS if name not in ("deepseek_dsml", *UNENFORCED)] + TEMPLATES


def grammar_of(
    answer_format: str, template: str = "", prompt_end: str = "user", grammar: Grammar | None = None, **chat: Any
) -> Any:
    """The element that a grammar consists of; None: there is no grammar."""
    request = GenerateRequest(chat=ChatMessages(**{"tools": TOOLS, **chat}), grammar=grammar)
    found = answer_grammar(request, answer_format, prompt_end, template)
    if found is None:
        return None
    prefers = any(tool.HasField("input_grammar") for tool in request.chat.tools)
    assert needs_grammar(request) or prefers or "max_reasoning_tokens" in chat
    assert found.kind == GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG
    return json.loads(found.text)["format"]


def parsed(answer_format: str, text: str, prompt_end: str = "", tools: Sequence[Tool] = TOOLS) -> list[AnswerItem]:
    """The items of an answer, taken in two pieces."""
    parser, half, items = PARSERS[answer_format](AnswerContext(tools, prompt_end)), len(text) // 2, AnswerItems()
    stop = FinishReason.FINISH_REASON_STOP
    for part in [*parser.feed(text[:half]), *parser.feed(text[half:]), *parser.finish(stop)]:
        items.take(part)
    return items.items
