"""Reports on grants to the routers that signed them. A router reserves a grant's maximum, and settles by its report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import TracebackType

from trunkline.status import NO_WORKER, OVERLOADED, RequestRefused
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, Submit
from trunkline_worker.front.choice import Choice

Tell = Callable[[SequenceOutput], None]

GIVEN_UP = (NO_WORKER, OVERLOADED)  # reasons for which the worker, not the client, ends a request


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
