"""What people call the contract's enum values: in flags, files, logs and the Python client."""

from trunkline.v1.generation_pb2 import FinishReason, Lane


def lane_name(lane: "Lane.ValueType") -> str:
    """Such as "interactive"."""
    return Lane.Name(lane).removeprefix("LANE_").lower()


def finish_name(reason: "FinishReason.ValueType") -> str:
    """Such as "stop"."""
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
