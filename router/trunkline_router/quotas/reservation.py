"""Accounts for one request in its tenant's quotas and service, from admission until it ends for any reason."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from trunkline.v1.inference_pb2 import PromptInfo
from trunkline_router.quotas.fairness import CACHED_COST, INPUT_COST, OUTPUT_COST
from trunkline_router.quotas.tenant_book import When


def prompt_cost(tokens: int, cached: int) -> float:
    """Returns the service of computing a prompt, `cached` tokens of which are found in the cache."""
    return INPUT_COST * (tokens - cached) + CACHED_COST * cached


class InputMeter:
    """Counts the inputs of a request for vectors or scores that a worker computes or has computed.

    cost: of those that are answered
    """

    __slots__ = ("_answered_tokens", "_at_worker", "cost")

    def __init__(self) -> None:
        self._at_worker: dict[int, int] = {}  # tokens by input
        self._answered_tokens = 0
        self.cost = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the inputs."""
        return self._answered_tokens + sum(self._at_worker.values())

    @property
    def whole_cost(self) -> float:
        """The cost with that of the inputs that are not answered."""
        return self.cost + prompt_cost(sum(self._at_worker.values()), 0)

    def sent(self, index: int, tokens: int) -> None:
        self._at_worker[index] = tokens

    def answered(self, index: int, tokens: int, cached_tokens: int) -> None:
        self._at_worker.pop(index, None)
        self._answered_tokens += tokens
        self.cost += prompt_cost(tokens, cached_tokens)

    def lost(self) -> None:
        """The worker has lost or refused what it had not answered."""
        self._at_worker.clear()


class OutputMeter:
    """Counts the output tokens that workers have computed for all choices of a request, whether or not its client has
    read them; and its inputs, if it is for vectors or scores."""

    __slots__ = ("inputs", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.inputs = InputMeter()

    def add(self, tokens: int) -> None:
        """Counts `tokens` more."""
        self.tokens += tokens


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


@dataclass(slots=True, eq=False)
class Admitted:
    """A request that counts in its tenant's quotas, until it is settled."""

    account: str
    output_tokens: int  # that it counts for, of all choices
    most_output_tokens: int  # the most that it can use
    choices: int
    quota: int | None  # of its tenant: the smaller of tokens in a minute and tokens in flight
    is_estimate: bool  # it has no max_tokens
    entries: int  # StoreLink.entries at its admission; if they differ later, the store no longer has its bucket
    parts: list[tuple[When, int]] = field(
        default_factory=list
    )  # tokens by when they were counted: at admission and later

    @property
    def tokens(self) -> int:
        """Tokens that it counts for."""
        return sum(tokens for _, tokens in self.parts)


class Reservation:
    """A context manager that settles the request's usage on exit. `meter` counts the computed output. `prompt_tokens`
    are charged for the prompt, cached or not, if the request is charged at all; of inputs, those that a worker got.

    admitted: None for a tenant without quotas
    settle: called once at the end
    """

    def __init__(
        self,
        tenant: str,
        weight: float,
        prompt_tokens: int,
        admitted: Admitted | None,
        settle: "Callable[[Reservation], None]",
    ) -> None:
        self.tenant = tenant
        self.weight = weight
        self.prompt_tokens = prompt_tokens
        self.admitted = admitted
        self._settle = settle
        self._metered: Metered | None = None
        self._prompt_cost: float | None = None  # None: not known yet
        self._served = 0.0  # cost
        self.meter = OutputMeter()
        self.is_charged_in_full = False

    @property
    def tokens(self) -> int:
        """Tokens that are reserved."""
        return 0 if self.admitted is None else self.admitted.tokens

    @property
    def used_tokens(self) -> int:
        """Tokens to charge: 0 if no worker served the request, because none took it or all lost or refused it."""
        if self._metered is None or not self._metered.is_owed:
            return 0
        return (self.meter.inputs.tokens or self.prompt_tokens) + self.meter.tokens

    @property
    def has_ended(self) -> bool:
        return self._metered is not None and self._metered.has_ended

    def follow(self, metered: Metered) -> None:
        """Sets the answer whose progress decides what is charged."""
        self._metered = metered

    def count_prompt(self, prompt: PromptInfo) -> None:
        """Counts the prompt as service. Only the first call has an effect."""
        if self._prompt_cost is None:
            self._prompt_cost = prompt_cost(prompt.prompt_tokens, prompt.cached_tokens)

    def new_service(self) -> float:
        """Returns the cost over weight of what was computed since the last call, whether or not the client has read
        it."""
        known = self.meter.inputs.cost if self._prompt_cost is None else self._prompt_cost
        cost = known + OUTPUT_COST * self.meter.tokens
        new, self._served = cost - self._served, cost
        return new / self.weight

    def charge_in_full(self, prompt_tokens: int, most_output_tokens: int) -> None:
        """Charges the request's maximum to quotas and service, because its actual usage is not seen here."""
        self.is_charged_in_full = True
        self._prompt_cost = INPUT_COST * prompt_tokens
        self.meter.tokens = most_output_tokens

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.settle()

    def settle(self) -> None:
        """Settles the request's usage at its end. Call it once."""
        if self.used_tokens and self._prompt_cost is None:
            inputs = self.meter.inputs
            self._prompt_cost = inputs.whole_cost if inputs.tokens else prompt_cost(self.prompt_tokens, 0)
        self._settle(self)
