"""The requests of the other processes of one router.

Each process answers on a Unix socket in a private directory of their parent, which no other user can enter. A process
that does not answer in time is left out: a page that lacks some requests is better than none.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from google.protobuf.message import DecodeError, Message

from trunkline.v1.fleet_pb2 import GetRequestResponse, ListRequestsResponse
from trunkline_router.request.tenants import Tenant
from trunkline_router.watch.request_book import Kind, RequestBook
from trunkline_router.watch.viewer import Viewer
from trunkline_runtime.log import get_logger

SUFFIX = ".requests"
ANSWER_S = 0.25
Answer = TypeVar("Answer", bound=Message)
MOST_ASKED_BYTES, MOST_ANSWER_BYTES = 64 << 10, 8 << 20


@dataclass(frozen=True, slots=True)
class Question:
    """What one process asks another: one request by its id, or a list."""

    viewer: Viewer
    tenant: str
    request_id: str = ""  # "": a list
    kind: Kind = Kind.ENDED
    most: int = 0

    def written(self) -> bytes:
        viewer = self.viewer
        fields = {
            "viewer": [viewer.tenant, viewer.is_operator, viewer.sees_cache, viewer.sees_requests],
            "tenant": self.tenant,
            "request_id": self.request_id,
            "kind": self.kind,
            "most": self.most,
        }
        return orjson.dumps(fields) + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "Question":
        fields: dict[str, Any] = orjson.loads(line)
        tenant, is_operator, sees_cache, sees_requests = fields["viewer"]
        viewer = Viewer(tenant, is_operator, sees_cache, sees_requests, None, Tenant(), is_listed=False)
        return cls(viewer, fields["tenant"], fields["request_id"], Kind(fields["kind"]), fields["most"])


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
                writer.write(self._answer_to(Question.read(await reader.readline())))
                await writer.drain()
        writer.close()

    def _answer_to(self, question: Question) -> bytes:
        viewer, tenant = question.viewer, question.tenant
        if question.request_id:
            found = self._book.find(viewer, question.request_id, tenant)
            return b"" if found is None else found.SerializeToString()
        listed = self._book.list(viewer, question.kind, question.most, tenant)
        return ListRequestsResponse(requests=listed).SerializeToString()

    async def find(self, viewer: Viewer, request_id: str, tenant: str) -> GetRequestResponse | None:
        """Returns the timeline of the newest request with this id in another process."""
        answers = await self._ask(Question(viewer, tenant, request_id))
        found = list(_readable(GetRequestResponse, filter(None, answers)))
        return max(found, key=lambda story: story.summary.started_unix_ms, default=None)

    async def lists(self, viewer: Viewer, kind: Kind, most: int, tenant: str) -> list[ListRequestsResponse]:
        """Returns the list of each other process."""
        answers = await self._ask(Question(viewer, tenant, kind=kind, most=most))
        return list(_readable(ListRequestsResponse, answers))

    async def _ask(self, question: Question) -> list[bytes]:
        """Returns the answers of those that answer in time."""
        paths = [path for path in self._directory.glob(f"*{SUFFIX}") if path != self._path]
        asked = question.written()
        answers = await asyncio.gather(*(_answer_of(path, asked) for path in paths))
        return [answer for answer in answers if answer is not None]


def _readable(kind: type[Answer], answers: Iterable[bytes]) -> Iterator[Answer]:
    """The answers that are messages of this kind. A process that is killed while it writes sends a part of one."""
    for answer in answers:
        with contextlib.suppress(DecodeError):
            yield kind.FromString(answer)


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
