"""Tenants, their quotas, and what they cost."""

from deploy.observability.grafana.dashboard import MODELS, TENANTS, Dashboard, Panel, Query, Row, stat
from deploy.observability.grafana.promql import (
    DEVICE_TIME,
    MODEL,
    TENANT,
    cost,
    cost_per_hour,
    increase,
    quantile,
    rate,
    ratio,
)

REQUESTS = "trunkline_router_tenant_requests_total"
# Workers count the choices that ran, also those of cancelled and of direct requests; routers count answered requests.
TOKENS = "trunkline_worker_tenant_tokens_total"
PRICE = f"max by (model_name) (trunkline_router_fleet_price_per_hour{{{MODEL}}})"

SUMMARY = Row(
    "Use, in the chosen time",
    [
        Panel(
            "Tenants",
            "Requests as routers count them. Tokens, device time and cost as workers do, with those of cancelled and "
            "of direct requests. The first hundred tenants of a process have names; all later ones are other.",
            [
                Query(increase(REQUESTS, TENANT, by="tenant"), "requests"),
                Query(increase(REQUESTS, TENANT, 'result="refused"', by="tenant"), "refused"),
                Query(increase(TOKENS, TENANT, 'kind="computed"', by="tenant"), "prompt tokens computed"),
                Query(increase(TOKENS, TENANT, 'kind="cached"', by="tenant"), "prompt tokens cached"),
                Query(increase(TOKENS, TENANT, 'kind="output"', by="tenant"), "output tokens"),
                Query(increase(DEVICE_TIME, TENANT, by="tenant"), "device time", "s"),
                Query(cost(TENANT, by="tenant"), "cost"),
            ],
            kind="table",
            width=24,
            height=9,
        ),
    ],
)

TRAFFIC = Row(
    "Traffic",
    [
        Panel(
            "Requests / s",
            "All that ended.",
            [Query(rate(REQUESTS, TENANT, by="tenant"), "{{tenant}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests / s that were not answered",
            "refused: the tenant's doing, or a full fleet's; failed: the fleet's doing.",
            [Query(rate(REQUESTS, TENANT, 'result!="ok"', by="tenant, result"), "{{tenant}} {{result}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Time to first token, p99",
            "As clients see it.",
            [Query(quantile(0.99, "trunkline_router_tenant_first_token_seconds", TENANT, by="tenant"), "{{tenant}}")],
            "s",
        ),
        Panel(
            "Output tokens / s",
            "Of all lanes.",
            [Query(rate(TOKENS, TENANT, 'kind="output"', by="tenant"), "{{tenant}}")],
            stacked=True,
        ),
        Panel(
            "Share of prompts that was cached",
            "Cached tokens cost next to nothing.",
            [
                Query(
                    ratio(
                        rate(TOKENS, TENANT, 'kind="cached"', by="tenant"),
                        rate(TOKENS, TENANT, 'kind!="output"', by="tenant"),
                    ),
                    "{{tenant}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Requests / s, by lane",
            "Lanes of the chosen tenants.",
            [Query(rate(REQUESTS, TENANT, by="lane"), "{{lane}}")],
            "reqps",
            stacked=True,
        ),
    ],
)

QUOTAS = Row(
    "Quotas",
    [
        Panel(
            "Use of quotas",
            "At 1 the next request is refused with QUOTA_EXCEEDED. Only tenants with quotas are shown.",
            [
                Query(
                    f"max by (tenant, quota) (trunkline_router_quota_used{{{TENANT}}}) / "
                    f"max by (tenant, quota) (trunkline_router_quota_limit{{{TENANT}}})",
                    "{{tenant}} {{quota}}",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Refusals / s, by quota",
            "Of all tenants.",
            [Query(rate("trunkline_router_quota_refusals_total", by="quota"), "{{quota}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Where quotas were decided / s",
            "alone: the store did not answer in time, so a router counted by itself.",
            [Query(rate("trunkline_router_quota_decisions_total", by="by"), "{{by}}")],
            "reqps",
            stacked=True,
        ),
    ],
)

COST = Row(
    "Cost, where workers have a price (--price-per-hour)",
    [
        stat("Price of the fleet / h", "Of the workers that are connected.", f"sum ({PRICE})", "short"),
        stat(
            "Million output tokens",
            "Price of the fleet divided by its output now. It falls as the fleet is used better.",
            f"1e6 / 3600 * sum ({PRICE}) / ({rate('vllm:generation_tokens_total', MODEL)} > 0)",
            "short",
        ),
        stat(
            "Device time used",
            "Price of the device time of requests per hour: the part of the price above that requests account for.",
            cost_per_hour(MODEL),
            "short",
        ),
        Panel(
            "Cost / h, by tenant",
            "Price of the device time of their requests.",
            [Query(cost_per_hour(TENANT, by="tenant"), "{{tenant}}")],
            width=12,
            stacked=True,
        ),
        Panel(
            "Million output tokens, by tenant",
            "Their device time, prompts included, over their output. Long uncached prompts are dear.",
            [
                Query(
                    "1e6 / 3600 * "
                    + ratio(
                        cost_per_hour(TENANT, by="tenant"),
                        rate(TOKENS, TENANT, 'kind="output"', by="tenant"),
                    ),
                    "{{tenant}}",
                )
            ],
        ),
        Panel(
            "Million output tokens, by worker",
            "Price of the worker at its rate of the last minute.",
            [
                Query(
                    f"max by (worker) (trunkline_worker_cost_per_million_output_tokens{{{MODEL}}})",
                    "{{worker}}",
                )
            ],
        ),
        Panel(
            "Share of device time",
            "Of the chosen tenants' requests.",
            [
                Query(
                    f"{rate(DEVICE_TIME, TENANT, by='tenant')} / on () group_left () ({rate(DEVICE_TIME)} > 0)",
                    "{{tenant}}",
                )
            ],
            "percentunit",
            stacked=True,
        ),
    ],
)

TENANTS_DASHBOARD = Dashboard(
    "tenants",
    "Tenants, quotas and cost",
    "Which tenant uses how much, and what does it cost?",
    [SUMMARY, TRAFFIC, QUOTAS, COST],
    (MODELS, TENANTS),
)
