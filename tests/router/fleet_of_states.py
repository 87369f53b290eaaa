"""Workers as a router knows them, without any process behind them."""

from collections.abc import Sequence
from random import Random

from trunkline.block_hash import prompt_hashes, root_hash
from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample, StepCostModel
from trunkline_router.routing.prefix_index import PrefixIndex, WorkerBlocks, keys_of
from trunkline_router.routing.route import Route, route
from trunkline_router.routing.route_request import PolicyName, RouteRequest, RoutingPolicy
from trunkline_router.routing.worker_state import WorkerState

BLOCK_SIZE = 16
# A step of 4 ms and 25 µs for each of its tokens: 40,000 tokens of prompts a second at most.
COST = StepCostModel(fixed_s=0.004, token_s=25e-6, kv_token_s=2e-8, pair_s=1e-9)


class Fleet:
    """`size` equal workers named w0, w1, …; a policy and a seed."""

    def __init__(
        self, size: int, *, policy: PolicyName = PolicyName.PREDICTED_TTFT, seed: int = 0, **model: object
    ) -> None:
        self.index = PrefixIndex()
        self.policy = RoutingPolicy(policy)
        self.rng = Random(seed)
        facts = {
            "fingerprint": "weights",
            "block_size": BLOCK_SIZE,
            "max_step_tokens": 2048,
            "max_running_requests": 64,
            **model,
        }
        self.workers = [
            WorkerState(GetModelResponse(worker_id=f"w{n}", **facts), WorkerBlocks(self.index))  # type: ignore[arg-type]
            for n in range(size)
        ]
        for worker in self.workers:
            report(worker)

    def route(self, prompt: Sequence[int], **fields: object) -> Route[WorkerState]:
        return route(self.index, self.workers, RouteRequest(prompt, **fields), self.policy, self.rng)  # type: ignore[arg-type]

    def chosen(self, prompt: Sequence[int], times: int = 40, **fields: object) -> set[str]:
        """Returns the workers chosen over many decisions; sends nothing."""
        return {self.route(prompt, **fields).worker.worker_id for _ in range(times)}


def report(worker: WorkerState, now_s: float = 0.0, **sample: object) -> None:
    """A load sample, of a worker whose pool is free but for what is said."""
    values: dict[str, object] = {"step_cost": COST, "kv_free_blocks": 10_000, **sample}
    worker.take_load(LoadSample(**values), now_s)  # type: ignore[arg-type]


def cache(worker: WorkerState, prompt: Sequence[int]) -> None:
    """The worker reports that it holds this."""
    worker.blocks.store(keys(prompt))


def keys(prompt: Sequence[int]) -> list[int]:
    """The index's keys of a prompt's full blocks."""
    return keys_of(b"".join(prompt_hashes(root_hash("weights"), prompt, BLOCK_SIZE)))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Returns tokens that no other prompt has."""
    draw = Random(seed)
    return [draw.randrange(50_000) for _ in range(length)]
