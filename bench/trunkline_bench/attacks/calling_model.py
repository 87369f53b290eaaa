"""A model that reasons, calls tools and has a long context, for attacks that need one. Its weights are random."""

from pathlib import Path

from trunkline_bench.engine.marked_model import write_marked_model

CONTEXT_LENGTH = 65_536
# As Hermes's and Qwen3's in short. A tool is written without its schema, so that as many tools fit into the context as
# a grammar may have. Each answer begins with reasoning.
TEMPLATE = """
{#- enable_thinking -#}
{%- for tool in tools or [] %}{{- tool.function.name + ' ' + (tool.function.description or '') + '\\n' }}{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function.name + (call.function.arguments | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
""".lstrip()


def write_calling_model(directory: Path) -> None:
    """Writes the model's files into a directory."""
    write_marked_model(
        directory,
        TEMPLATE,
        specials=("<|im_start|>", "<|im_end|>"),
        words=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        ends=("<|im_end|>",),
        context_length=CONTEXT_LENGTH,
    )
