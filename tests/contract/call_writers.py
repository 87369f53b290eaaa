"""Tool calls as the models of each answer format write them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Arguments = dict[str, Any]
Call = tuple[str, Arguments]  # name, arguments


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    """A string as it is, another value as JSON."""
    return value if isinstance(value, str) else as_json(value)


def each(write: Callable[[str, Arguments], str], joint: str = "") -> Callable[[Sequence[Call]], str]:
    return lambda calls: joint.join(write(*call) for call in calls)


def deepseek_dsml(calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        is_string = as_json(isinstance(value, str))
        return f'<｜DSML｜parameter name="{key}" string="{is_string}">{raw(value)}</｜DSML｜parameter>\n'

    invoked = [
        f'<｜DSML｜invoke name="{name}">\n{"".join(map(parameter, of, of.values()))}</｜DSML｜invoke>\n'
        for name, of in calls
    ]
    return f"\n\n<｜DSML｜function_calls>\n{''.join(invoked)}</｜DSML｜function_calls>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    def call(name: str, of: Arguments) -> str:
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(of)}\n```<｜tool▁call▁end｜>"

    written = "\n".join(call(*one) for one in calls)
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def gemma4(name: str, of: Arguments) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(of)}<tool_call|>"


def _gemma_value(value: Any) -> str:
    match value:
        case dict():
            return f"{{{','.join(f'{key}:{_gemma_value(inside)}' for key, inside in value.items())}}}"
        case list():
            return f"[{','.join(map(_gemma_value, value))}]"
        case str():
            return f'<|"|>{value}<|"|>'
        case _:
            return as_json(value)


def glm(name: str, of: Arguments) -> str:
    pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n" for key, value in of.items()]
    return f"\n<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{as_json([{'name': name, 'arguments': of} for name, of in calls])}"


def harmony(name: str, of: Arguments) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(of)}<|call|>"


def hermes(name: str, of: Arguments) -> str:
    return f"<tool_call>\n{as_json({'name': name, 'arguments': of})}\n</tool_call>"


def kimi_k2(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{as_json(of)}<|tool_call_end|>"
        for index, (name, of) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def kimi_k3(calls: Sequence[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "json"
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{raw(value)}<|close|>argument<|sep|>'

    written = [
        f'<|open|>call tool="{name}"<|sep|>{"".join(map(argument, of, of.values()))}<|close|>call<|sep|>'
        for name, of in calls
    ]
    return f"<|open|>tools<|sep|>{''.join(written)}<|close|>tools<|sep|>"


def llama3_json(name: str, of: Arguments) -> str:
    return as_json({"name": name, "parameters": of})


def mistral(name: str, of: Arguments) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{as_json(of)}"


def pythonic(calls: Sequence[Call]) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in of.items())})" for name, of in calls]
    return f"[{', '.join(written)}]"


def qwen_xml(name: str, of: Arguments) -> str:
    pairs = [f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in of.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


# By answer format.
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "deepseek_dsml": deepseek_dsml,
    "deepseek_v3": deepseek_v3,
    "gemma4": each(gemma4),
    "glm": each(glm),
    "granite": granite,
    "harmony": each(harmony, "<|start|>assistant"),
    "hermes": each(hermes, "\n"),
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "llama3_json": each(llama3_json, "; "),
    "mistral": each(mistral),
    "pythonic": pythonic,
    "qwen_xml": each(qwen_xml, "\n"),
}
