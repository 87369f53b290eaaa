"""The highest load that a fleet could carry at best; loads in percent are relative to it."""

from dataclasses import replace

from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.traces.workload import at_once
from trunkline_bench.simulation.worker.replay import replay
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec

ROOMY_POOL_TOKENS = 1 << 26
SAMPLE_REQUESTS = 1_500


def requests_per_s(spec: WorkerSpec, requests: list[TraceRequest]) -> float:
    """Capacity of one worker that never waits for requests and never evicts a prefix. Its pool is unlimited, but it
    runs at most as many requests at once as the real pool holds at mean length.

    requests: in order of arrival, in whole conversations; the first ones are used as a sample
    """
    sample = [request for request in requests if spec.can_hold(request)][:SAMPLE_REQUESTS]
    mean_tokens = sum(request.prompt_tokens + request.output_tokens for request in sample) / len(sample)
    at_most = max(1, int(spec.num_blocks * spec.block_size / mean_tokens))
    limits = replace(
        spec.limits,
        max_running_requests=min(spec.limits.max_running_requests, at_most),
        max_waiting_requests=len(sample),
    )
    roomy = replace(spec, num_blocks=ROOMY_POOL_TOKENS // spec.block_size, limits=limits)
    return len(sample) / replay(at_once(sample), roomy).duration_s
