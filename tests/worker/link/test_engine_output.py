"""What an engine prints goes to its front's log, and a log that cannot be written never stops the engine."""

import sys
from pathlib import Path

import pytest

from tests.broken_logs import BROKEN_LOGS, start
from trunkline_worker.link.engine_link import EngineLink, EngineStartError
from trunkline_worker.settings import EngineSettings

# Prints more than a pipe holds, on both outputs and from outside the interpreter, before it says that it is ready.
ENGINE = """
import os, socket, sys
from trunkline.engine.v1.engine_pb2 import EngineReady, EngineResponse
from trunkline_worker.link.channel import frame

link = socket.socket(fileno=int(sys.argv[sys.argv.index("--socket-fd") + 1]))
for number in range(int(sys.argv[1])):
    print("printed", number, flush=True)
    os.write(2, b"a warning %d \\xff\\n" % number)
link.sendall(frame(EngineResponse(ready=EngineReady())))
link.recv(1)
os.write(2, b"the last line\\n")
"""
# Ends with status 0 once the engine is ready.
FRONT = """
import asyncio, sys
from trunkline_runtime.log import configure_logging
from trunkline_worker.link.engine_link import EngineLink
from trunkline_worker.settings import EngineSettings

async def serve():
    link = EngineLink(sys.argv[1:])
    await link.start(EngineSettings("m"))
    link.follow(lambda step: None, lambda reason: None)
    await link.stop()

configure_logging("worker")
asyncio.run(serve())
"""
DEADLINE_S = 60.0  # for failures only


@pytest.fixture
def engine(tmp_path: Path) -> str:
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    return str(program)


@pytest.mark.parametrize("kind", BROKEN_LOGS)
def test_an_engine_gets_ready_however_much_it_prints(kind: str, engine: str, tmp_path: Path) -> None:
    with BROKEN_LOGS[kind](tmp_path) as stderr:
        front = start(sys.executable, "-c", FRONT, sys.executable, engine, "30000", stderr=stderr)
        try:
            assert front.wait(DEADLINE_S) == 0
        finally:
            front.kill()
            front.wait()


async def test_all_that_an_engine_prints_is_printed_by_its_front(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    link = EngineLink((sys.executable, engine, "2"))
    await link.start(EngineSettings("m"))
    link.follow(lambda step: None, lambda reason: None)
    await link.stop()
    assert capsys.readouterr().err.splitlines() == [
        "printed 0", "a warning 0 \\xff", "printed 1", "a warning 1 \\xff", "the last line",
    ]  # fmt: skip


async def test_the_traceback_of_an_engine_that_cannot_start_is_printed_before_the_error_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "engine.py"
    broken.write_text("raise KeyError('a bug')")
    link = EngineLink((sys.executable, str(broken)))
    with pytest.raises(EngineStartError, match="exit status 1"):
        await link.start(EngineSettings("m"))
    assert capsys.readouterr().err.splitlines()[-1] == "KeyError: 'a bug'"
    await link.stop()
