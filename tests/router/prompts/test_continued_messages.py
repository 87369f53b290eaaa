"""A final message is continued exactly where transformers continues it, whatever the template does with blanks."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parameters import one_in
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.prompts.chat_template import ChatTemplate

SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
TAG = "CONTINUE_FINAL_MESSAGE_TAG"
EACH = "{% for m in messages %}"
TEMPLATES = {
    "plain": EACH + "<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "trimmed": EACH + "<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
    "left trimmed": EACH + "<{{ m.role }}>{{ m.content.lstrip() }}</s>{% endfor %}",
    "right trimmed": EACH + "<{{ m.role }}>\n{{ m.content.rstrip() }}</s>{% endfor %}",
    "lines trimmed": EACH + "<{{ m.role }}>{{ m.content.strip('\\n') }}</s>{% endfor %}",
    "blank behind": EACH + "<{{ m.role }}> {{ m.content }} </s>{% endfor %}",
    "trimmed, blank behind": EACH + "<{{ m.role }}> {{ m.content.strip() }} </s>{% endfor %}",
    "trimmed, lines behind": EACH + "{{ m.role }}:\n\n{{ m.content.strip() }}\n\n{% endfor %}",
    "repeated": EACH + "{{ m.role }}: {{ m.content }}\n{% endfor %}{{ messages[-1].content | trim }}!",
    "repeated trimmed": EACH + "{{ m.content | trim }}{% endfor %} {{ messages[-1].content }}",
    "json": "{{ messages | tojson }}",
    "shouted": EACH + "{{ m.content | upper }}{% endfor %}",
    "cut": EACH + "{{ m.content[:5] }}{% endfor %}",
    "without the last": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
    "by another name": EACH + "{{ m.values() | join(' ') }}{% endfor %}",
    "chatml": EACH + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}",
    "llama 3": (
        EACH + "{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + "
        "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
        "{% endfor %}"
    ),
    "mistral": (
        "{{ bos_token }}" + EACH + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral, later": (
        "{{ bos_token }}" + EACH + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        EACH + "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    ),
    "zephyr": EACH + "{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n{% endfor %}",
    "qwen 3": (
        EACH + "{%- set content = m.content %}{%- if '</think>' in content %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    ),
}
BLANKS = st.sampled_from(["", " ", "  ", "\n", "\n\n", "\t", " \n ", "\u00a0", "\u3000"])
WORDS = st.sampled_from(["", "Well,", "</s>", "user", "CONTINUE", "WELL", "a b", "é", "</think>", '"quoted"', "<b>"])
FINAL = st.lists(st.tuples(BLANKS, WORDS, BLANKS), max_size=3).map(lambda parts: "".join(map("".join, parts)))


def check(source: str, said: str, final: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [("user", said), ("assistant", final)]
    messages = [{"role": role, "content": content} for role, content in turns]
    chat = ChatMessages(
        messages=[ChatMessage(role=role, content=content) for role, content in turns], continue_final_message=True
    )
    try:
        ours = ChatTemplate(source, SPECIAL).render(chat)
    except RequestRefused:
        ours = None
    try:
        theirs = render_jinja_template([messages], chat_template=source, continue_final_message=True, **SPECIAL)[0][0]
    except ValueError:
        theirs = None
    if theirs is not None:  # a template that repeats the message gets transformers' mark into the prompt
        theirs = theirs.replace(TAG + " ", "").replace(TAG, "")
    assert ours == theirs, (source, final)


@pytest.mark.parametrize("name", one_in(4, TEMPLATES))
def test_a_continued_message_ends_where_transformers_ends_it(name: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(FINAL, FINAL)
    def compare(said: str, final: str) -> None:
        check(TEMPLATES[name], said, final)

    compare()


def test_and_so_with_a_real_template(shared: Path) -> None:
    config = json.loads((shared / "tokenizers/phi-3-mini/tokenizer_config.json").read_text())
    for final in ("", " ", "Well", "Well, ", " Well\n", "\n", "Well,\n\n"):
        check(config["chat_template"], "Hi", final)
