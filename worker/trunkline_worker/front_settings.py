"""Settings of a worker: the front's own, and the engine's."""

from dataclasses import dataclass
from pathlib import Path

from trunkline_runtime.settings import setting
from trunkline_worker.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker. EngineSettings are those of how it computes."""

    engine: EngineSettings
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(50061, help="gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    served_model_name: str = setting("", help="name that requests use; default: the model directory's base name")
    worker_id: str = setting("", help="this worker's name in logs, traces and responses; default: host:port")
    stats_interval_s: float = setting(
        30.0, help="time between two lines of statistics in the log, while there is work; 0: no lines", minimum=0.0
    )
    grant_key: str = setting(
        "",
        help="secret with which all routers sign grants, 32 bytes or more; direct clients need a grant then. Without "
        "it, any client that reaches the worker may use it. Better set as TRUNKLINE_GRANT_KEY: other users can see "
        "arguments",
    )
    drain_timeout_s: float = setting(30.0, help="time for running requests to finish at SIGTERM or Drain", minimum=0.0)

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.engine.model).resolve().name
