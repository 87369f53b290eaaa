"""Templates and conversations for the processes that render."""

from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.helper_process import template_source

ECHO = template_source("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
# Hangs where the message says so, in rendering.
SOMETIMES = template_source(
    "{% if messages[0].content == 'hang' %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}",
    {},
)


def messages(content: str = "hi") -> ChatMessages:
    return ChatMessages(messages=[ChatMessage(role="user", content=content)])


def chat(content: str = "hi") -> bytes:
    return messages(content).SerializeToString()


async def rendered(helpers: Helpers, template: bytes, chat: bytes) -> str:
    return await helpers.render(template, chat)
