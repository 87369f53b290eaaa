"""Chat templates with tools, in the forms that published models use."""

EACH, END = "{%- for m in messages %}", "{%- endfor %}"
# All that a template gets. It must name what it has a place for.
ALL = "{# tool_calls #}{{ messages | tojson(sort_keys=true) }}{{ tools | tojson }}{{ add_generation_prompt }}"
# Tools in a system message and calls as JSON in tags, as Hermes and Qwen 2.5; results are the user's.
TAGGED = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}"
    + EACH
    + "{%- if m.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role }}"
    "{%- if m.reasoning_content %}{{- '\\n<think>\\n' + m.reasoning_content.strip() + '\\n</think>' }}{%- endif %}"
    "{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}{{- call.arguments | tojson }}'
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    + END
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# One call a turn and no text beside it, as Llama 3.1.
SINGLE = (
    "{{- bos_token }}{%- if tools is not none %}{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}"
    "{%- endfor %}{%- endif %}" + EACH + "{%- if 'tool_calls' in m %}{%- if not m.tool_calls | length == 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}{{- '<|start|>assistant<|end|>{\"name\": \"' + call.name + '\", ' }}"
    "{{- '\"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot|>' }}"
    "{%- elif m.role == 'tool' or m.role == 'ipython' %}{{- '<|start|>ipython<|end|>\\n\\n' }}"
    "{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}"
    "{%- endif %}{{- '<|eot|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|end|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endif %}"
    + END
    + "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"
)
# Calls with ids of nine characters, as Mistral, and each argument by its name, as GLM 4.5.
BY_ID = (
    EACH + "{%- if m.tool_calls is defined %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}"
    "{%- endif %}"
    "{{- call.function.name }}{%- for key, value in call.function.arguments.items() %}"
    "{{- '<' + key + '>' + (value if value is string else value | tojson) }}{%- endfor %}"
    "{{- ', \"id\": \"' + call.id + '\"}' }}{%- endfor %}{{- ']</s>' }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {\"content\": ' + m.content | string }}"
    '{{- \', "call_id": "\' + m.tool_call_id + \'", "name": "\' ~ m.name ~ \'"}[/TOOL_RESULTS]\' }}'
    "{%- else %}{{- '[' + m.role + ']' + m.content }}{%- endif %}" + END
)
TEMPLATES = {"all": ALL, "tagged": TAGGED, "single": SINGLE, "by id": BY_ID}
