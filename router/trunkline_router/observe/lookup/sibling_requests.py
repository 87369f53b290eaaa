"""The requests of the other processes of one router.

Each process answers on a Unix socket in a private directory of their parent, which no other user can enter. A process
that does not answer in time is left out: a page that lacks some requests is better than none.
"""

import asyncio
import contextlib
from pathlib import Path

from trunkline_router.observe.lookup.question import Answer, Question
from trunkline_router.observe.lookup.request_book import RequestBook
from trunkline_runtime.log import get_logger

SUFFIX = ".requests"
ANSWER_S = 0.25
MOST_ASKED_BYTES, MOST_ANSWER_BYTES = 64 << 10, 8 << 20


class SiblingRequests:
    """Answers the other processes from `book` while run() runs, and asks them.

    directory: theirs and this one's
    name: of this process among them
    """

    def __init__(self, directory: Path, name: str, book: RequestBook) -> None:
        self._directory = directory
        self._path = directory / f"{name}{SUFFIX}"
        self._book = book

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            server = await asyncio.start_unix_server(self._answer, self._path, limit=MOST_ASKED_BYTES)
        except OSError as error:  # a path of more than 107 bytes, for example
            get_logger().warning("other processes cannot be told of requests here", problem=str(error))
            await asyncio.Event().wait()
            return
        try:
            async with server:
                await server.serve_forever()
        finally:
            self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError, ValueError, KeyError, TypeError):  # also what is no question
            async with asyncio.timeout(ANSWER_S):
                writer.write(Question.read(await reader.readline()).answer_of(self._book))
                await writer.drain()
        writer.close()

    async def ask(self, question: Question) -> list[Answer]:
        """Returns the answers of those that know something, and answer in time. A process that is killed while it
        writes sends a part of an answer, which is left out."""
        paths = [path for path in self._directory.glob(f"*{SUFFIX}") if path != self._path]
        asked = question.written()
        answers = await asyncio.gather(*(_answer_of(path, asked) for path in paths))
        read = (question.read_answer(answer) for answer in answers if answer is not None)
        return [answer for answer in read if answer is not None]


async def _answer_of(path: Path, asked: bytes) -> bytes | None:
    """The answer of one process; None if it has died, or is too slow."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(asked)
                return await _read_to_end(reader)
            finally:
                writer.close()
    return None


async def _read_to_end(reader: asyncio.StreamReader) -> bytes | None:
    answer = bytearray()
    while part := await reader.read(1 << 16):
        answer += part
        if len(answer) > MOST_ANSWER_BYTES:
            return None
    return bytes(answer)
