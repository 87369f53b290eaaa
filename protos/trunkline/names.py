"""Names of the contract's enum values in flags, files, logs and the Python client."""

from trunkline.v1.generation_pb2 import FinishReason, Lane


def lane_name(lane: "Lane.ValueType") -> str:
    """A lane's name, such as "interactive". Raises ValueError if there is no such lane."""
    return _LANES.get(lane) or Lane.Name(lane)


def finish_name(reason: "FinishReason.ValueType") -> str:
    """A finish reason's name, such as "stop". Raises ValueError if there is no such reason."""
    return _FINISH_REASONS.get(reason) or FinishReason.Name(reason)


_LANES = {lane: name.removeprefix("LANE_").lower() for name, lane in Lane.items()}
_FINISH_REASONS = {reason: name.removeprefix("FINISH_REASON_").lower() for name, reason in FinishReason.items()}
