"""What a direct client's request holds of its tenant's quotas: from the signing of its grants until nothing more can
come of them, which is told by their worker and not by the client.

It outlives the client's call: who hangs up may use the grants all the same. A grant that nobody uses is given back when
it can no longer be used, and one that was used costs what the worker has computed for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from trunkline.grant import LIFETIME_S
from trunkline.proof import WINDOW_S
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo
from trunkline.v1.worker_pb2 import GrantReport, Submit
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.sessions.session import WorkerSession

CLOCK_MARGIN_S = WINDOW_S  # by which the clocks of routers and workers may differ: with more, no session opens
# Where the link to the worker breaks, what runs there runs on, and nobody tells of it: until the request's deadline, or
# for so long.
UNTOLD_S = 120.0


class Timer(Protocol):
    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]  # calls after so many seconds, as the event loop's call_later


class _Told(NamedTuple):
    """What a charge came to, without the charge: it refers to its reservation, and no cycle is to be left."""

    is_owed: bool
    has_ended: bool


class GrantCharge:
    """`most_output_tokens`: of all choices. `later`: None is the event loop's. To be let go of, whatever comes."""

    def __init__(
        self, reservation: Reservation, prompt_tokens: int, most_output_tokens: int, later: Later | None = None
    ) -> None:
        self._reservation = reservation
        self._prompt_tokens = prompt_tokens
        self._most_output_tokens = most_output_tokens
        self._session: WorkerSession | None = None
        self._open: dict[int, int] = {}  # choices by handle: of grants that run, or may yet be used
        self._begun: set[int] = set()  # handles
        self._told = asyncio.Event()  # nothing more can come of the grants
        self._given_up = False  # by the worker
        self._untold = False  # the worker was lost, and what comes of them is not known
        self._is_let_go = self._is_settled = False
        self._prompt = PromptInfo()  # as far as it was computed
        self._output_tokens: dict[int, int] = {}  # by choice
        self._later = later or asyncio.get_running_loop().call_later
        self._expiry: Timer | None = None
        self._ends_s = 0.0  # on the loop's clock
        self._on_over: Callable[[], None] = lambda: None

    @property
    def is_owed(self) -> bool:
        return self._prompt.prompt_tokens > 0

    @property
    def has_ended(self) -> bool:
        return self._told.is_set() and not self._is_workers_doing

    @property
    def is_limited(self) -> bool:
        """Whether its tenant has quotas."""
        return self._reservation.tokens > 0

    def grant(
        self, session: WorkerSession, submits: Sequence[Submit], timeout_ns: int | None, on_over: Callable[[], None]
    ) -> None:
        """Choices, to be signed now, for the worker of this session; those granted before are past.

        timeout_ns: the time left to the request. on_over: called once nothing more can come of them.
        """
        self._forget(list(self._open))
        handles = session.grant(submits, self._hear)
        self._session = session
        self._open = {handle: submit.choice for handle, submit in zip(handles, submits, strict=True)}
        self._begun.clear()
        self._told.clear()
        self._given_up = self._untold = False
        self._on_over = on_over
        untold_s = UNTOLD_S if timeout_ns is None else min(UNTOLD_S, timeout_ns / 1e9)
        self._ends_s = asyncio.get_running_loop().time() + untold_s
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._later(LIFETIME_S + CLOCK_MARGIN_S, self._expire)

    def revoke(self) -> None:
        """The last grant did not reach the client."""
        self._forget(list(self._open))

    async def is_excused(self, within_s: float, *, hangs: bool) -> bool:
        """Whether what was granted last ended through the worker's doing: it `hangs` as the router sees it, or its
        session says or shows it. What is not told within this time is not excused."""
        if not hangs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._told.wait()
        return not self._is_settled and (hangs or (self._told.is_set() and self._is_workers_doing))

    @property
    def _is_workers_doing(self) -> bool:
        return self._given_up or self._untold

    def let_go(self) -> None:
        """The client's call has ended, or goes on on another account: it settles once nothing more can come of it."""
        self._is_let_go = True
        self._review()

    def _hear(self, handle: int, report: GrantReport | None) -> None:
        if report is None:
            self._untold = True
            self._open.clear()
        elif not report.ended:
            self._begun.add(handle)
        else:
            choice = self._open.pop(handle)
            self._given_up |= report.given_up
            if report.prompt_tokens:
                self._prompt = PromptInfo(prompt_tokens=report.prompt_tokens, cached_tokens=report.cached_tokens)
                # A client may claim less of a ledger than the worker before has computed.
                self._output_tokens[choice] = max(report.output_tokens, self._output_tokens.get(choice, 0))
        self._review()

    def _expire(self) -> None:
        """What is not used by now never will be."""
        self._forget([handle for handle in self._open if handle not in self._begun])
        self._review()

    def _forget(self, handles: Sequence[int]) -> None:
        if self._session is not None:
            self._session.forget(handles)
        for handle in handles:
            del self._open[handle]

    def _review(self) -> None:
        if self._open or self._is_settled:
            return
        self._told.set()
        self._on_over()
        if self._is_workers_doing and not self._is_let_go:
            return  # the request may go on elsewhere, on the same account
        self._is_settled = True
        if self._expiry is not None:
            self._expiry.cancel()
        if self._untold:
            self._later(self._ends_s - asyncio.get_running_loop().time(), self._settle_in_full)
        else:
            self._settle()

    def _settle(self) -> None:
        if self.is_owed:
            self._reservation.took(GenerateResponse(prompt=self._prompt))
        self._reservation.follow(_Told(self.is_owed, self.has_ended))
        self._reservation.meter.add(sum(self._output_tokens.values()))
        self._reservation.settle()

    def _settle_in_full(self) -> None:
        self._reservation.charge_in_full(self._prompt_tokens, self._most_output_tokens)
        self._reservation.settle()
