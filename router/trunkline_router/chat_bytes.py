"""A conversation as bytes, made in steps: one call of the library holds up the event loop for ten milliseconds."""

import asyncio

from trunkline.v1.inference_pb2 import ChatMessages
from trunkline_runtime.wire import varint_bytes

STEP_MESSAGES = 256
STEP_BYTES = 512 << 10  # a step takes about a millisecond at most; a single message may be larger
MESSAGE = b"\x0a"  # the tag of ChatMessages.messages


async def chat_bytes(chat: ChatMessages) -> bytes:
    """The conversation, serialized."""
    messages = chat.messages
    if len(messages) <= STEP_MESSAGES:
        return chat.SerializeToString()
    parts: list[bytes] = []
    num_bytes = 0
    for index, message in enumerate(messages, start=1):
        part = message.SerializeToString()
        parts += (MESSAGE, varint_bytes(len(part)), part)
        num_bytes += len(part)
        if num_bytes > STEP_BYTES or index % STEP_MESSAGES == 0:
            num_bytes = 0
            await asyncio.sleep(0)
    rest = ChatMessages(continue_final_message=chat.continue_final_message)
    return b"".join((*parts, rest.SerializeToString()))
