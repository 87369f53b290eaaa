"""The plan of a local cluster: its processes with their commands, addresses and ports."""

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from trunkline_cli.arguments import MOST_PORT
from trunkline_cli.child import script
from trunkline_cli.gpus import gpu_environment, memory_share
from trunkline_cli.passed_flags import PassedFlags


class LaunchError(Exception):
    """The cluster cannot start. The message is one line for a person."""


# Flags with which a worker serves metrics on other addresses than loopback.
OPENS_METRICS = ("--metrics-token-file", "--metrics-anonymous", "--allow-anonymous")

# Threads of the CPU kernels wait for each other many times a step, and OpenMP lets them spin for a millisecond. Here
# they share the cores with other processes, which includes the thread that they wait for. A worker that has its cores
# to itself is a tenth faster without this.
THREAD_SPINS = {"GOMP_SPINCOUNT": "1000"}

# Responses of a tenant that the router stores unless it is told otherwise: here is one router with one process, which
# clients always find. --max-stored-mib bounds their memory.
STORED_RESPONSES = {"TRUNKLINE_MAX_STORED_RESPONSES": "1000"}


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The settings of a local cluster."""

    model: Path
    name: str
    workers: int
    host: str
    port: int  # of the router
    worker_port: int  # of the first worker; the others have the next ones
    flags: PassedFlags = field(default_factory=PassedFlags)
    threads: int | None = None  # per worker
    gpus: tuple[str, ...] = ()
    http_port: int = -1  # of the router; -1: no HTTP
    metrics_port: int = -1  # of the first worker; the others have the next ones; -1: workers serve no metrics

    def worker_address(self, index: int) -> str:
        return address(self.host, self.worker_port + index)

    @property
    def router_address(self) -> str:
        return address(self.host, self.port)

    @property
    def http_url(self) -> str:
        """The base URL of the OpenAI API; empty without HTTP."""
        return f"http://{address(self.host, self.http_port)}/v1" if self.http_port > 0 else ""

    def ports(self) -> list[int]:
        """The ports of the workers and the router, without those of metrics. Raises LaunchError if one is out of range
        or used twice."""
        workers = range(self.worker_port, self.worker_port + self.workers)
        routers = [self.port] if self.http_port < 0 else [self.port, self.http_port]
        for port in (*routers, workers[0], workers[-1]):
            if not 1 <= port <= MOST_PORT:
                raise LaunchError(f"port {port} is out of range; allowed: 1 to {MOST_PORT}")
        for port in routers:
            if port in workers:
                raise LaunchError(
                    f"port {port} is the router's and also one of the workers' {workers[0]} to {workers[-1]}"
                )
        if self.port == self.http_port:
            raise LaunchError(f"port {self.port} cannot serve both gRPC and HTTP")
        return [*routers, *workers]

    def metrics_ports(self) -> list[int]:
        """The ports of the workers' metrics. Raises LaunchError as ports() does."""
        if self.metrics_port < 0:
            return []
        ports = range(self.metrics_port, self.metrics_port + self.workers)
        for port in (ports[0], ports[-1]):
            if not 1 <= port <= MOST_PORT:
                raise LaunchError(f"port {port} of metrics is out of range; allowed: 1 to {MOST_PORT}")
        for port in self.ports():
            if port in ports:
                raise LaunchError(f"port {port} is also one of the workers' for metrics, {ports[0]} to {ports[-1]}")
        return [*ports]

    def worker_command(self, index: int) -> list[str]:
        shared_out = max(1, (os.cpu_count() or 1) // self.workers)
        threads = shared_out if self.threads is None else self.threads
        share = memory_share(self.gpus, self.workers, index)
        return [
            script("trunkline-worker"),
            f"--model={self.model}",
            f"--served-model-name={self.name}",
            f"--host={self.host}",
            f"--port={self.worker_port + index}",
            f"--worker-id=worker-{index}",
            f"--threads={threads}",
            "--drain-timeout-s=2",
            f"--metrics-port={self.metrics_port + index if self.metrics_port >= 0 else -1}",
            *([] if share is None else [f"--gpu-memory-share={share}"]),
            *self.flags.workers,
        ]

    def commands(self) -> dict[str, list[str]]:
        """Commands by the names of the processes, in starting order."""
        workers = {f"worker-{index}": self.worker_command(index) for index in range(self.workers)}
        return workers | {"router": self.router_command()}

    def addresses(self) -> dict[str, str]:
        """Addresses by the names of the processes."""
        workers = {f"worker-{index}": self.worker_address(index) for index in range(self.workers)}
        return workers | {"router": self.router_address}

    def environment(self, name: str) -> dict[str, str]:
        """Variables that are added to a process's environment."""
        if not name.startswith("worker-"):
            return self._stored_responses()
        spins = {} if set(THREAD_SPINS) & set(os.environ) else THREAD_SPINS
        return spins | gpu_environment(self.gpus, int(name.removeprefix("worker-")))

    def _stored_responses(self) -> dict[str, str]:
        """A variable, because the user's flags must win. Several processes cannot store responses."""
        words = " ".join(self.flags.router).replace("=", " ").split()
        processes = os.environ.get("TRUNKLINE_PROCESSES", "1")
        if "--processes" in words[:-1]:
            processes = words[words.index("--processes") + 1]
        return {} if processes != "1" or set(STORED_RESPONSES) & set(os.environ) else STORED_RESPONSES

    def router_command(self) -> list[str]:
        addresses = ",".join(self.worker_address(index) for index in range(self.workers))
        return [
            script("trunkline-router"),
            f"--workers={addresses}",
            f"--host={self.host}",
            f"--port={self.port}",
            f"--http-port={self.http_port}",
            "--stop-timeout-s=2",
            "--open=readiness",  # the launcher has no credentials
            *self.flags.router,
        ]


def address(host: str, port: int) -> str:
    """host:port as gRPC reads it, with IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def has_metrics(host: str, worker_arguments: Sequence[str]) -> bool:
    """Whether workers may serve metrics without being told to: on other addresses than loopback they need a flag."""
    if any(argument.startswith(OPENS_METRICS) for argument in worker_arguments):
        return True
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def check_port(host: str, port: int, flag: str = "") -> None:
    """Raises LaunchError if the port is taken or cannot be bound.  flag: with which another one can be chosen"""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except UnicodeError:
            raise LaunchError(f"{host} is not a host name") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"is taken ({error.strerror}): is a cluster running already?"
            else:
                reason = f"cannot be used: {error.strerror}"
            choice = f" {flag} chooses others, -1 none" if flag else ""
            raise LaunchError(f"port {port} on {host} {reason}{choice}") from None
