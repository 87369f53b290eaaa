"""Models of a few families that say what a file prescribes: a tiny checkpoint, the marks and the chat template.

A family writes thoughts and calls as its real models do, and templates are short forms of the published ones.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.engine.random_model import RANDOM_22M, write_random_llama

TEMPLATES = Path(__file__).parent  # files are named after answer formats
ANSWERS = "answers.json"  # beside the weights
CONFIG = {
    **RANDOM_22M,
    "vocab_size": 2112,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}


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

    def write(self, directory: Path, answers: Mapping[str, str]) -> Path:
        """Writes a model that gives each answer to prompts that contain its key; the key that comes last decides.
        Returns the directory."""
        tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
        base = len(tokenizer["model"]["vocab"])
        ids = {mark: base + place for place, mark in enumerate((*self.specials, *self.words))}
        plain = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"] += [
            {**plain, "id": token_id, "content": mark, "special": mark in self.specials}
            for mark, token_id in ids.items()
        ]
        end_ids = [ids[mark] for mark in self.ends]
        write_random_llama(directory, {**CONFIG, "eos_token_id": end_ids})
        named = {"bos_token": "<s>", "eos_token": self.ends[0], "model_max_length": CONFIG["max_position_embeddings"]}
        for name, contents in (("tokenizer", tokenizer), ("tokenizer_config", named)):
            (directory / f"{name}.json").write_text(json.dumps(contents))
        shutil.copy(TEMPLATES / f"{self.answer_format}.jinja", directory / "chat_template.jinja")
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
        f" to=functions.{name}<|channel|>commentary json<|message|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
    ),
    text=lambda text: f"<|channel|>final<|message|>{text}",
)  # fmt: skip
FAMILIES = {family.answer_format: family for family in (HERMES, MISTRAL, HARMONY)}
