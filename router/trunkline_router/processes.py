"""Runs several processes of one router on the same ports: starts them, restarts those that die, stops them together.

The kernel distributes connections among them (SO_REUSEPORT). They share nothing else but a directory with sockets, at
which they ask each other for requests (observe/recent/router_requests.py). To workers and to Prometheus, a process is a
router of its own.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from random import Random
from tempfile import TemporaryDirectory
from typing import IO

from trunkline_router.access.identity.fleet_secret import LEAST_SECRET_BYTES
from trunkline_router.settings import EXIT_CANNOT_START, METRICS_OPTION, RouterSettings
from trunkline_runtime.log import configure_logging, get_logger
from trunkline_runtime.server import PortInUse, Signals, check_port_is_free, hold_port
from trunkline_runtime.settings import instance_name

AT_ONCE, ONCE_USEFUL = "at-once", "once-useful"  # when a process begins to listen
FIRST_DELAY_S, MOST_DELAY_S = 0.5, 30.0  # before a process that died is restarted; doubles while it keeps dying
HEALTHY_AFTER_S = 60.0  # a process that ran for this long is restarted after the first delay again
KILL_AFTER_S = 3.0  # beyond the stop timeout: a process that still runs is killed


def supervise(settings: RouterSettings, arguments: Sequence[str]) -> int:
    """Runs `settings.processes` routers with these arguments until a signal; returns the exit status."""
    with contextlib.ExitStack() as held:
        try:
            holder = held.enter_context(hold_port(settings.host, settings.port))
            ports = [f"--port={holder.getsockname()[1]}"]
            if settings.http.http_port >= 0:
                http_holder = held.enter_context(hold_port(settings.host, settings.http.http_port, "--http-port"))
                ports.append(f"--http-port={http_holder.getsockname()[1]}")
            if settings.process_metrics_port > 0:
                for port in range(first := settings.process_metrics_port, first + settings.processes):
                    if port == settings.tls.health_port:
                        raise PortInUse(f"port {port} is that of --health-port; choose another with {METRICS_OPTION}")
                    check_port_is_free(settings.host, port, METRICS_OPTION)
            directory = held.enter_context(TemporaryDirectory(prefix="trunkline-router-"))
        except PortInUse as error:
            return _failed(str(error))
        except OSError as error:
            return _failed(f"--processes needs a directory for temporary files, none can be written: {error.strerror}")
        # Cache salts derive from it: processes that share them can use each other's cached prefixes.
        if not (settings.identity.has_secret or settings.grant_key):
            os.environ["TRUNKLINE_FLEET_SECRET"] = secrets.token_hex(LEAST_SECRET_BYTES)
        name = settings.router_id or instance_name(settings.host, holder.getsockname()[1])
        configure_logging("router", router=name)
        overrides = [*ports, f"--stop-timeout-s={settings.stop_timeout_s}"]
        commands = [[*arguments, *overrides, f"--router-id={name}/{number}"] for number in range(settings.processes)]
        if settings.http.http_port >= 0 and settings.process_metrics_port < 0:
            get_logger().warning("several processes serve no metrics", remedy=f"set {METRICS_OPTION}")
        try:
            return asyncio.run(Processes(commands, directory, settings.stop_timeout_s, Random()).run())
        except OSError as error:
            return _failed(f"a process cannot be started: {error.strerror}")


def _failed(problem: str) -> int:
    print(f"trunkline-router: {problem}", file=sys.stderr)
    return EXIT_CANNOT_START


class Processes:
    """Child processes. `commands` has the arguments of each; `directory` is for their sockets."""

    def __init__(self, commands: Sequence[Sequence[str]], directory: str, stop_timeout_s: float, rng: Random) -> None:
        self._commands = commands
        self._stop_timeout_s = stop_timeout_s
        self._rng = rng
        self._directory = directory
        self._restarts: Counter[int] = Counter()  # by number: how often the process was started again
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._listening: set[int] = set()
        self._log = get_logger()

    async def run(self) -> int:
        """Runs until a signal, or until the first process cannot start. Returns the exit status."""
        signals = Signals()
        stopped = asyncio.create_task(signals.stop.wait())
        working = asyncio.create_task(self._start_and_keep())
        try:
            await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else 0
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await self._stop(signals)

    async def _start_and_keep(self) -> int:
        """Returns the exit status of the first process if it ends before it serves; else runs until it is cancelled."""
        # The first process starts alone: a problem that stops it would stop every process, and each would report it.
        status = await self._start(0)
        if status is not None:
            return status or EXIT_CANNOT_START
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._commands)):
                tasks.create_task(self._keep(number))
        raise AssertionError("keeping a process running does not end")

    async def _start(self, number: int) -> int | None:
        """Starts a process. Returns None once it listens, its exit status if it ends before that. Raises OSError if the
        system cannot start another process."""
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb", 0) as pipe, os.fdopen(write_end, "wb", 0) as theirs:
            process = self._running[number] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "trunkline_router.process", str(os.getpid()), str(write_end)),
                ONCE_USEFUL if self._listening else AT_ONCE,
                *(self._directory, str(number), str(self._restarts[number])),
                *self._commands[number],
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(write_end,),
                process_group=0,  # Ctrl-C reaches this process alone, which passes it on; no session: see EngineLink
            )
            theirs.close()  # so that the pipe ends with the process
            listens = await _has_byte(pipe)
        if not listens:
            return await process.wait()
        self._listening.add(number)
        return None

    async def _keep(self, number: int) -> None:
        """Restarts a process whenever it dies, after a growing delay."""
        now_s = asyncio.get_running_loop().time
        deaths = 0
        while True:
            started_s = now_s()
            try:
                status = None if number in self._listening else await self._start(number)
                if status is None:
                    status = await self._running[number].wait()
            except OSError as error:  # the system is out of processes or memory: counts as a death
                status = None
                self._log.warning("router process cannot be started", number=number, problem=error.strerror)
            self._listening.discard(number)
            self._restarts[number] += 1
            deaths = 1 if now_s() - started_s >= HEALTHY_AFTER_S else deaths + 1
            delay_s = restart_delay_s(deaths) * self._rng.uniform(0.75, 1.0)
            self._log.warning("router process died", number=number, status=status, again_in_s=round(delay_s, 1))
            await asyncio.sleep(delay_s)

    async def _stop(self, signals: Signals) -> None:
        """Sends SIGTERM to all, again at a second signal, and kills the processes that do not stop in time."""
        self._signal_all(signal.SIGTERM)
        ended = asyncio.create_task(self._wait_all())
        at_once = asyncio.create_task(signals.stop_now.wait())
        time_s = self._stop_timeout_s + KILL_AFTER_S
        await asyncio.wait({ended, at_once}, timeout=time_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and at_once.done():
            self._signal_all(signal.SIGTERM)
            await asyncio.wait({ended}, timeout=KILL_AFTER_S)
        at_once.cancel()
        if not ended.done():
            self._log.error("router processes did not stop in time and are killed")
            self._signal_all(signal.SIGKILL)
        await ended

    async def _wait_all(self) -> None:
        await asyncio.gather(*(process.wait() for process in self._running.values()))

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._running.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)


def restart_delay_s(deaths: int) -> float:
    """Returns the longest delay before the next restart, after `deaths` deaths that each came soon after a start."""
    return min(FIRST_DELAY_S * 2.0 ** min(deaths - 1, 16), MOST_DELAY_S)


async def _has_byte(pipe: IO[bytes]) -> bool:
    """Returns whether a byte arrives before the other end is closed."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return bool(await reader.read(1))
    finally:
        transport.close()
