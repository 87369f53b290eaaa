"""Parts of queries in PromQL."""

RATE = "$__rate_interval"

DEVICE_TIME = "trunkline_worker_tenant_device_seconds_total"  # of ended choices

# Variables of the dashboards, as selectors.
MODEL, WORKER, TENANT = 'model_name=~"$model"', 'worker=~"$worker"', 'tenant=~"$tenant"'
GENAI_MODEL = 'gen_ai_request_model=~"$model"'  # of OpenTelemetry's conventions
WITHIN = 'le=~"$within"'  # a bucket's upper end

STATE = "trunkline_router_worker_state"  # how many processes of a router see a worker in a state


def rate(metric: str, *selectors: str, by: str = "") -> str:
    """The sum of a counter's rates."""
    return f"sum{_by(by)} (rate({metric}{{{', '.join(selectors)}}}[{RATE}]))"


def increase(metric: str, *selectors: str, by: str = "") -> str:
    """How much a counter grew in the time range of the dashboard."""
    return f"sum{_by(by)} (increase({metric}{{{', '.join(selectors)}}}[$__range]))"


def cost_per_hour(*selectors: str, by: str = "") -> str:
    """Price per hour of the device time of choices. Workers count it, also that of cancelled and of direct requests."""
    return f"sum{_by(by)} (rate({DEVICE_TIME}{{{', '.join(selectors)}}}[{RATE}]) {_priced(RATE)})"


def cost(*selectors: str, by: str = "") -> str:
    """Price of the device time of choices in the time range of the dashboard."""
    return f"sum{_by(by)} (increase({DEVICE_TIME}{{{', '.join(selectors)}}}[$__range]) {_priced('$__range')}) / 3600"


def _priced(window: str) -> str:
    """Multiplies what workers counted by their prices. A worker that has gone since had one, too."""
    price = f"max by (job, instance, model_name) (last_over_time(trunkline_worker_price_per_hour[{window}]))"
    return f"* on (job, instance, model_name) group_left () {price}"


def of_processes(counter: str, *selectors: str) -> str:
    """How often it happened to each worker in an hour, as the router process sees it to which it happened most often.
    Each has connections of its own and counts what happens to them."""
    return f"max by (worker) (increase({counter}{{{', '.join(selectors)}}}[1h]))"


def workers_by_state() -> str:
    """How many workers there are in each state. Each router tells of each worker, so a worker counts once however many
    routers there are. Where routers disagree on its state, it counts in each of these states."""
    return f"sum by (state) (max by (worker, state) ({STATE} > bool 0))"


def share_by_state(*selectors: str) -> str:
    """The share of all processes of routers that see a worker in a state."""
    seen = f"sum by (worker, state) ({STATE}{{{', '.join(selectors)}}})"
    return f"{seen} / on () group_left () sum (trunkline_router_processes) > 0"


def quantile(share: float, histogram: str, *selectors: str, by: str = "") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', *selectors, by=f'le, {by}' if by else 'le')})"


def mean(histogram: str, *selectors: str, by: str = "") -> str:
    """The mean of a histogram."""
    return ratio(rate(f"{histogram}_sum", *selectors, by=by), rate(f"{histogram}_count", *selectors, by=by))


def ratio(part: str, whole: str) -> str:
    """A quotient, without series whose divisor is 0."""
    return f"{part} / ({whole} > 0)"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
