"""Which format a model's answers have, by its chat template. Pure."""

from collections.abc import Sequence

# By format: what its templates contain, in several ways if there are several kinds of them. The first that fits counts:
# what only one format has precedes what several have.
SIGNS: Sequence[tuple[str, Sequence[str]]] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("deepseek_dsml", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("pythonic", ("<|header_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    ("hermes", ("</think>",)),  # reasoning alone, which all formats with these marks have in common
)


def format_of_template(template: str) -> tuple[str, Sequence[str]]:
    """Returns the format of the models that a chat template belongs to, and the signs by which it is known; an empty
    format if there are none: their answers are text."""
    return next((found for found in SIGNS if all(sign in template for sign in found[1])), ("", ()))
