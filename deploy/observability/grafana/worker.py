"""One worker, or several beside each other."""

from deploy.observability.grafana.dashboard import MODELS, WORKERS, Dashboard, Panel, Query, Row, quantiles
from deploy.observability.grafana.promql import MODEL, WORKER, mean, quantile, rate, ratio, share_by_state

BOTH = (MODEL, WORKER)
CHOSEN = f"{MODEL}, {WORKER}"


def gauge(metric: str, by: str = "worker") -> str:
    return f"sum by ({by}) ({metric}{{{CHOSEN}}})"


LOAD = Row(
    "Load",
    [
        Panel(
            "Choices",
            "A choice is one of the n outputs of a request.",
            [
                Query(gauge("vllm:num_requests_running"), "{{worker}} running"),
                Query(gauge("vllm:num_requests_waiting"), "{{worker}} waiting"),
            ],
        ),
        Panel(
            "KV blocks",
            "live: of running choices; cached: only reusable prefixes, given up first; free: empty.",
            [Query(gauge("trunkline_worker_kv_blocks", "state"), "{{state}}")],
            stacked=True,
        ),
        Panel(
            "Waiting, by lane",
            "A lower lane waits while a higher one has choices that fit.",
            [Query(gauge("trunkline_worker_lane_waiting", "worker, lane"), "{{worker}} {{lane}}")],
            stacked=True,
        ),
        Panel(
            "Tokens that wait",
            "Of waiting choices, and those of all choices that are still to be computed.",
            [
                Query(gauge("trunkline_worker_waiting_tokens"), "{{worker}} waiting"),
                Query(gauge("trunkline_worker_uncached_tokens"), "{{worker}} to compute"),
            ],
        ),
        Panel(
            "Refused / s",
            "Submits that a full queue refused. The router tries another worker.",
            [Query(rate("trunkline_worker_lane_refused_total", *BOTH, by="worker, lane"), "{{worker}} {{lane}}")],
            "reqps",
        ),
        Panel(
            "Choices that ended / s",
            "By outcome: a finish reason, cancelled, or a reason of the error table.",
            [Query(rate("trunkline_worker_choices_total", *BOTH, by="outcome"), "{{outcome}}")],
            "reqps",
            stacked=True,
        ),
    ],
)

STEPS = Row(
    "Steps",
    [
        Panel(
            "Composition of batches",
            "Positions computed per second. Padding is computed for nothing.",
            [Query(rate("trunkline_worker_batch_tokens_total", *BOTH, by="kind"), "{{kind}}")],
            stacked=True,
        ),
        Panel(
            "Share of padding",
            "Of all positions.",
            [
                Query(
                    ratio(
                        rate("trunkline_worker_batch_tokens_total", *BOTH, 'kind="padding"', by="worker"),
                        rate("trunkline_worker_batch_tokens_total", *BOTH, by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Tokens of a step",
            "Prefill and decode.",
            quantiles("vllm:iteration_tokens_total", *BOTH),
        ),
        Panel(
            "Time of a step on the device",
            "No token of a running choice comes sooner.",
            quantiles("trunkline_worker_step_device_seconds", *BOTH),
            "s",
        ),
        Panel(
            "Share of the roofline",
            "The least time that the steps' bytes and operations take at the device's peak rates, over the time that "
            "they took. Where the rates are known: --peak-tflops and --peak-gb-per-s set them.",
            [
                Query(
                    ratio(
                        rate("trunkline_worker_step_least_seconds_total", *BOTH, by="worker"),
                        rate("trunkline_worker_step_device_seconds_sum", *BOTH, by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Host time that no device time overlaps",
            "The device idles meanwhile.",
            quantiles("trunkline_worker_step_host_seconds", *BOTH),
            "s",
        ),
        Panel(
            "Share of time in steps",
            "On the device, and on the host while the device idles. The rest of the time there was no work.",
            [
                Query(rate("trunkline_worker_step_device_seconds_sum", *BOTH, by="worker"), "{{worker}} device"),
                Query(rate("trunkline_worker_step_host_seconds_sum", *BOTH, by="worker"), "{{worker}} host"),
            ],
            "percentunit",
        ),
        Panel(
            "Busiest expert",
            "Its tokens over the mean of its layer's experts, in the layer where that is the most. Of models with a "
            "mixture of experts.",
            [Query(f"max by (worker) ({gauge('trunkline_worker_expert_imbalance')})", "{{worker}}")],
        ),
        Panel(
            "Grammars / s",
            "Compiled or refused, by outcome. Lost: processes that compile or match, and broke off or took too long.",
            [
                Query(rate("trunkline_worker_grammar_compile_seconds_count", *BOTH, by="outcome"), "{{outcome}}"),
                Query(rate("trunkline_worker_lost_grammar_processes_total", *BOTH, by="worker"), "{{worker}} lost"),
            ],
        ),
    ],
)

OUTPUT = Row(
    "Output",
    [
        Panel(
            "Output tokens / s",
            "Mean of the last minute.",
            [Query(gauge("trunkline_worker_output_tokens_per_second"), "{{worker}}")],
        ),
        Panel(
            "Time to first token, p99",
            "From the submit to the first token.",
            [Query(quantile(0.99, "vllm:time_to_first_token_seconds", *BOTH, by="worker"), "{{worker}}")],
            "s",
        ),
        Panel(
            "Time between tokens, p99",
            "Of all choices.",
            [Query(quantile(0.99, "vllm:inter_token_latency_seconds", *BOTH, by="worker"), "{{worker}}")],
            "s",
        ),
        Panel(
            "Time to first token, p99, by lane",
            "Lanes are served in the order interactive, standard, batch.",
            [Query(quantile(0.99, "trunkline_worker_lane_first_token_seconds", *BOTH, by="lane"), "{{lane}}")],
            "s",
        ),
        Panel(
            "Time per output token",
            "Means of choices, after their first token.",
            quantiles("vllm:request_time_per_output_token_seconds", *BOTH),
            "s",
        ),
        Panel(
            "Queue, prefill and decode: mean per choice",
            "Of choices that finished.",
            [
                Query(mean(f"vllm:request_{phase}_time_seconds", *BOTH), phase)
                for phase in ("queue", "prefill", "decode")
            ],
            "s",
            stacked=True,
        ),
    ],
)

CACHE = Row(
    "Cache",
    [
        Panel(
            "Hit rate",
            "Share of prompt tokens that were found in the cache.",
            [
                Query(
                    ratio(
                        rate("vllm:prefix_cache_hits_total", *BOTH, by="worker"),
                        rate("vllm:prefix_cache_queries_total", *BOTH, by="worker"),
                    ),
                    "{{worker}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Prompt tokens / s",
            "Computed, or found in the cache.",
            [Query(rate("vllm:prompt_tokens_by_source_total", *BOTH, by="source"), "{{source}}")],
            stacked=True,
        ),
        Panel(
            "Preemptions / s, and tokens that were computed again",
            "A preempted choice gives up its blocks and is recomputed later.",
            [
                Query(rate("vllm:num_preemptions_total", *BOTH, by="worker"), "{{worker}} preemptions"),
                Query(rate("trunkline_worker_recomputed_tokens_total", *BOTH, by="worker"), "{{worker}} tokens"),
            ],
        ),
    ],
)

ROUTERS = Row(
    "As the routers see it",
    [
        Panel(
            "Attempts / s, by outcome",
            "complete, cancelled, or a reason of the error table.",
            [
                Query(
                    rate("trunkline_router_worker_attempts_total", WORKER, by="worker, outcome"),
                    "{{worker}} {{outcome}}",
                )
            ],
            "reqps",
            stacked=True,
        ),
        Panel(
            "State",
            "Share of the routers' processes that see the worker in a state.",
            [Query(share_by_state(WORKER), "{{worker}} {{state}}")],
            "percentunit",
            most=1,
        ),
        Panel(
            "Clock skew",
            "The worker's clock minus the router's.",
            [Query(f"max by (worker) (trunkline_router_worker_clock_skew_seconds{{{WORKER}}})", "{{worker}}")],
            "s",
        ),
        Panel(
            "Outboxes",
            "Messages that wait in routers for the session to the worker.",
            [Query(f"sum by (worker) (trunkline_router_worker_unsent_messages{{{WORKER}}})", "{{worker}}")],
        ),
        Panel(
            "Output that waits in the worker",
            "For routers and direct clients.",
            [Query(f"sum by (worker) (trunkline_worker_outbox_bytes{{{WORKER}}})", "{{worker}}")],
            "bytes",
        ),
        Panel(
            "Event-loop lag of the front",
            "The longest time in the last minute that a due callback waited.",
            [Query(f"max by (worker) (trunkline_worker_event_loop_lag_seconds{{{WORKER}}})", "{{worker}}")],
            "s",
        ),
    ],
)

DEVICE = Row(
    "GPUs, where there are any",
    [
        Panel(
            title,
            description,
            [Query(f"max by (worker, gpu) (trunkline_gpu_{name}{{{WORKER}}})", "{{worker}} GPU {{gpu}}")],
            unit,
        )
        for name, title, description, unit in (
            ("busy_ratio", "Kernels", "Share of time in which a kernel ran.", "percentunit"),
            (
                "memory_busy_ratio",
                "Memory bandwidth",
                "Share of time in which memory was read or written.",
                "percentunit",
            ),
            ("memory_used_bytes", "Memory", "In use, of all processes.", "bytes"),
            ("power_watts", "Power", "Drawn by the board.", "watt"),
            ("temperature_celsius", "Temperature", "Devices slow down when they are too hot.", "celsius"),
        )
    ],
)

WORKER_DASHBOARD = Dashboard(
    "worker",
    "Worker",
    "What is this worker doing, and is it well?",
    [LOAD, STEPS, OUTPUT, CACHE, ROUTERS, DEVICE],
    (MODELS, WORKERS),
)
