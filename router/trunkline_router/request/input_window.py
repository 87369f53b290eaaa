"""Which inputs of a request for vectors or scores are at its worker. Pure."""

from collections.abc import Iterator, Sequence
from itertools import islice

from trunkline.ledger import AnswerLedger, Ledger

MOST_AT_WORKER = 256  # enough for the steps to come
QUEUE_SHARE = 0.5  # of the choices that may wait at a worker: other requests come as well
SENT_SHARE = 0.25  # of the inputs that may be at a worker are sent at once, so that they share messages
GROWS_AFTER = 4  # full windows that were answered: a refusal costs what was under way


class InputWindow:
    """Which inputs of a request are at its worker: not more at a time than its next steps need, so that a large request
    neither fills the worker's queue nor waits for a client that reads slowly with all of its output. If a worker is
    full all the same, half as many are sent to the next one, and more again once these were answered.

    After a worker's death in a step of the request, the inputs that were at it are sent one by one: each proves
    harmless when it is answered, and one that kills another worker is known.
    """

    def __init__(self) -> None:
        self._unsent: Iterator[tuple[int, Ledger]] = iter(())
        self._num_unsent = 0
        self._most = MOST_AT_WORKER  # as far as workers were not full
        self._most_there = MOST_AT_WORKER  # of the current worker
        self._num_replaced = 0  # since the last change of _most
        self._last_suspect = -1  # inputs up to this one, as far as they are not answered, are suspects

    def begin(
        self, unfinished: Sequence[tuple[int, Ledger]], most_waiting: int, *, one_by_one: bool
    ) -> list[tuple[int, Ledger]]:
        """Begins an attempt. Returns the choices to send first.

        most_waiting: choices that may wait at the worker; 0: it does not say
        """
        self._unsent, self._num_unsent = iter(unfinished), len(unfinished)
        share = max(1, int(QUEUE_SHARE * most_waiting)) if most_waiting else MOST_AT_WORKER
        self._most_there = min(MOST_AT_WORKER, share)
        self._num_replaced = 0
        return self._take(1 if one_by_one else min(self._most, self._most_there))

    def next(self, num_unfinished: int, *, num_untaken: int = 0, one_by_one: bool) -> list[tuple[int, Ledger]]:
        """Returns the choices to send now, perhaps none.

        num_unfinished: in all, sent or not; num_untaken: answers that wait for the client
        """
        most = 1 if one_by_one else min(self._most, self._most_there)
        room = most - (num_unfinished - self._num_unsent) - num_untaken
        if room < max(1, SENT_SHARE * most):
            return []
        sent = self._take(room)
        self._num_replaced += len(sent)
        if self._num_replaced >= GROWS_AFTER * self._most:
            self._most, self._num_replaced = min(MOST_AT_WORKER, 2 * self._most), 0
        return sent

    def _take(self, room: int) -> list[tuple[int, Ledger]]:
        sent = list(islice(self._unsent, room))
        self._num_unsent -= len(sent)
        return sent

    def was_refused(self) -> None:
        """The worker is full."""
        self._most = max(1, min(self._most, self._most_there) // 2)

    def suspect(self, answer: AnswerLedger) -> None:
        """A worker has died: the inputs that were at it are suspects."""
        at_worker = list(islice(answer.unfinished(), answer.num_unfinished - self._num_unsent))
        self._last_suspect = max([self._last_suspect, *(index for index, _ in at_worker)])

    def has_suspects(self, answer: AnswerLedger) -> bool:
        first = next(answer.unfinished(), None)
        return first is not None and first[0] <= self._last_suspect
