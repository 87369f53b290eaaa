"""A proxy that notes what an assistant asks a router, and what it is answered."""

import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

ANSWER_TIMEOUT_S = 300.0
OF_A_HOP = {"connection", "host", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"}
# Of the usage in the answers of the three APIs. Anthropic's input tokens are without the cached ones.
CACHED = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)":(\d+)')
PROMPT = re.compile(r'"(?:prompt_tokens|input_tokens)":(\d+)')


@dataclass(frozen=True)
class Exchange:
    """A request and its answer."""

    path: str
    headers: dict[str, str]
    body: Any
    status: int
    answer: str

    @property
    def hits(self) -> float:
        """The part of the prompt that came from the prefix cache."""
        cached, prompt = int(CACHED.findall(self.answer)[-1]), int(PROMPT.findall(self.answer)[-1])
        return cached / (prompt + cached if "cache_read_input_tokens" in self.answer else prompt)


@contextmanager
def recorded(root: str, on_piece: Callable[[bytes], None]) -> Iterator[tuple[str, list[Exchange]]]:
    """Yields an address that leads to the server at `root`, and the exchanges so far in the order of their ends.

    on_piece: gets each piece of an answer before the assistant does
    """
    exchanges: list[Exchange] = []
    target = urlsplit(root).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.forward()

        def do_HEAD(self) -> None:
            self.forward()

        def do_POST(self) -> None:
            self.forward()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            sent = {name: value for name, value in self.headers.items() if name.lower() not in OF_A_HOP}
            connection = http.client.HTTPConnection(target, timeout=ANSWER_TIMEOUT_S)
            connection.request(self.command, self.path, body or None, sent)
            response = connection.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in OF_A_HOP:
                    self.send_header(name, value)
            self.end_headers()
            pieces = []
            try:
                while piece := response.read1(1 << 16):
                    pieces.append(piece)
                    on_piece(piece)
                    self.wfile.write(piece)
            except ConnectionError:  # the assistant has gone
                pass
            finally:
                connection.close()
                parsed = json.loads(body) if body else None
                answer = b"".join(pieces).decode()
                exchanges.append(Exchange(self.path, dict(self.headers.items()), parsed, response.status, answer))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", exchanges
    finally:
        server.shutdown()
        server.server_close()
