"""Accounts for one request in its tenant's quotas and service, from admission until it ends for any reason."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from trunkline.v1.inference_pb2 import PromptInfo
from trunkline_router.quotas.fairness import CACHED_COST, INPUT_COST, OUTPUT_COST


class OutputMeter:
    """Counts the output tokens that workers have computed for all choices of a request, whether or not its client has
    read them. Calls back when a limit is exceeded, so that nothing has to poll it."""

    __slots__ = ("_limit_tokens", "_on_past", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._limit_tokens = sys.maxsize
        self._on_past: Callable[[], None] | None = None

    def add(self, tokens: int) -> None:
        """Counts `tokens` more."""
        self.tokens += tokens
        if self.tokens > self._limit_tokens:
            self._notify()

    def when_past(self, tokens: int, on_past: Callable[[], None]) -> None:
        """Calls `on_past` once when the count exceeds `tokens`, at once if it does already. Replaces any previous
        callback."""
        self._limit_tokens, self._on_past = tokens, on_past
        self.add(0)

    def drop_callback(self) -> None:
        """Drops the callback, which may refer to the owner of the meter."""
        self._limit_tokens, self._on_past = sys.maxsize, None

    def _notify(self) -> None:
        on_past, self._on_past, self._limit_tokens = self._on_past, None, sys.maxsize
        if on_past is not None:
            on_past()


class Metered(Protocol):
    """The progress of an answer. Its output is counted in the reservation's meter."""

    @property
    def is_owed(self) -> bool:
        """Whether a worker computes or has computed any part of it, including the prompt."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended."""
        ...


class Reservation:
    """A context manager that settles the request's usage on exit. `meter` counts the computed output. `tokens` were
    reserved (0 for a tenant without quotas). `prompt_tokens` are charged for the prompt, cached or not, if the request
    is charged at all.

    settle: called once at the end
    serve: called with the cost of what was computed for the request since the last time
    """

    def __init__(
        self, settle: "Callable[[Reservation], None]", serve: Callable[[float], None], tokens: int, prompt_tokens: int
    ) -> None:
        self._settle = settle
        self._serve = serve
        self._metered: Metered | None = None
        self._prompt_cost: float | None = None  # None: not known yet
        self._prompt_served, self._output_served = 0.0, 0  # cost, and tokens
        self.meter = OutputMeter()
        self.tokens = tokens
        self.prompt_tokens = prompt_tokens
        self.is_charged_in_full = False

    @property
    def output_tokens(self) -> int:
        """Output tokens computed so far."""
        return self.meter.tokens

    @property
    def used_tokens(self) -> int:
        """Tokens to charge: 0 if no worker served the request, because none took it or all lost or refused it."""
        if self._metered is None or not self._metered.is_owed:
            return 0
        return self.prompt_tokens + self.meter.tokens

    @property
    def has_ended(self) -> bool:
        return self._metered is not None and self._metered.has_ended

    def follow(self, metered: Metered) -> None:
        """Sets the answer whose progress decides what is charged."""
        self._metered = metered

    def count_prompt(self, prompt: PromptInfo) -> None:
        """Counts the prompt as service. Only the first call has an effect."""
        if self._prompt_cost is None:
            cached = prompt.cached_tokens
            self._prompt_cost = INPUT_COST * (prompt.prompt_tokens - cached) + CACHED_COST * cached

    def serve(self) -> None:
        """Counts as service what was computed since the last call, whether or not the client has read it."""
        prompt, output = self._prompt_cost or 0.0, self.meter.tokens
        cost = prompt - self._prompt_served + OUTPUT_COST * (output - self._output_served)
        self._prompt_served, self._output_served = prompt, output
        if cost:
            self._serve(cost)

    def charge_in_full(self, prompt_tokens: int, most_output_tokens: int) -> None:
        """Charges the request's maximum to quotas and service, because its actual usage is not seen here."""
        if not self.is_charged_in_full:
            self.is_charged_in_full = True
            self._serve(INPUT_COST * prompt_tokens + OUTPUT_COST * most_output_tokens)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.settle()

    def settle(self) -> None:
        """Settles the request's usage at its end. Call it once."""
        self.meter.drop_callback()
        if self.used_tokens:
            if self._prompt_cost is None:
                self._prompt_cost = INPUT_COST * self.prompt_tokens
            self.serve()
        self._settle(self)
