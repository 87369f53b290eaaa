"""A closed loop: each user sends the next request when the last one has ended."""

import random
import statistics
import time

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.engine_run import running
from trunkline_bench.gpu.shapes import Shapes

STAGGER_S = 10.0
ITL_TARGET_MS = 18.0  # 50 tokens/s per user, with a margin


def measure(shapes: Shapes) -> Rows:
    """A row with times to first token, and tokens per second per request."""
    draw = random.Random(0)
    users, window_s = shapes.users, shapes.closed_loop_s
    stagger_s = 0.0 if shapes.tiny else STAGGER_S

    def length(mean: int) -> int:
        return draw.randint(mean // 2, mean + mean // 2)

    with running(shapes, itl_target_ms=0.0 if shapes.tiny else ITL_TARGET_MS, max_running_requests=users) as run:
        sent = 0

        def send(at_s: float | None = None) -> None:
            nonlocal sent
            prompt = run.prompt(sent, length(shapes.user_prompt_tokens))
            run.submit(sent, prompt, length(shapes.user_output_tokens), at_s=at_s)
            sent += 1

        def ended(handle: int) -> None:
            if time.perf_counter() < stop_s:
                send()

        run.on_end = ended
        started_s = time.perf_counter()
        stop_s = started_s + window_s
        for user in range(users):
            at_s = started_s + stagger_s * user / users
            run.run(until_s=at_s)
            time.sleep(max(0.0, at_s - time.perf_counter()))
            send(at_s)  # the wait for the step under way counts as latency
        run.run()
        ended_s = time.perf_counter()
        done = [stream for stream in run.streams.values() if len(stream.tokens) > 1]
        ttft_ms = sorted(stream.ttft_s * 1e3 for stream in done)
        rates = sorted(stream.tokens_per_s for stream in done)
    yield {
        "what": f"{users} users, {shapes.user_prompt_tokens} in, {shapes.user_output_tokens} out on average",
        "requests": len(done), "ttft_p50_ms": statistics.median(ttft_ms), "ttft_p99_ms": _share(ttft_ms, 0.99),
        "tok_per_s_p1": _share(rates, 0.01), "tok_per_s_p50": statistics.median(rates),
        "output_tok_per_s": sum(len(stream.tokens) for stream in done) / (ended_s - started_s),
    }  # fmt: skip


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
