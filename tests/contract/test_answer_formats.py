"""The format of a model's answers, by its chat template. The templates are what identifies those of real models."""

import pytest
from canitoolcall.fixtures import load_families, load_fixtures

from tests.contract.tool_calls import format_of, parsed
from trunkline.answer.answer_formats import SIGNS, format_of_template
from trunkline.answer.answer_parser import PARSERS

THINK = "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
HERMES = '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
QWEN_XML = "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>"
# By model: its format, and lines of its template.
TEMPLATES = {
    "SmolLM2-135M-Instruct": ("", "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'}}"),
    "Phi-3.5-mini-instruct": ("", "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}"),
    "Llama-3-8B-Instruct": ("", "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"),
    "c4ai-command-r-plus": ("", '[\n    {\n        "tool_name": title,\n        "parameters": {}\n    }\n]'),
    "Seed-OSS-36B": ("", "<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"),
    "functionary-medium-v3.1": ("", "<|start_header_id|> <|python_tag|> <function=example_function_name>{{...}}"),
    "Qwen2.5-7B-Instruct": ("hermes", HERMES),
    "Qwen3-0.6B": ("hermes", HERMES + THINK),
    "Hermes-3-Llama-3.1-8B": ("hermes", '{"type": "function", \' + \'"parameters": \' <tool_call>' + HERMES),
    "Llama-3-Groq-8B-Tool-Use": ("hermes", "<|start_header_id|>" + HERMES),
    "granite-4.0-h-tiny": ("hermes", "<|start_of_role|>" + HERMES),
    "SmolLM3-3B": ("hermes", THINK),
    "MiniMax-M2": ("hermes", "<minimax:tool_call>\n" + THINK),
    "DeepSeek-R1-Distill-Llama-8B": (
        "deepseek_v3",
        THINK + "'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'",
    ),
    "DeepSeek-V3.1": ("deepseek_v3", THINK + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>"),
    "DeepSeek-V3.2": ("deepseek_dsml", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="$TOOL_NAME">' + THINK),
    "gemma-4-31B-it": ("gemma4", "{{- '<|tool_call>call:' + function['name'] + '{' -}}<think>"),
    "gemma-3-27b-it": ("", "{{'<start_of_turn>' + role + '\n'}}"),
    "GLM-4.6": ("glm", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>" + THINK),
    "granite-3.3-2b-instruct": ("granite", "<|start_of_role|> respond only with <|tool_call|> followed by a JSON list"),
    "gpt-oss-120b": ("harmony", "<|start|>assistant<|channel|>analysis<|message|>"),
    "Kimi-K2-Thinking": ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}" + THINK),
    "Kimi-K3": ("kimi_k3", "{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}{{- '<|close|>' + tag + '<|sep|>' -}}"),
    "Llama-3.1-8B-Instruct": ("llama3_json", "<|start_header_id|>{{- '\"parameters\": ' }}<|python_tag|>"),
    "Llama-3.2-3B-Instruct": ("llama3_json", "<|start_header_id|>{{- '\"parameters\": ' }}"),
    "Llama-4-Scout-17B-16E-Instruct": ("pythonic", "<|header_start|>{{- '\"parameters\": ' }}<|python_start|>"),
    "vLLM's for Llama 3.2": ("pythonic", "<|start_header_id|>[func_name1(params_name1=params_value1, params_name2=…"),
    "Mistral-7B-Instruct-v0.3": ("mistral", "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS][INST][TOOL_CALLS] ["),
    "Ministral-3-14B-Reasoning": ("mistral", "[THINK][/THINK][TOOL_CALLS]' + name + '[ARGS]"),
    "Qwen3-Coder-30B": ("qwen_xml", QWEN_XML),
    "Qwen3.5-9B": ("qwen_xml", QWEN_XML + THINK),
    "NVIDIA-Nemotron-3-Nano": ("qwen_xml", QWEN_XML + THINK),
}
# What the outputs of fixtures also contain, but no parser finds parts by: turns that a model makes up.
TURNS = {"<|start_header_id|>", "<|end_header_id|>"}


@pytest.mark.parametrize(("answer_format", "template"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_shows_the_format_of_its_models(answer_format: str, template: str) -> None:
    assert format_of_template(template)[0] == answer_format


def test_every_format_is_found_by_a_template() -> None:
    assert {name for name, _ in SIGNS} == set(PARSERS)
    assert {name for name, _ in TEMPLATES.values()} == {"", *PARSERS}


def test_parsers_name_all_marks_that_they_find_parts_by() -> None:
    """A special token that occurs in none of them has no text when an answer is parsed."""
    families = load_families()
    for fixture in load_fixtures():
        family = families[fixture.family]
        marks, output = PARSERS[format_of(fixture, family)].marks(), fixture.raw_output
        for token in {*family.markers} - TURNS:
            if not any(token in mark for mark in marks):
                output = output.replace(token, "")
        assert parsed(fixture, family, [output]) == parsed(fixture, family, [fixture.raw_output]), fixture.id
