"""An HTTP session for exports that reads only a little of an answer, however much a collector sends."""

import time
from typing import Any

import requests

MAX_ANSWER_BYTES = 64 << 10  # a few lines, if the collector refuses spans
MAX_ANSWER_S = 10.0
_PIECE_BYTES = 4096


class BoundedSession(requests.Session):
    """requests itself would read an endless answer into memory."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        response = super().send(request, **{**options, "stream": True, "allow_redirects": False})
        until_s, answer = time.monotonic() + MAX_ANSWER_S, b""
        while piece := response.raw.read1(_PIECE_BYTES, decode_content=False):
            answer += piece
            if len(answer) >= MAX_ANSWER_BYTES or time.monotonic() > until_s:
                response.close()  # the connection is not used again
                break
        else:
            response.raw.release_conn()
        response._content = answer
        return response
