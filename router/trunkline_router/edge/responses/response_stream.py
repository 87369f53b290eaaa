"""The events of a streamed response, in OpenAI's order, each with its number."""

from collections.abc import Callable
from typing import Any

import orjson

from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.edge.http.sse import event
from trunkline_router.edge.openai.openai_answers import CollectedAnswer
from trunkline_router.edge.openai.token_details import Json
from trunkline_router.edge.responses.response_object import ResponseObject

DELTA = "response.output_text.delta"


class ResponseStream:
    """Writes the events of one response.

    The event of a token is put together from parts that are made once: serializing a dictionary for each token takes
    several times as long.

    finish: returns the whole response as JSON, once the answer has ended; it gets the answer and its message
    """

    def __init__(self, response: ResponseObject, finish: Callable[[CollectedAnswer, Json], bytes]) -> None:
        self._response = response
        self._finish = finish
        self._answer = CollectedAnswer()
        self._number = 0  # of the next event
        self._is_plain = not response.has_logprobs
        self._has_begun = False
        self._place: Json = {"item_id": response.item_id, "output_index": 0, "content_index": 0}
        head = orjson.dumps({"type": DELTA, **self._place})[:-1]  # without the brace that ends it
        self._delta_head = b"event: " + DELTA.encode() + b"\ndata: " + head + b',"sequence_number":'

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response; empty if it has nothing to tell."""
        self._answer.take(response)
        events = b"" if self._has_begun else self._opening()
        for chunk in response.chunks:
            text = chunk.text  # each access makes a copy
            if self._is_plain:
                if text:
                    events += self._delta(text, b"[]")
            elif text or chunk.logprobs:
                events += self._delta(text, orjson.dumps(self._response.logprobs(chunk.logprobs)))
        return events

    def end(self) -> bytes:
        """Returns the last events. Clients take no [DONE] here."""
        item = self._response.item(self._answer)
        part = item["content"][0]
        body = self._finish(self._answer, item)
        is_whole = item["status"] == "completed"
        return b"".join(
            (
                b"" if self._has_begun else self._opening(),
                self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"]),
                self._event("response.content_part.done", **self._place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(
                    "response.completed" if is_whole else "response.incomplete", response=orjson.Fragment(body)
                ),
            )
        )

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error."""
        opening = b"" if self._has_begun else self._lifecycle()  # only a comment has been sent
        return opening + self._event("response.failed", response=self._response.failed(self._answer, refused))

    def _lifecycle(self) -> bytes:
        begun = self._response.begun()
        return b"".join(self._event(name, response=begun) for name in ("response.created", "response.in_progress"))

    def _opening(self) -> bytes:
        self._has_begun = True
        item = {
            "id": self._response.item_id,
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return b"".join(
            (
                self._lifecycle(),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place, part=part),
            )
        )

    def _delta(self, text: str, logprobs: bytes) -> bytes:
        number = self._number
        self._number = number + 1
        return b'%b%d,"delta":%b,"logprobs":%b}\n\n' % (self._delta_head, number, orjson.dumps(text), logprobs)

    def _event(self, name: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return event(data, name.encode())
