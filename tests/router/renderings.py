"""Templates and conversations for the processes that render."""

from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.prompts.render_pool import RenderPool, TemplateSource

ECHO = TemplateSource("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
# Hangs where the message says so, in rendering.
SOMETIMES = TemplateSource(
    "{% if messages[0].content == 'hang' %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}",
    {},
)


def messages(content: str = "hi") -> ChatMessages:
    return ChatMessages(messages=[ChatMessage(role="user", content=content)])


def chat(content: str = "hi") -> bytes:
    return messages(content).SerializeToString()


async def rendered(pool: RenderPool, template: TemplateSource, chat: bytes) -> str:
    return (await pool.render(template, chat)).text
