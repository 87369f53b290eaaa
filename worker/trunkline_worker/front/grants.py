"""Grants of direct clients: their requests are accepted once each, and reported to the routers that signed them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from types import TracebackType

from trunkline.grant import GrantKeys, open_grant
from trunkline.status import CODE_RESOURCE_EXHAUSTED, NO_WORKER, OVERLOADED, RequestRefused, forbidden, invalid
from trunkline.v1.worker_pb2 import Grant, GrantReport, SequenceOutput, Submit, WorkerServiceGenerateRequest
from trunkline_worker.front.choice import Choice
from trunkline_worker.front.session_grammars import identify

MAX_REMEMBERED = 1 << 17  # used grants: 4,000 a second over the time for which they are valid, about 25 MB
Tell = Callable[[SequenceOutput], None]
GIVEN_UP = (NO_WORKER, OVERLOADED)  # reasons for which the worker, not the client, ends a request


class UsedGrants:
    """Remembers used grants until they expire. At `most` grants it refuses new ones, rather than forget old ones."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._signatures: set[bytes] = set()
        self._by_expiry: list[tuple[int, bytes]] = []  # a heap

    def __len__(self) -> int:
        return len(self._signatures)

    def use(self, grant: Grant, now_unix_ms: int) -> None:
        """Marks an opened grant as used. Raises RequestRefused: FORBIDDEN if it was used before, OVERLOADED at
        `most`."""
        while self._by_expiry and self._by_expiry[0][0] <= now_unix_ms:
            self._signatures.discard(heappop(self._by_expiry)[1])
        if grant.signature in self._signatures:
            raise forbidden("the grant was used already")
        if len(self._signatures) >= self._most:
            wait_ms = self._by_expiry[0][0] - now_unix_ms
            message = "this worker was given too many grants recently"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=wait_ms)
        self._signatures.add(grant.signature)
        heappush(self._by_expiry, (grant.expires_unix_ms, grant.signature))


class GrantDesk:
    """Checks the requests of direct clients. `keys`: the grant keys; if there are none, the worker trusts every caller
    that the door admits, and accepts requests without a grant only. `now_unix_ms`: the clock by which grants expire."""

    def __init__(self, keys: GrantKeys, epoch: int, now_unix_ms: Callable[[], int]) -> None:
        self._keys = keys
        self._epoch = epoch
        self._now_unix_ms = now_unix_ms
        self._used = UsedGrants()

    def take(self, request: WorkerServiceGenerateRequest) -> Submit:
        """Returns the request's submit, and uses up its grant.

        Raises RequestRefused: FORBIDDEN if the grant is missing, not expected, invalid or used, OVERLOADED if too many
        are remembered, INVALID_REQUEST if a submit accompanies the grant or its grammar is invalid.
        """
        if not self._keys:
            if request.HasField("grant"):
                raise forbidden("this worker takes no grants: it was started without --grant-key")
            submit = Submit()
            submit.CopyFrom(request.submit)
            return _identified(submit)
        if not request.HasField("grant"):
            raise forbidden("this worker takes requests with a router's grant only")
        if request.HasField("submit"):
            raise invalid("submit", "must not be set together with a grant, which contains it")
        now_unix_ms = self._now_unix_ms()
        submit = open_grant(self._keys, request.grant, epoch=self._epoch, now_unix_ms=now_unix_ms)
        self._used.use(request.grant, now_unix_ms)
        return _identified(submit)


def _identified(submit: Submit) -> Submit:
    if submit.work.HasField("grammar"):
        identify(submit.work.grammar)
    return submit


class GrantReports:
    """The open sessions of this worker process, by the number that grants refer to them with."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._sessions: dict[int, Tell] = {}

    @contextmanager
    def session(self, tell: Tell) -> Iterator[int]:
        """Yields a new session's number, which is valid until the context ends."""
        number = next(self._numbers)
        self._sessions[number] = tell
        try:
            yield number
        finally:
            del self._sessions[number]

    def follow(self, submit: Submit) -> "FollowedGrant":
        """Returns the context that reports on this submit's choice. Reports are dropped if the submit names no session
        or if its session is closed."""
        return FollowedGrant(submit.handle, lambda output: self._tell(submit.report_session, output))

    def _tell(self, number: int, output: SequenceOutput) -> None:
        tell = self._sessions.get(number)
        if tell is not None:
            tell(output)


class FollowedGrant:
    """A context manager that reports a choice's start and, on exit, its end with its token counts."""

    def __init__(self, handle: int, tell: Tell) -> None:
        self._handle = handle
        self._tell = tell
        self._choice: Choice | None = None
        self._ledger_tokens = 0

    def began(self, choice: Choice) -> None:
        """Reports that the choice was passed to the engine."""
        self._choice = choice
        self._ledger_tokens = choice.stream.num_tokens
        self._report(GrantReport())

    def __enter__(self) -> "FollowedGrant":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        report = GrantReport(ended=True, given_up=isinstance(error, RequestRefused) and error.reason in GIVEN_UP)
        choice = self._choice
        if choice is not None and not (report.given_up and choice.stream.num_tokens == self._ledger_tokens):
            report.prompt_tokens = choice.num_prompt
            report.cached_tokens = choice.stream.cached_tokens
            report.output_tokens = choice.stream.num_tokens
        self._report(report)

    def _report(self, report: GrantReport) -> None:
        self._tell(SequenceOutput(handle=self._handle, granted=report))
