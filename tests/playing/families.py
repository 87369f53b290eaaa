"""Models of a few families that say what a file prescribes: a tiny checkpoint, the marks and the chat template.

A family writes thoughts and calls as its real models do, and templates are short forms of the published ones.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline_bench.engine.marked_model import write_marked_model

TEMPLATES = Path(__file__).parent  # files are named after answer formats
ANSWERS = "answers.json"  # beside the weights


@dataclass(frozen=True)
class Family:
    """How models of a family write. `specials` are special tokens, `words` are tokens like others."""

    answer_format: str
    specials: tuple[str, ...]
    words: tuple[str, ...]
    ends: tuple[str, ...]  # tokens that end an answer; the first one ends what names none
    thought: Callable[[str], str]
    call: Callable[[str, Mapping[str, Any]], str]
    text: Callable[[str], str] = lambda text: text

    def write(self, directory: Path, answers: Mapping[str, str], *, context_length: int = 8192) -> Path:
        """Writes a model that gives each answer to prompts that contain its key; the key that comes last decides.
        Returns the directory."""
        template = (TEMPLATES / f"{self.answer_format}.jinja").read_text()
        write_marked_model(
            directory,
            template,
            specials=self.specials,
            words=self.words,
            ends=self.ends,
            context_length=context_length,
        )
        (directory / ANSWERS).write_text(json.dumps(answers))
        return directory


def _json_call(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


HERMES = Family(
    "hermes",
    specials=("<|im_start|>", "<|im_end|>"),
    words=("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
    ends=("<|im_end|>",),
    thought=lambda text: f"<think>\n{text}\n</think>\n\n",
    call=lambda name, arguments: f"\n<tool_call>\n{_json_call(name, arguments)}\n</tool_call>",
)
MISTRAL = Family(
    "mistral",
    specials=(
        "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[END]",
    ),
    words=(),
    ends=("[END]",),
    thought=lambda text: f"[THINK]{text}[/THINK]",
    call=lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}",
)  # fmt: skip
HARMONY = Family(
    "harmony",
    specials=(
        "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "<|end|>",
    ),
    words=(),
    ends=("<|return|>", "<|call|>"),
    thought=lambda text: f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
    call=lambda name, arguments: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
    ),
    text=lambda text: f"<|channel|>final<|message|>{text}",
)  # fmt: skip
FAMILIES = {family.answer_format: family for family in (HERMES, MISTRAL, HARMONY)}
