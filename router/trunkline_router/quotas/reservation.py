"""A request's part in its tenant's quotas and service, from admission to its end, whichever way it ends."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.quotas.fairness import CACHED_COST, INPUT_COST, OUTPUT_COST
from trunkline_router.quotas.meter import OutputMeter


class Metered(Protocol):
    """An answer, as far as workers have come with it. Its output goes into the reservation's meter."""

    @property
    def is_owed(self) -> bool:
        """Whether a worker computes or has computed anything of it, prompt included."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether every choice came to its end."""
        ...


class Reservation:
    """A context: leaving it settles. What is computed for the request goes into its `meter`. `tokens` is what was
    reserved, 0 for a tenant without quotas; `prompt_tokens` is what the request is charged for its prompt, cached or
    not, if it is charged."""

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
        """Computed so far."""
        return self.meter.tokens

    @property
    def used_tokens(self) -> int:
        """0 where nobody served it: no worker took it, or all of them lost or refused it."""
        if self._metered is None or not self._metered.is_owed:
            return 0
        return self.prompt_tokens + self.meter.tokens

    @property
    def has_ended(self) -> bool:
        return self._metered is not None and self._metered.has_ended

    def follow(self, metered: Metered) -> None:
        """Who computes for the request."""
        self._metered = metered

    def took(self, response: GenerateResponse) -> None:
        """The client gets this."""
        cost = 0.0
        if response.HasField("prompt") and not self._prompt_served:
            self._prompt_served = True
            prompt_tokens, cached = response.prompt.prompt_tokens, response.prompt.cached_tokens
            cost += INPUT_COST * (prompt_tokens - cached) + CACHED_COST * cached
        output = sum(len(chunk.token_ids) for chunk in response.chunks)
        self._output_served += output
        self._serve(cost + OUTPUT_COST * output)

    def charge_in_full(self, prompt_tokens: int, most_output_tokens: int) -> None:
        """What becomes of it is not seen here: it counts as all that it may use, in quotas and in service."""
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
        """It has ended; once."""
        self._serve_rest()
        self._settle(self)

    def _serve_rest(self) -> None:
        """What was computed for a client that did not wait for it was service too."""
        if self.used_tokens:
            prompt_cost = 0.0 if self._prompt_served else INPUT_COST * self.prompt_tokens
            self._serve(prompt_cost + OUTPUT_COST * (self.output_tokens - self._output_served))
