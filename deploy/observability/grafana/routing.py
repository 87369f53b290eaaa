"""Routing decisions, and the caches that they rely on."""

from deploy.observability.grafana.dashboard import MODELS, WORKERS, Dashboard, Panel, Query, Row
from deploy.observability.grafana.promql import MODEL, WORKER, of_processes, rate, ratio

DECISIONS = "trunkline_router_route_decisions_total"
REAL, PREDICTED = "trunkline_router_worker_first_token", "trunkline_router_worker_predicted_first_token"


def seen(metric: str, most: str = "max") -> str:
    """A gauge of workers, of the routers' one that sees most."""
    return f"{most} by (worker) ({metric}{{{WORKER}}})"


WHERE = Row(
    "Where requests go, and why",
    [
        Panel(
            "Decisions / s, by reason",
            "soonest: the lowest predicted time to the first token; most_cached: of workers near the soonest, the one "
            "with the longest prefix.",
            [Query(rate(DECISIONS, by="policy, reason"), "{{policy}}: {{reason}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Attempts / s, by worker",
            "Even lines mean even load only if requests are alike.",
            [Query(rate("trunkline_router_worker_attempts_total", WORKER, by="worker"), "{{worker}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Work on the way, by worker",
            "Uncached prompt tokens that routers have sent and that have no output yet.",
            [Query(f"sum by (worker) (trunkline_router_worker_queued_tokens{{{WORKER}}})", "{{worker}}")],
        ),
        Panel(
            "Open choices, by worker",
            "Choices of the routers that have not ended there.",
            [Query(f"sum by (worker) (trunkline_router_worker_open_choices{{{WORKER}}})", "{{worker}}")],
        ),
        Panel(
            "Workers in the pool",
            "Workers that accept requests.",
            [Query(f"max by (model_name) (trunkline_router_pool_workers{{{MODEL}}})", "{{model_name}}")],
        ),
        Panel(
            "Requests that wait for a worker",
            "There is none that can take them.",
            [Query("sum (trunkline_router_waiting_requests)", "waiting")],
        ),
    ],
)

PREDICTIONS = Row(
    "Predictions",
    [
        Panel(
            "Real over predicted, by worker",
            "1 is right; above 1 the worker is slower than its step model says.",
            [
                Query(
                    ratio(
                        rate(f"{REAL}_seconds_total", WORKER, by="worker"),
                        rate(f"{PREDICTED}_seconds_total", WORKER, by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
        ),
        Panel(
            "Mean error, by worker",
            "Mean distance of prediction and reality.",
            [
                Query(
                    ratio(
                        rate(f"{REAL}_error_seconds_total", WORKER, by="worker"),
                        rate("trunkline_router_worker_first_tokens_total", WORKER, by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
            "s",
        ),
        Panel(
            "Real over predicted, all requests",
            "One band around 1 is right.",
            [Query(rate("trunkline_router_first_token_prediction_ratio_bucket", MODEL, by="le"), "{{le}}")],
            kind="heatmap",
        ),
    ],
)

CACHES = Row(
    "Caches",
    [
        Panel(
            "Prompt tokens: promised and found",
            "Share that the routers' index promised at the chosen workers, and share that workers found.",
            [
                Query(
                    ratio(
                        rate("trunkline_router_route_matched_tokens_total", MODEL),
                        rate("trunkline_router_route_prompt_tokens_total", MODEL),
                    ),
                    "promised",
                ),
                Query(
                    ratio(rate("vllm:prefix_cache_hits_total", MODEL), rate("vllm:prefix_cache_queries_total", MODEL)),
                    "found",
                ),
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Hit rate, by worker",
            "Share of prompt tokens that were found in the cache.",
            [
                Query(
                    ratio(
                        rate("vllm:prefix_cache_hits_total", WORKER, by="worker"),
                        rate("vllm:prefix_cache_queries_total", WORKER, by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Requests that missed the cache / s",
            "Why less was found than earlier prompts could have left; new: a first turn; changed: a later one.",
            [Query(rate("trunkline_router_cache_misses_total", MODEL, by="reason"), "{{reason}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "KV blocks of the fleet",
            "live: of running choices; cached: only reusable prefixes; free: empty.",
            [Query(f"sum by (state) (trunkline_worker_kv_blocks{{{MODEL}}})", "{{state}}")],
            stacked=True,
        ),
    ],
)

INDEX = Row(
    "The index of cached prefixes",
    [
        Panel(
            "Accuracy, by worker",
            "Share of promised tokens that were found, of the last 200 requests. Where it is low, load decides.",
            [Query(seen("trunkline_router_worker_index_accuracy", "min"), "{{worker}}")],
            "percentunit",
            most=1,
        ),
        Panel(
            "Found of promised, by worker",
            "The same, by rates.",
            [
                Query(
                    ratio(
                        rate("trunkline_router_worker_found_tokens_total", WORKER, by="worker"),
                        rate("trunkline_router_worker_promised_tokens_total", WORKER, by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Age, by worker",
            "Time since the worker's last cache event or load sample.",
            [Query(seen("trunkline_router_worker_index_age_seconds"), "{{worker}}")],
            "s",
        ),
        Panel(
            "Blocks, by worker",
            "Blocks that the index knows.",
            [Query(seen("trunkline_router_worker_index_blocks"), "{{worker}}")],
        ),
        Panel(
            "Routed by load",
            "1: the worker's cache reports do not count now.",
            [Query(seen("trunkline_router_worker_routed_by_load"), "{{worker}}")],
            most=1,
        ),
        Panel(
            "Connections / h",
            "Of each process of a router. Each new one means a new snapshot of the worker's cache.",
            [Query(of_processes("trunkline_router_worker_connections_total", WORKER), "{{worker}}")],
        ),
    ],
)

ROUTING = Dashboard(
    "routing",
    "Routing and caches",
    "Where do requests go, why, and was the router right?",
    [WHERE, PREDICTIONS, CACHES, INDEX],
    (MODELS, WORKERS),
)
