"""A process that renders conversations. Chat templates are untrusted code, and a process can be killed.

It reads frames from standard input and answers on standard output (frames.py). TEMPLATE (JSON: source, special_tokens)
defines the template that the frame names and has no answer. CHAT (ChatMessages) renders with it; the answer is TEXT
(NUM_CHARACTERS, then the text in UTF-8) or REFUSED (RequestError). The argument is the CPU time in seconds that one
frame may take; beyond it, the system ends the process.
"""

import contextlib
import json
import resource
import signal
import struct
import sys

from trunkline.status import RequestRefused, invalid
from trunkline.v1.inference_pb2 import ChatMessages
from trunkline_router.prompts.chat_template import FIELD, ChatTemplate
from trunkline_router.prompts.frames import HEADER, READY, REFUSED, write_frame

TEMPLATE, CHAT, TEXT = 1, 2, 4
NUM_CHARACTERS = struct.Struct("<I")

MAX_MEMORY_BYTES = 1 << 30  # the sandbox does not stop an expression such as 'x' * 10**10


def main() -> None:
    limit_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles Ctrl-C and closes standard input
    with contextlib.suppress(ValueError, OSError):  # the system has no such limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    templates: dict[bytes, ChatTemplate | RequestRefused] = {}
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    write_frame(writer, READY, b"")
    while len(header := reader.read(HEADER.size)) == HEADER.size:
        size, kind, name = HEADER.unpack(header)
        body = reader.read(size)
        # The limit is on CPU time, because a busy machine is not the template's fault. SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        if kind == TEMPLATE:
            templates[name] = _compiled(**json.loads(body))
        else:
            answer = _rendered(templates[name], body)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(writer, *answer)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compiled(source: str, special_tokens: dict[str, str]) -> ChatTemplate | RequestRefused:
    try:
        return ChatTemplate(source, special_tokens)
    except ValueError as error:
        return invalid(FIELD, str(error))


def _rendered(template: ChatTemplate | RequestRefused, chat: bytes) -> tuple[int, bytes]:
    try:
        if isinstance(template, RequestRefused):
            raise template
        text = template.render(ChatMessages.FromString(chat))
        return TEXT, NUM_CHARACTERS.pack(len(text)) + text.encode()
    except RequestRefused as refused:
        return REFUSED, refused.to_proto().SerializeToString()
    except Exception as error:  # text that is not Unicode, or too long
        problem = invalid(FIELD, f"the model's chat template refuses the conversation: {error}")
        return REFUSED, problem.to_proto().SerializeToString()


if __name__ == "__main__":
    main()
