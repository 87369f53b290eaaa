"""Accounts for one request in its tenant's quotas and service, from admission until it ends for any reason."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.quotas.fairness import CACHED_COST, INPUT_COST, OUTPUT_COST
from trunkline_router.quotas.meter import OutputMeter


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
    is charged at all."""

    def __init__(
        self, settle: "Callable[[Reservation], None]", serve: Callable[[float], None], tokens: int, prompt_tokens: int
    ) -> None:
        self._settle = settle
        self._serve = serve
        self._metered: Metered | None = None
        self._prompt_served = False
        self._output_served = 0  # tokens
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

    def took(self, response: GenerateResponse) -> None:
        """Counts a response to the client as service."""
        cost = 0.0
        if response.HasField("prompt") and not self._prompt_served:
            self._prompt_served = True
            prompt_tokens, cached = response.prompt.prompt_tokens, response.prompt.cached_tokens
            cost += INPUT_COST * (prompt_tokens - cached) + CACHED_COST * cached
        output = sum([len(chunk.token_ids) for chunk in response.chunks])
        self._output_served += output
        self._serve(cost + OUTPUT_COST * output)

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
        self._serve_rest()
        self._settle(self)

    def _serve_rest(self) -> None:
        """Counts output as service that was computed but not read by the client."""
        if self.used_tokens:
            prompt_cost = 0.0 if self._prompt_served else INPUT_COST * self.prompt_tokens
            self._serve(prompt_cost + OUTPUT_COST * (self.output_tokens - self._output_served))
