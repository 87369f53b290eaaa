"""Whether what a worker says of itself can be worked with."""

from trunkline.grant import key_id
from trunkline.protocol import MIN_ROUTER_PROTOCOL_WITH_KEY, PROTOCOL_VERSION
from trunkline.v1.worker_pb2 import GetModelResponse


class WorkerUnusable(Exception):
    """What the worker says of itself makes no sense: perhaps it is of another version. One line for a person."""


def check_model(model: GetModelResponse, grant_key: bytes = b"") -> None:
    """Raises WorkerUnusable where requests could not be routed by it."""
    if model.min_router_protocol > PROTOCOL_VERSION:
        raise WorkerUnusable(
            f"the worker asks for routers that speak protocol {model.min_router_protocol}, and this one speaks "
            f"{PROTOCOL_VERSION}: upgrade routers before workers"
        )
    asks_for_proofs = model.min_router_protocol >= MIN_ROUTER_PROTOCOL_WITH_KEY
    if asks_for_proofs and model.grant_key_id and model.grant_key_id != key_id(grant_key):
        lacks = "has another one" if grant_key else "has none"
        raise WorkerUnusable(f"the worker has a grant key, and this router {lacks}: start both with one --grant-key")
    if not model.model:
        raise WorkerUnusable("the worker does not say which model it serves")
    for name in ("block_size", "vocab_size", "context_length", "kv_token_capacity"):
        if getattr(model, name) < 1:
            raise WorkerUnusable(f"the worker's {name} is {getattr(model, name)}; allowed: 1 or more")
