"""The fleet at a glance: is it well, and what is it short of?"""

from deploy.observability.grafana.dashboard import FIRST_TOKEN_S, Dashboard, Panel, Query, Row, stat
from deploy.observability.grafana.promql import MODEL, of_processes, quantile, rate, ratio, workers_by_state

FAILED = 'outcome=~"NO_WORKER|INTERNAL"'
REQUESTS = "trunkline_router_requests_total"
OUTPUT = "vllm:generation_tokens_total"

NOW = Row(
    "Now",
    [
        stat("Requests / s", "Requests that ended, for any reason.", rate(REQUESTS, MODEL), "reqps"),
        stat("Output tokens / s", "Tokens that workers have sampled.", rate(OUTPUT, MODEL), "short"),
        stat(
            "Time to first token, p99",
            "From a request's arrival at a router to its first output.",
            quantile(0.99, "trunkline_router_first_token_seconds", MODEL),
            "s",
            (FIRST_TOKEN_S, 4 * FIRST_TOKEN_S),
        ),
        stat(
            "Requests that failed",
            "Share of requests that ended with NO_WORKER or INTERNAL.",
            ratio(f"({rate(REQUESTS, MODEL, FAILED)} or vector(0))", rate(REQUESTS, MODEL)),
            "percentunit",
            (0.001, 0.01),
        ),
        stat(
            "Workers that accept requests",
            "As the router that knows most of them counts them.",
            f"sum (max by (model_name) (trunkline_router_pool_workers{{{MODEL}}}))",
            "none",
        ),
        stat(
            "Not scraped",
            "Routers and workers that do not answer Prometheus.",
            'count (up{job=~"trunkline-.+"} == 0) or vector(0)',
            "none",
            (1, 2),
        ),
    ],
)

SHORT_OF_WHAT = Row(
    "Short of what: compute, KV or balance?",
    [
        Panel(
            "Compute: share of time in steps",
            "Time on the device per second. At 1 a worker computes without a pause: more requests only wait longer.",
            [Query(rate("trunkline_worker_step_device_seconds_sum", MODEL, by="worker"), "{{worker}}")],
            "percentunit",
        ),
        Panel(
            "KV: share of blocks in use",
            "Blocks of running choices. Near 1, choices wait or are preempted, and no cached prefix is left.",
            [Query(f"max by (worker) (vllm:kv_cache_usage_perc{{{MODEL}}})", "{{worker}}")],
            "percentunit",
            most=1,
        ),
        Panel(
            "Balance: tokens to compute",
            "Prompt tokens that each worker still has to compute. A worker far above the others is one that the "
            "router's predictions are wrong for.",
            [Query(f"max by (worker) (trunkline_worker_uncached_tokens{{{MODEL}}})", "{{worker}}")],
        ),
        Panel(
            "Choices that wait, by worker",
            "Choices in the workers' queues.",
            [Query(f"sum by (worker) (vllm:num_requests_waiting{{{MODEL}}})", "{{worker}}")],
        ),
        Panel(
            "Choices that run, by worker",
            "Choices in the workers' running sets.",
            [Query(f"sum by (worker) (vllm:num_requests_running{{{MODEL}}})", "{{worker}}")],
        ),
        Panel(
            "Preemptions / s, by worker",
            "Running choices that gave up their blocks. Their tokens are computed again.",
            [Query(rate("vllm:num_preemptions_total", MODEL, by="worker"), "{{worker}}")],
        ),
    ],
)

TRAFFIC = Row(
    "Traffic",
    [
        Panel(
            "Requests / s, by outcome",
            "Finish reasons in lower case; reasons of the error table in capitals.",
            [Query(rate(REQUESTS, MODEL, by="outcome"), "{{outcome}}")],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Tokens / s",
            "Of prompts, computed or found in a cache, and of output.",
            [Query(rate("trunkline_router_tokens_total", MODEL, by="kind"), "{{kind}}")],
            stacked=True,
        ),
        Panel(
            "Tool calls / s",
            "In answers that routers parsed. A call that was cut off, for example by max_tokens, is of no use.",
            [Query(rate("trunkline_router_tool_calls_total", MODEL, by="kind"), "{{kind}}")],
            stacked=True,
        ),
        Panel(
            "Composition of batches",
            "Positions computed per second. Padding is computed for nothing.",
            [Query(rate("trunkline_worker_batch_tokens_total", MODEL, by="kind"), "{{kind}}")],
            stacked=True,
        ),
        Panel(
            "Requests in routers",
            "Requests that run, and those of them that wait for a worker.",
            [
                Query("sum (trunkline_router_running_requests)", "running"),
                Query("sum (trunkline_router_waiting_requests)", "waiting for a worker"),
                Query("sum (trunkline_router_open_requests)", "open calls"),
            ],
        ),
        Panel(
            "Workers, by state",
            "As the routers see them. A worker that routers see in different states counts in each of these.",
            [Query(workers_by_state(), "{{state}}")],
            stacked=True,
        ),
        Panel(
            "Calls refused before they were requests / s",
            "For their credentials, size or path, or the number of open calls.",
            [Query(rate("trunkline_router_calls_refused_total", by="protocol, reason"), "{{protocol}} {{reason}}")],
            "reqps",
            stacked=True,
        ),
    ],
)

FAILURES = Row(
    "Failures",
    [
        Panel(
            "Failovers and retries / s",
            "Attempts that continued a begun answer elsewhere, and attempts that began again.",
            [
                Query(rate("trunkline_router_failovers_total", MODEL, by="reason"), "continued, {{reason}}"),
                Query(rate("trunkline_router_retries_total", MODEL, by="reason"), "begun again, {{reason}}"),
            ],
            "reqps",
            stacked=True,
        ),
        Panel(
            "Silence of failovers",
            "From the loss of a worker being noticed to the next output at another one.",
            [
                Query(quantile(share, "trunkline_router_failover_silence_seconds", MODEL), name, exemplars=True)
                for name, share in (("p50", 0.5), ("p99", 0.99))
            ],
            "s",
        ),
        Panel(
            "Workers lost, hung or cut off / h",
            "How often a router lost them, found them hung, or opened their breakers: the mean of its processes.",
            [
                Query(
                    f"topk (10, {of_processes(f'trunkline_router_worker_{name}_total')})",
                    f"{{{{worker}}}} {said}",
                )
                for name, said in (("losses", "lost"), ("hangs", "hung"), ("breaker_openings", "cut off"))
            ],
        ),
        Panel(
            "Quarantined requests",
            "Requests that killed two engines and are refused.",
            [
                Query("max (trunkline_router_quarantined)", "in force"),
                Query("sum (increase(trunkline_router_quarantines_total[1h]))", "in the last hour"),
            ],
        ),
        Panel(
            "Spans of traces / s",
            "Failed and dropped ones are lost for the tracing system. Requests do not notice.",
            [
                Query(rate("trunkline_router_spans_total", by="outcome"), "routers, {{outcome}}"),
                Query(rate("trunkline_worker_spans_total", by="outcome"), "workers, {{outcome}}"),
            ],
        ),
        Panel(
            "Certificates: time left",
            "The certificate that expires first, of each process.",
            [Query("min by (job, instance, file) (trunkline_certificate_expires_in_seconds)", "{{instance}} {{file}}")],
            "s",
        ),
    ],
)

ROUTERS = Row(
    "Routers",
    [
        Panel(
            "Event-loop lag",
            "The longest time in the last minute that a due callback waited. The process's streams waited, too.",
            [
                Query("max by (instance) (trunkline_router_event_loop_lag_seconds)", "{{instance}}"),
                Query("max by (instance) (trunkline_worker_event_loop_lag_seconds)", "{{instance}}"),
            ],
            "s",
        ),
        Panel(
            "Redis: time of a call, p99",
            "A request's path waits for Redis for a few milliseconds at most, and then goes on without it.",
            [Query(quantile(0.99, "trunkline_router_redis_call_seconds", by="script"), "{{script}}")],
            "s",
        ),
        Panel(
            "Redis: reachable, and answers that came too late",
            "Without Redis each router counts quotas by itself.",
            [
                Query("min (trunkline_router_redis_reachable)", "reachable"),
                Query(rate("trunkline_router_redis_late_answers_total"), "late answers / s"),
            ],
        ),
        Panel(
            "Memory and output that clients have not read",
            "Memory of the processes; output that waits for slow clients; large requests.",
            [
                Query('sum by (instance) (process_resident_memory_bytes{job="trunkline-router"})', "{{instance}}"),
                Query("sum (trunkline_router_unread_bytes)", "not read by clients"),
                Query("sum (trunkline_router_large_request_bytes)", "large requests"),
            ],
            "bytes",
        ),
        Panel(
            "CPU",
            "Cores that routers and fronts of workers use.",
            [
                Query(
                    'sum by (instance) (rate(process_cpu_seconds_total{job=~"trunkline-.+"}[$__rate_interval]))',
                    "{{instance}}",
                )
            ],
        ),
        Panel(
            "Processes and other routers",
            "Processes of all routers, their restarts in the last hour, and other processes that Redis knows.",
            [
                Query("sum (trunkline_router_processes)", "processes"),
                Query("sum (increase(trunkline_router_process_restarts_total[1h]))", "restarts"),
                Query("max (trunkline_router_neighbours)", "other processes"),
            ],
        ),
    ],
)

FLEET = Dashboard(
    "fleet", "Fleet", "Is the fleet well, and what is it short of?", [NOW, SHORT_OF_WHAT, TRAFFIC, FAILURES, ROUTERS]
)
