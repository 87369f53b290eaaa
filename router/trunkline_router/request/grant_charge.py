"""What a direct client's request holds of its tenant's quotas, from the signing of its grants until they are over.

The worker says when a grant is over, not the client. A charge outlives the client's call, because a client that hangs
up may still use its grants. An unused grant is given back when it expires; a used one costs what the worker computed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trunkline.grant import LIFETIME_S
from trunkline.proof import WINDOW_S
from trunkline.v1.inference_pb2 import PromptInfo
from trunkline.v1.worker_pb2 import GrantReport, Submit
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.workers.session import WorkerSession

CLOCK_MARGIN_S = WINDOW_S  # the clocks of a router and a worker differ by less, or no session opens


class _Told(NamedTuple):
    """A charge's outcome without the charge, which refers to its reservation: so no reference cycle is left."""

    is_owed: bool
    has_ended: bool


class GrantCharge:
    """The charge for a request's grants. The request must call let_go() when it ends, however it ends.

    most_output_tokens: of all choices together
    """

    def __init__(self, reservation: Reservation, prompt_tokens: int, most_output_tokens: int) -> None:
        self._reservation = reservation
        self._prompt_tokens = prompt_tokens
        self._most_output_tokens = most_output_tokens
        self._session: WorkerSession | None = None
        self._open: dict[int, int] = {}  # choices by handle, of grants that run or may still be used
        self._begun: set[int] = set()  # handles
        self._over = asyncio.Event()  # the grants are over
        self._given_up = False  # by the worker
        self._untold = False  # the worker was lost, and what it computes is not known
        self._is_let_go = self._is_settled = False
        self._prompt = PromptInfo()  # the part that was computed
        self._output_tokens: dict[int, int] = {}  # by choice
        self._expiry: asyncio.TimerHandle | None = None
        self._on_over: Callable[[], None] = lambda: None

    @property
    def is_owed(self) -> bool:
        return self._prompt.prompt_tokens > 0

    @property
    def has_ended(self) -> bool:
        return self._over.is_set() and not self._is_workers_doing

    @property
    def is_limited(self) -> bool:
        """Whether the tenant has quotas."""
        return self._reservation.tokens > 0

    def grant(self, session: WorkerSession, submits: Sequence[Submit], on_over: Callable[[], None]) -> None:
        """Charges choices that are about to be signed for the worker of this session; earlier ones no longer count.

        on_over: called once these grants are over
        """
        self._forget(list(self._open))
        handles = session.grant(submits, self._hear)
        self._session = session
        self._open = {handle: submit.choice for handle, submit in zip(handles, submits, strict=True)}
        self._begun.clear()
        self._over.clear()
        self._given_up = self._untold = False
        self._on_over = on_over
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(LIFETIME_S + CLOCK_MARGIN_S, self._expire)

    def revoke(self) -> None:
        """The last grant did not reach the client."""
        self._forget(list(self._open))

    async def is_excused(self, within_s: float, *, hangs: bool) -> bool:
        """Returns whether the worker, not the client, ended the last grants: it hangs (`hangs`), gave the request up,
        or was lost. Waits up to `within_s` for the worker's report; without one, the answer is False."""
        if not hangs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._over.wait()
        return not self._is_settled and (hangs or (self._over.is_set() and self._is_workers_doing))

    @property
    def _is_workers_doing(self) -> bool:
        return self._given_up or self._untold

    def let_go(self) -> None:
        """The client's call has ended, or has a new charge: this one settles as soon as its grants are over."""
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
                # A client may claim fewer tokens than the previous worker has computed.
                self._output_tokens[choice] = max(report.output_tokens, self._output_tokens.get(choice, 0))
        self._review()

    def _expire(self) -> None:
        """Gives back the grants that were not used in time."""
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
        self._over.set()
        self._on_over()
        if self._is_workers_doing and not self._is_let_go:
            return  # the request may continue on another worker, at this charge
        self._is_settled = True
        if self._expiry is not None:
            self._expiry.cancel()
        if self._untold:
            self._reservation.charge_in_full(self._prompt_tokens, self._most_output_tokens)
        else:
            self._charge_computed()
        self._reservation.settle()

    def _charge_computed(self) -> None:
        if self.is_owed:
            self._reservation.count_prompt(self._prompt)
        self._reservation.follow(_Told(self.is_owed, self.has_ended))
        self._reservation.meter.add(sum(self._output_tokens.values()))
