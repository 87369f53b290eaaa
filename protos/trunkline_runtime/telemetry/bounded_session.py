"""An HTTP session for exports that reads only a little of an answer, however much a collector sends."""

import io
import time
from typing import Any

import requests

MAX_ANSWER_BYTES = 64 << 10  # a few lines, if the collector refuses an export
MAX_ANSWER_S = 10.0
_PIECE_BYTES = 4096


class BoundedSession(requests.Session):
    """An HTTP session that reads only a little of an answer, however much a collector sends, and follows no redirect:
    requests itself would read an endless answer into memory."""

    def __init__(self) -> None:
        super().__init__()
        self.max_redirects = 0  # a redirect raises an error

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Sends the request, and returns a response with the beginning of the answer."""
        response = super().send(request, **{**options, "stream": True})
        until_s, answer, received = time.monotonic() + MAX_ANSWER_S, b"", response.raw
        while piece := received.read1(_PIECE_BYTES, decode_content=False):
            answer += piece
            if len(answer) >= MAX_ANSWER_BYTES or time.monotonic() > until_s:
                response.close()  # the connection is not used again
                break
        else:
            received.release_conn()
        response.raw = io.BytesIO(answer)
        return response
