"""The grammars that a worker keeps for a session, so that each is sent once. Pure."""

from collections.abc import Callable, Container

from trunkline.v1.worker_pb2 import Grammar, SessionRequest

MOST_KEPT_BYTES = 64 << 20  # whatever the worker offers, so that the router's list of them is bounded
LEAST_BYTES = 1 << 10  # that each counts for


class SessionGrammars:
    """Which grammars the worker keeps: those that submits have named last.

    most_bytes: of their texts, that the worker keeps for a session
    """

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = min(most_bytes, MOST_KEPT_BYTES)
        self._kept: dict[bytes, int] = {}  # bytes by digest, those that were named longest ago first

    def name(self, grammar: Grammar, request: SessionRequest, needed: Callable[[], Container[bytes]]) -> bool:
        """Has the request bring what the worker needs for a submit with this grammar: the grammar, unless it is kept,
        and the digests of others in its place. Returns False if there is no room.

        needed: returns the digests that unsent submits name, which the worker must not forget: it has what those before
        them name in a copy
        """
        digest = grammar.digest
        num_bytes = self._kept.pop(digest, 0)
        if not num_bytes:
            num_bytes = max(len(grammar.text.encode()), LEAST_BYTES)
            if num_bytes > self._left_bytes and not self._make_room(num_bytes, request, needed()):
                return False
            self._left_bytes -= num_bytes
            if digest in request.dropped_grammars:
                request.dropped_grammars.remove(digest)  # the worker has not been told to forget it
            else:
                request.grammars.append(grammar)
        self._kept[digest] = num_bytes
        return True

    def _make_room(self, num_bytes: int, request: SessionRequest, needed: Container[bytes]) -> bool:
        for digest in [digest for digest in self._kept if digest not in needed]:
            request.dropped_grammars.append(digest)
            self._left_bytes += self._kept.pop(digest)
            if num_bytes <= self._left_bytes:
                return True
        return False
