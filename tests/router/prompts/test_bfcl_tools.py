"""The tools of bfcl-eval's questions render as transformers renders them."""

import json
from typing import Any

import pytest

from tests.contract.bfcl import questions
from tests.router.prompts.tool_templates import AVAILABLE, SINGLE, TAGGED, TYPED, XML
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.prompts.chat_template import ChatTemplate


def check(source: str, every: int) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered_by: Any = render_jinja_template
    template = ChatTemplate(source, {"bos_token": "<s>"})
    for question in questions()[::every]:
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
            for tool in question.tools
        ]
        messages = [[{"role": "user", "content": "What now?"}]]
        tools = [{"type": "function", "function": function} for function in functions]
        theirs, _ = rendered_by(
            messages, tools=tools or None, chat_template=source, add_generation_prompt=True, bos_token="<s>"
        )
        chat = ChatMessages(messages=[ChatMessage(role="user", content="What now?")], tools=question.tools)
        assert [template.render(chat)] == theirs
        assert all(function["name"] in theirs[0] for function in functions)


def test_all_tool_lists_are_read() -> None:
    assert len(questions()) == 3641


@pytest.mark.parametrize("source", [TAGGED, SINGLE, XML, AVAILABLE, TYPED])
def test_tools_render_as_in_transformers(source: str) -> None:
    check(source, 20)


@pytest.mark.slow
@pytest.mark.parametrize("source", [TAGGED, SINGLE, XML, AVAILABLE, TYPED])
def test_all_tools_render_as_in_transformers(source: str) -> None:
    check(source, 1)
