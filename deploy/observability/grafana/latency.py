"""Latency, and where it goes."""

from deploy.observability.grafana.dashboard import MODELS, WITHIN_TIME, Dashboard, Panel, Query, Row, quantiles
from deploy.observability.grafana.promql import GENAI_MODEL, MODEL, WITHIN, mean, quantile, rate, ratio

FIRST_TOKEN = "trunkline_router_first_token_seconds"
PHASES = "trunkline_router_phase_seconds"

FIRST = Row(
    "First token, as clients see it",
    [
        Panel(
            "Time to first token",
            "From a request's arrival at a router to its first output. Dots are single requests: each opens its trace.",
            quantiles(FIRST_TOKEN, MODEL),
            "s",
        ),
        Panel(
            "Share that came in time",
            "First tokens within the time that is chosen above. Alerts judge the lanes interactive and standard.",
            [
                Query(
                    ratio(
                        rate(f"{FIRST_TOKEN}_bucket", MODEL, WITHIN, by="lane"),
                        rate(f"{FIRST_TOKEN}_count", MODEL, by="lane"),
                    ),
                    "{{lane}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Time to first token, all requests",
            "Two bands mean two kinds of requests, for example cached and uncached ones.",
            [Query(rate(f"{FIRST_TOKEN}_bucket", MODEL, by="le"), "{{le}}", exemplars=True)],
            "s",
            "heatmap",
        ),
        Panel(
            "Where it goes: mean per request",
            "The phases add up to the time to the first token. place: the search for a worker, waiting included.",
            [
                Query(
                    f"sum by (phase) (rate({PHASES}_sum{{{MODEL}}}[$__rate_interval])) / on () group_left () "
                    f"(sum (rate({FIRST_TOKEN}_count{{{MODEL}}}[$__rate_interval])) > 0)",
                    "{{phase}}",
                )
            ],
            "s",
            width=12,
            stacked=True,
        ),
        Panel(
            "Where it goes: p99 of each phase",
            "A phase that is long for few requests only.",
            [Query(quantile(0.99, PHASES, MODEL, by="phase"), "{{phase}}")],
            "s",
            width=12,
        ),
        Panel(
            "p99, by lane",
            "Lanes are served in the order interactive, standard, batch.",
            [Query(quantile(0.99, FIRST_TOKEN, MODEL, by="lane"), "{{lane}}", exemplars=True)],
            "s",
        ),
        Panel(
            "p99, by worker",
            "As the workers see it: from the submit to the first token.",
            [Query(quantile(0.99, "vllm:time_to_first_token_seconds", MODEL, by="worker"), "{{worker}}")],
            "s",
        ),
        Panel(
            "Predicted against real",
            "Quotients of real and predicted times to the first token. The router chooses by the predictions.",
            [
                Query(quantile(share, "trunkline_router_first_token_prediction_ratio", MODEL), name)
                for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))
            ],
        ),
    ],
)

REST = Row(
    "The rest of the answer",
    [
        Panel(
            "Time between tokens",
            "Of the workers' outputs.",
            quantiles("vllm:inter_token_latency_seconds", MODEL),
            "s",
        ),
        Panel(
            "Longest gap of an answer",
            "The longest time without a token, of answers with a gap over the workers' target.",
            quantiles("trunkline_router_token_gap_seconds", MODEL),
            "s",
        ),
        Panel(
            "Time per output token",
            "Means of answers, after their first token.",
            quantiles("gen_ai_server_time_per_output_token_seconds", GENAI_MODEL),
            "s",
        ),
        Panel(
            "Whole request",
            "From a request's arrival to its end.",
            quantiles("trunkline_router_request_seconds", MODEL),
            "s",
        ),
        Panel(
            "Clients that do not read",
            "Time in which output waited for its client, per second. It is not the fleet's latency.",
            [Query(rate("trunkline_router_stalled_seconds_total", MODEL), "waiting for clients")],
            "s",
        ),
        Panel(
            "Silence of failovers",
            "From the loss of a worker being noticed to the next output at another one.",
            quantiles("trunkline_router_failover_silence_seconds", MODEL),
            "s",
        ),
    ],
)

WORKERS = Row(
    "In the workers",
    [
        Panel(
            "Queue, prefill and decode: mean per choice",
            "Of choices that finished.",
            [
                Query(mean(f"vllm:request_{phase}_time_seconds", MODEL), phase)
                for phase in ("queue", "prefill", "decode")
            ],
            "s",
            stacked=True,
        ),
        Panel(
            "Queue: p99, by lane",
            "Time that choices waited for their first admission.",
            [Query(quantile(0.99, "trunkline_worker_lane_queue_seconds", MODEL, by="lane"), "{{lane}}")],
            "s",
        ),
        Panel(
            "Step: p99, by worker",
            "Time of a step on the device. No token of a running choice comes sooner.",
            [Query(quantile(0.99, "trunkline_worker_step_device_seconds", MODEL, by="worker"), "{{worker}}")],
            "s",
        ),
    ],
)

CONVENTIONS = Row(
    "By OpenTelemetry's conventions",
    [
        Panel(
            title,
            "A metric of the semantic conventions for generative AI, of the routers.",
            quantiles(f"gen_ai_server_{name}_seconds", GENAI_MODEL),
            "s",
        )
        for name, title in (
            ("request_duration", "gen_ai.server.request.duration"),
            ("time_to_first_token", "gen_ai.server.time_to_first_token"),
            ("time_per_output_token", "gen_ai.server.time_per_output_token"),
        )
    ],
)

LATENCY = Dashboard(
    "latency",
    "Latency and where it goes",
    "Why was the first token slow?",
    [FIRST, REST, WORKERS, CONVENTIONS],
    (MODELS, WITHIN_TIME),
)
