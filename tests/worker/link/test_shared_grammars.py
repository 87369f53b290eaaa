"""The choices of a request send its grammar to the engine once."""

import sys
from pathlib import Path

from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.names import grammar_digest
from trunkline.v1.worker_pb2 import Grammar, GrammarKind, Submit
from trunkline_worker.link.engine_link import EngineLink
from trunkline_worker.link.shared_grammars import complete_grammars
from trunkline_worker.settings import EngineSettings

# Writes the first message that it receives to a file.
ENGINE = """
import socket, sys
from trunkline.engine.v1.engine_pb2 import EngineReady, EngineResponse
from trunkline_worker.link.channel import FrameReader, frame

link = socket.socket(fileno=int(sys.argv[sys.argv.index("--socket-fd") + 1]))
link.sendall(frame(EngineResponse(ready=EngineReady())))
reader, messages = FrameReader(), []
while not messages:
    messages = reader.feed(link.recv(1 << 20))
with open(sys.argv[1], "wb") as file:
    file.write(messages[0])
"""
CHOICES, TEXT_BYTES = 16, 1 << 18


def grammar(text: str) -> Grammar:
    made = Grammar(kind=GrammarKind.GRAMMAR_KIND_REGEX, text=text)
    made.digest = grammar_digest(made)
    return made


async def test_the_text_of_a_grammar_is_in_the_first_of_its_submits_alone(tmp_path: Path) -> None:
    grammars = [grammar("a" * TEXT_BYTES), grammar("b")]
    submits = [Submit(handle=handle) for handle in range(CHOICES + 2)]
    for submit in submits[1:]:
        submit.work.grammar.CopyFrom(grammars[submit.handle == CHOICES])
    (tmp_path / "engine.py").write_text(ENGINE)
    link = EngineLink((sys.executable, str(tmp_path / "engine.py"), str(tmp_path / "received")))
    await link.start(EngineSettings("m"))
    for submit in submits:
        link.submit(submit)
    await link._reader.read()  # to its end
    await link.stop()
    received = (tmp_path / "received").read_bytes()
    assert TEXT_BYTES < len(received) < TEXT_BYTES + 100 * len(submits)
    request = EngineRequest.FromString(received)
    complete_grammars(request.submits)
    assert list(request.submits) == submits
