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
# Tools and calls as XML, property by property, as Qwen3-Coder.
XML = (
    "{%- macro rest(of, written) %}{%- for key in of if key not in written %}{{- '\n<' ~ key ~ '>' }}"
    "{{- of[key] | string if of[key] is string else of[key] | tojson }}{{- '</' ~ key ~ '>' }}{%- endfor %}"
    "{%- endmacro %}"
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{%- set tool = tool.function %}"
    "{{- '\n<function>\n<name>' ~ tool.name ~ '</name>' }}"
    "{%- if tool.description is defined %}{{- '\n<description>' ~ tool.description ~ '</description>' }}{%- endif %}"
    "{{- '\n<parameters>' }}{%- if tool.parameters is mapping and tool.parameters.properties is mapping %}"
    "{%- for name, fields in tool.parameters.properties | items %}{{- '\n<parameter>\n<name>' ~ name ~ '</name>' }}"
    "{%- if fields.type is defined %}{{- '\n<type>' ~ fields.type | string ~ '</type>' }}{%- endif %}"
    "{{- rest(fields, ['type']) }}{{- '\n</parameter>' }}{%- endfor %}{%- endif %}"
    "{{- rest(tool.parameters, ['type', 'properties']) if tool.parameters is mapping }}"
    "{{- '\n</parameters>\n</function>' }}{%- endfor %}{{- '\n</tools>\n' }}{%- endif %}"
    + EACH
    + "{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '\n<tool_call>\n<function=' ~ call.function.name ~ '>' }}"
    "{%- for key, value in call.function.arguments | items %}{{- '\n<parameter=' ~ key ~ '>\n' }}"
    "{{- value if value is string else value | tojson }}{{- '\n</parameter>' }}{%- endfor %}"
    "{{- '\n</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}" + END
)
# Tools before the last message of the user, field by field, as Mistral.
AVAILABLE = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    + EACH
    + "{%- if m.role == 'user' and tools is not none and m == users[-1] %}{{- '[AVAILABLE_TOOLS] [' }}"
    '{%- for tool in tools %}{{- \'{"type": "function", "function": {\' }}'
    "{%- for key, value in tool.function.items() if key != 'return' %}"
    "{%- if value is string %}{{- '\"' + key + '\": \"' + value + '\"' }}"
    "{%- else %}{{- '\"' + key + '\": ' + value | tojson }}{%- endif %}{%- if not loop.last %}{{- ', ' }}{%- endif %}"
    "{%- endfor %}{{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}"
    "{%- endif %}{{- '[' ~ m.role ~ ']' ~ m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- call.function | tojson }}{%- endfor %}" + END
)
# Tools as types of TypeScript, and either text or reasoning beside a call, as gpt-oss.
TYPED = (
    "{%- macro kind(of) %}{%- if of.type == 'array' %}{{- kind(of.get('items', {})) ~ '[]' }}"
    "{%- elif of.type == 'object' %}{{- fields(of.get('properties', {})) }}"
    "{%- else %}{{- {'integer': 'number'}.get(of.type, of.type) or 'any' }}{%- endif %}{%- endmacro %}"
    "{%- macro fields(of) %}{{- '{' }}{%- for key, value in of | items %}{{- '\n// ' ~ value.description }}"
    "{{- '\n' ~ key ~ ': ' ~ kind(value) ~ ',' }}{%- endfor %}{{- '\n}' }}{%- endmacro %}"
    "{%- if tools %}{{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}"
    "{%- for tool in tools %}{%- set tool = tool.function %}"
    "{{- '// ' + tool.description + '\ntype ' + tool.name + ' = (' }}"
    "{%- if tool.parameters and tool.parameters.properties %}{{- '_: ' ~ fields(tool.parameters.properties) }}"
    "{%- endif %}{{- ') => any;\n' }}{%- endfor %}{{- '}<|end|>' }}{%- endif %}"
    + EACH
    + "{%- if m.role == 'assistant' and m.tool_calls %}{%- if m.content and m.thinking %}"
    "{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}"
    "{%- endif %}{%- if m.content or m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ (m.content or m.thinking) ~ '<|end|>' }}{%- endif %}"
    "{%- for call in m.tool_calls %}{{- '<|start|>assistant to=functions.' ~ call.function.name }}"
    "{{- '<|channel|>commentary json<|message|>' ~ call.function.arguments | tojson ~ '<|call|>' }}{%- endfor %}"
    "{%- elif m.role == 'tool' %}{{- '<|start|>tool<|message|>' ~ m.content | tojson ~ '<|end|>' }}"
    "{%- else %}{{- '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{%- endif %}" + END
)
# Documents before the messages, as Granite 3.3.
QUOTING = (
    "{%- if documents is not none %}{%- for document in documents %}{{- '<|start_of_role|>document ' }}"
    "{{- document | tojson ~ '<|end_of_role|>' }}{%- endfor %}{%- endif %}{{- '\n' }}" + TAGGED
)
TEMPLATES = {
    "all": ALL,
    "tagged": TAGGED,
    "single": SINGLE,
    "by id": BY_ID,
    "xml": XML,
    "available": AVAILABLE,
    "typed": TYPED,
    "quoting": QUOTING,
}
