"""How the models of each answer format write calls of tools. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CallStyle:
    """A call is a head, the tool's name, a neck, the arguments and a tail.

    mark: begins a call, or the section of calls, and nothing else; "": a call may only be the last message
    count: a pattern of what is between the name and the neck
    arguments: how they are written, as the element json_schema of structural tags names it
    joint: between calls
    section: around all calls
    """

    mark: str
    head: str
    neck: str
    tail: str = ""
    count: str = ""
    arguments: str = "json"
    joint: str = ""
    section: tuple[str, str] = ("", "")


def _object(mark: str, head: str, key: str, tail: str, joint: str) -> CallStyle:
    """Each call is a JSON object."""
    return CallStyle(mark, f'{head}{{"name": "', f'", "{key}": ', f"}}{tail}", joint=joint)


def _array(mark: str) -> CallStyle:
    """The calls are a JSON array."""
    return CallStyle(mark, '{"name": "', '", "arguments": ', "}", joint=", ", section=(f"{mark}[", "]"))


def _deepseek(before: str, neck: str, after: str, joint: str) -> CallStyle:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    head, tail = f"<｜tool▁call▁begin｜>{before}", f"{after}<｜tool▁call▁end｜>"
    return CallStyle(begin, head, neck, tail, joint=joint, section=(begin, end))


def _kimi_k2() -> CallStyle:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    head, neck, tail = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    return CallStyle(begin, head, neck, tail, count=":[0-9]+", section=(begin, end))


def _qwen_xml() -> CallStyle:
    head, tail = "<tool_call>\n<function=", "\n</function>\n</tool_call>"
    return CallStyle("<tool_call>", head, ">\n", tail, arguments="qwen_xml", joint="\n")


def _glm() -> CallStyle:
    return CallStyle("<tool_call>", "<tool_call>", "\n", "\n</tool_call>", arguments="glm_xml", joint="\n")


def _deepseek_dsml(section: str) -> CallStyle:
    begin, end = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    head, tail = '<｜DSML｜invoke name="', "\n</｜DSML｜invoke>\n"
    return CallStyle(begin, head, '">\n', tail, arguments="deepseek_xml", section=(f"{begin}\n", end))


_LLAMA = _object('{"name": ', "", "parameters", "", "; ")

# By answer format: what a template has, and the style of its model. The first one that fits counts.
_STYLES: dict[str, Sequence[tuple[str, CallStyle]]] = {
    "deepseek_dsml": [
        ("function_calls>", _deepseek_dsml("function_calls")),
        ("tool_calls>", _deepseek_dsml("tool_calls")),
    ],
    "deepseek_v3": [
        ("```json", _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n")),
        ("", _deepseek("", "<｜tool▁sep｜>", "", "")),
    ],
    "glm": [("", _glm())],
    "granite": [("", _array("<|tool_call|>"))],
    "harmony": [("", CallStyle("", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"))],
    "hermes": [("", _object("<tool_call>", "<tool_call>\n", "arguments", "\n</tool_call>", "\n"))],
    "kimi_k2": [("", _kimi_k2())],
    "llama3_json": [("", _LLAMA)],
    "mistral": [("[ARGS]", CallStyle("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]")), ("", _array("[TOOL_CALLS]"))],
    "pythonic": [("", _LLAMA)],  # Llama 4's template asks for it, and the parser reads it in any answer
    "qwen_xml": [("", _qwen_xml())],
}


def call_style(answer_format: str, template: str) -> CallStyle | None:
    """Returns how the models of a format write calls; None if it is not known how to enforce that.

    template: the model's chat template
    """
    return next((style for sign, style in _STYLES.get(answer_format, ()) if sign in template), None)
