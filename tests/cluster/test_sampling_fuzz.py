"""Random sampling parameters at and beyond their edges, against a cluster: each request is answered or refused, and the
engines that were there at the beginning are there at the end."""

import math
import random
from collections import Counter
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from tests.cluster.processes import Cluster, running_cluster, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.sampling_params import NUMBERS, TABLE
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenIds

TINY = float(np.finfo(np.float32).smallest_subnormal)
LARGEST = float(np.finfo(np.float32).max)
EVERY_FLOAT = [0.0, -0.0, TINY, -TINY, 1e-36, 2e-38, 1e-5, 1e-4, 0.01, 0.5, 1.0, 1.0000001, 2.0, 10.0, 100.0, 100.1,
               LARGEST, -1.0, -2.0, -100.0, math.nan, math.inf, -math.inf]  # fmt: skip
EVERY_COUNT = [0, 1, 2, 20, 21, 128, 1 << 20, 2**31 - 1, 2**32 - 1]
MORE = {"temperature": [1e-5, 1e-4], "top_p": [1e-30, 1.0], "min_p": [TINY]}
SENSIBLE: dict[str, list[float]] = {
    name: [row.example, row.most, TINY if row.least_is_excluded else row.least, *MORE.get(name, ())]
    for name, row in TABLE.items()
    if row.least is not None and row.most is not None
}
STOPS = ["a", ".", "\n", "\ufffd", "😀", "\u0301", "x" * 1024, "Once upon", "</s>", "\x00"]
# One in so many parameters is anything at all: most requests are valid, and reach the engine.
WILD_ONE_IN = 40
VOCAB = 2048  # of the demo model


def wild_params(pick: random.Random) -> SamplingParams:
    def number(name: str) -> float:
        if name not in SENSIBLE:
            return pick.choice(EVERY_COUNT)
        return pick.choice(EVERY_FLOAT if pick.randrange(WILD_ONE_IN) == 0 else SENSIBLE[name])

    params = SamplingParams(max_tokens=pick.choice([1, 2, 12]), seed=pick.getrandbits(64))
    for name in NUMBERS:
        if pick.random() < 0.6:
            setattr(params, name, number(name))
    if pick.random() < 0.2:
        params.min_tokens = pick.choice([1, params.max_tokens])
    for name in ("logprobs", "prompt_logprobs"):
        if pick.random() < 0.2:
            setattr(params, name, pick.choice([0, 1, 20, *([21] if pick.randrange(WILD_ONE_IN) == 0 else [])]))
    for _ in range(pick.choice([0, 0, 1, 30, 1024])):
        params.logit_bias[pick.randrange(VOCAB)] = pick.choice([-100.0, 100.0, TINY, 0.0, 5.0])
    params.stop.extend(pick.sample(STOPS, pick.choice([0, 0, 1, 5])))
    params.stop_token_ids.extend(pick.choices(range(VOCAB), k=pick.choice([0, 0, 1, 128])))
    params.ignore_eos, params.include_stop, params.keep_special_tokens = (pick.random() < 0.5 for _ in range(3))
    return params


def outcome(call: Iterator[GenerateResponse]) -> str:
    """What became of a request: "answered", or the status it was refused with."""
    try:
        last = None
        for response in call:
            last = response
        assert last is not None
        return "answered"
    except grpc.RpcError as error:
        return error.code().name


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--dtype=bfloat16",), ("--dtype=float32", "--deterministic")], ids=str)
def test_engines_survive_every_extreme_of_sampling(options: tuple[str, ...]) -> None:
    pick = random.Random(20)
    with running_cluster(DEMO_MODEL, "--kv-blocks=512", *options) as cluster:
        engines = [worker.engine_pid() for worker in cluster.workers]
        outcomes: Counter[str] = Counter()
        for _ in range(50):
            calls = [
                cluster.stub.Generate(
                    GenerateRequest(
                        token_ids=TokenIds(ids=[pick.randrange(VOCAB) for _ in range(pick.choice([1, 3, 40]))]),
                        sampling=wild_params(pick),
                    ),
                    timeout=60,
                )
                for _ in range(16)
            ]
            outcomes.update(map(outcome, calls))
        assert set(outcomes) == {"answered", "INVALID_ARGUMENT"}, outcomes
        assert outcomes["answered"] > outcomes["INVALID_ARGUMENT"]
        assert [worker.engine_pid() for worker in cluster.workers] == engines
        check_serving(cluster)


def check_serving(cluster: Cluster) -> None:
    cluster.wait_ready(len(cluster.workers))
    assert all(worker.health("readiness") == 1 for worker in cluster.workers)
    for worker in cluster.workers:
        wait_until(lambda worker=worker: worker.load().kv_live_blocks == 0, "no live blocks")  # type: ignore[misc]
