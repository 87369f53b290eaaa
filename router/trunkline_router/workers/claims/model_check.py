"""Checks whether a router can use a worker with the model description that it sent."""

from trunkline.grant import GrantKeys
from trunkline.protocol import OLDEST_PROTOCOL, PROTOCOL_VERSION
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.workers.claims.worker_claims import model_problem

NO_KEYS = GrantKeys()


class WorkerUnusable(Exception):
    """The worker cannot be used, perhaps because it has another version. The message is one line for people."""


class FalseClaim(WorkerUnusable):
    """A message of the worker cannot be true. The router waits longer before it reconnects than after a disconnect."""


def check_model(model: GetModelResponse, keys: GrantKeys = NO_KEYS) -> None:
    """Raises WorkerUnusable if this router cannot send requests to a worker with this description."""
    if model.min_router_protocol > PROTOCOL_VERSION:
        raise WorkerUnusable(
            f"the worker asks for routers that speak protocol {model.min_router_protocol}, and this one speaks "
            f"{PROTOCOL_VERSION}: upgrade routers before workers"
        )
    if model.protocol_version < OLDEST_PROTOCOL:
        raise WorkerUnusable(
            f"the worker speaks protocol {model.protocol_version}, and this router needs {OLDEST_PROTOCOL} or a later "
            "one: upgrade the worker"
        )
    if model.grant_key_ids and not keys.of_worker(model):
        lacks = "has another one" if keys else "has none"
        raise WorkerUnusable(f"the worker has a grant key, and this router {lacks}: start both with one --grant-key")
    if problem := model_problem(model):
        raise WorkerUnusable(problem)
