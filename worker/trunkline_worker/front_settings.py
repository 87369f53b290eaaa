"""Settings of a worker: the front's own, and the engine's."""

from dataclasses import dataclass, field
from pathlib import Path

from trunkline.answer.answer_parser import PARSERS
from trunkline.grant import grant_key_problem
from trunkline_runtime.settings import setting
from trunkline_runtime.tls_settings import ServerTlsSettings, is_loopback, needs_problem
from trunkline_worker.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker. EngineSettings are those of how it computes."""

    engine: EngineSettings
    host: str = setting("127.0.0.1", metavar="HOST", help="address to listen on")
    port: int = setting(50061, help="gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    served_model_name: str = setting(
        "", metavar="NAME", help="name that requests use; default: the base name of the model's directory or file"
    )
    chat_template: str = setting(
        "",
        metavar="FILE",
        help="file with a Jinja chat template, used instead of the model's own; the same at all workers of a model",
    )
    answer_format: str = setting(
        "auto",
        help="format in which the model writes reasoning and tool calls; auto: that of its chat template; none: its "
        "answers are text",
        choices=("auto", "none", *PARSERS),
    )
    worker_id: str = setting(
        "",
        metavar="NAME",
        help="this worker's name in logs, traces and responses; default: host:port, with the machine's name as host if "
        "it listens on all addresses",
    )
    stats_interval_s: float = setting(
        30.0, help="time between two lines of statistics in the log, while there is work; 0: no lines", minimum=0.0
    )
    grant_key: str = setting(
        "",
        metavar="SECRET",
        help="secret with which all routers sign grants, 32 bytes or more; direct clients need a grant then. Without "
        "it and --tls-router-names, any client that reaches the worker may use it. Better set as TRUNKLINE_GRANT_KEY: "
        "other users can see arguments",
    )
    grant_key_previous: str = setting(
        "",
        metavar="SECRET",
        help="another key that is accepted, while the grant key is being changed; better set as "
        "TRUNKLINE_GRANT_KEY_PREVIOUS",
    )
    tls: ServerTlsSettings = field(default_factory=ServerTlsSettings)
    tls_router_names: tuple[str, ...] = setting(
        (),
        metavar="NAME,...",
        help="names of routers and operators in their certificates, separated by commas: only they may open sessions, "
        "watch the cache, read statistics and drain the worker, and without a grant key only they may send requests",
    )
    allow_anonymous: bool = setting(
        False,
        help="listen on addresses other than loopback without --grant-key and --tls-router-names: any client that "
        "reaches the worker may then use and drain it",
    )
    metrics_port: int = setting(
        -1,
        help="port with metrics for Prometheus, at /metrics; 0 picks a free one, -1: none",
        minimum=-1,
        maximum=65535,
    )
    metrics_token_file: str = setting(
        "",
        metavar="FILE",
        help="file with tokens, one a line: a scraper must then present one of them as a bearer token",
    )
    metrics_anonymous: bool = setting(
        False,
        help="serve metrics on addresses other than loopback without --metrics-token-file: any client that reaches the "
        "port may then read them, with the names of tenants",
    )
    drain_timeout_s: float = setting(30.0, help="time for running requests to finish at SIGTERM or Drain", minimum=0.0)

    def problem(self) -> str | None:
        """What is wrong with these settings together, in one line without secrets; None if they fit."""
        return (
            grant_key_problem(self.grant_key, self.grant_key_previous)
            or self.tls.problem(self.host)
            or needs_problem("--tls-router-names", self.tls_router_names, "--tls-client-ca", self.tls.tls_client_ca)
            or self._identity_problem()
            or self._metrics_problem()
        )

    def _identity_problem(self) -> str | None:
        if self.grant_key or self.tls_router_names or self.allow_anonymous or is_loopback(self.host):
            return None
        return (
            f"--host={self.host} can be reached from elsewhere, and the worker cannot tell routers from strangers: set "
            "--grant-key or --tls-router-names, or allow it with --allow-anonymous"
        )

    def _metrics_problem(self) -> str | None:
        open_to_all = not (self.metrics_token_file or self.metrics_anonymous or self.allow_anonymous)
        if self.metrics_port >= 0 and open_to_all and not is_loopback(self.host):
            return (
                f"--metrics-port on --host={self.host} can be reached from elsewhere: set --metrics-token-file, or "
                "allow it with --metrics-anonymous"
            )
        if self.metrics_port > 0 and self.metrics_port in (self.port, self.tls.health_port):
            return f"--metrics-port={self.metrics_port} is the worker's port or its health port"
        return None

    @property
    def model_name(self) -> str:
        path = Path(self.engine.model)
        name = path.stem if path.suffix.lower() == ".gguf" and path.is_file() else path.resolve().name
        return self.served_model_name or name
