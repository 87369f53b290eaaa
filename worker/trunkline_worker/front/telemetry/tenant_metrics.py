"""What tenants had of a worker. Their number is bounded: the first ones have series of their own."""

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.core import Metric

from trunkline_runtime.telemetry.bounded_names import BoundedNames
from trunkline_runtime.telemetry.exposition import counter
from trunkline_worker.front.telemetry.choice_end import ChoiceEnd

MAX_TENANTS = 100  # with three lanes and three kinds of tokens: 909 series
LABELS = ("model_name", "tenant", "lane")


class TenantMetrics:
    """Counted at the ends of choices."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._names = BoundedNames(MAX_TENANTS)
        self._outcomes: dict[tuple[str, ...], int] = defaultdict(int)  # by lane and outcome, of all tenants
        self._choices: dict[tuple[str, ...], int] = defaultdict(int)
        self._device_s: dict[tuple[str, ...], float] = defaultdict(float)
        self._tokens: dict[tuple[str, ...], int] = defaultdict(int)

    def choice_ended(self, end: ChoiceEnd) -> None:
        """Counts the end of a choice."""
        lane, timeline = end.lane.name.lower(), end.timeline
        key = (self._model_name, self._names.label(end.tenant), lane)
        self._outcomes[self._model_name, lane, end.outcome] += 1
        self._choices[key] += 1
        self._device_s[key] += timeline.device_s
        if timeline.HasField("first_token_s"):
            self._tokens[*key, "computed"] += end.prompt_tokens - timeline.cached_tokens
            self._tokens[*key, "cached"] += timeline.cached_tokens
            self._tokens[*key, "output"] += end.output_tokens - end.ledger_tokens

    def families(self) -> Iterable[Metric]:
        """All families."""
        yield counter(
            "trunkline_worker_choices",
            "Choices that ended, by outcome: a finish reason, cancelled, or the reason of an error.",
            ("model_name", "lane", "outcome"),
            self._outcomes.items(),
        )
        yield counter("trunkline_worker_tenant_choices", "Choices that ended.", LABELS, self._choices.items())
        yield counter(
            "trunkline_worker_tenant_device_seconds",
            "Device time of ended choices: their shares of their steps, by tokens.",
            LABELS,
            self._device_s.items(),
        )
        yield counter(
            "trunkline_worker_tenant_tokens",
            "Tokens of ended choices: of prompts, computed or cached, and of output.",
            (*LABELS, "kind"),
            self._tokens.items(),
        )
