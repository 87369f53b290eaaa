"""What an effort of reasoning means for a model. Pure.

Chat templates get it as variables: a level, and whether the model thinks. Where a template knows no levels, an effort
limits the tokens of reasoning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.status import invalid

FIELD = "chat.reasoning_effort"
LEVEL = "reasoning_effort"  # variable of templates
THINKING = ("enable_thinking", "thinking")  # variables: whether the model thinks
NO_EFFORT = "none"  # the model does not think
EFFORTS = (NO_EFFORT, "minimal", "low", "medium", "high", "xhigh", "max")
# Higher efforts have no limit: OpenAI's and Anthropic's models think as long as they want with them, too.
DEFAULT_LIMITS = ("minimal=512", "low=2048", "medium=8192")
MAX_LIMIT = 1 << 20


def effort_limits(entries: Sequence[str]) -> Mapping[str, int]:
    """Returns the limits of --reasoning-efforts by effort. Raises ValueError, in one line."""
    limits = {NO_EFFORT: 0}
    for entry in entries:
        effort, _, tokens = entry.partition("=")
        if effort not in EFFORTS or effort in limits or not tokens.isdecimal() or not 0 < int(tokens) <= MAX_LIMIT:
            allowed = f"allowed: EFFORT=TOKENS, each of {', '.join(EFFORTS[1:])} once, with 1 to {MAX_LIMIT} tokens"
            raise ValueError(f"--reasoning-efforts: {entry!r} is no limit; {allowed}")
        limits[effort] = int(tokens)
    return limits


def effort_variables(effort: str) -> dict[str, Any]:
    """Returns the variables that an effort sets, as in vLLM; none if it is empty. Templates know the one or the other
    name for whether the model thinks."""
    return {LEVEL: effort, **dict.fromkeys(THINKING, effort != NO_EFFORT)} if effort else {}


def effort_limit(effort: str, template: str, limits: Mapping[str, int]) -> int | None:
    """Returns the most tokens of reasoning; None: the template knows levels, or the effort has no limit. Raises
    RequestRefused (INVALID_REQUEST) if it is no effort.

    limits: by effort
    """
    if not effort or LEVEL in template:
        return None
    if effort not in EFFORTS:
        raise invalid(FIELD, f"must be one of {', '.join(EFFORTS)}")
    return limits.get(effort)


def knows_effort(template: str) -> bool:
    """Whether a chat template may have one of the variables."""
    return any(name in template for name in (LEVEL, *THINKING))
