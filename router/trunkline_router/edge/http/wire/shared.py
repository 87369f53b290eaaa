"""What the connections of a server share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from uvicorn.config import Config
from uvicorn.server import ServerState

from trunkline_router.edge.http.wire.connections import Connections
from trunkline_router.edge.http.wire.limits import HttpLimits
from trunkline_router.record.refused_calls import RefusedCalls


@dataclass(slots=True)
class Shared:
    """now_s: a clock in seconds;  state: what uvicorn keeps of a server, such as the tasks of its requests;  refused:
    is told of what connections refuse"""

    config: Config
    limits: HttpLimits
    connections: Connections
    now_s: Callable[[], float]
    refused: RefusedCalls
    state: ServerState = field(default_factory=ServerState)
