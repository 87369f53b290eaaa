"""Names of the contract's enum values in flags, files, logs and the Python client."""

from functools import cache

from trunkline.v1.generation_pb2 import FinishReason, Lane


@cache
def lane_name(lane: "Lane.ValueType") -> str:
    """A lane's name, such as "interactive"."""
    return Lane.Name(lane).removeprefix("LANE_").lower()


@cache
def finish_name(reason: "FinishReason.ValueType") -> str:
    """A finish reason's name, such as "stop"."""
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
