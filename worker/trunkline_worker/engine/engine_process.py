"""The engine process: owns the device, and talks to its front over a socket that it inherits.

It ends when the socket closes, so an engine never outlives its front. It ends as well when a step hangs; the front then
reports the sequences that the step computed.
"""

import argparse
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from trunkline.engine.v1.engine_pb2 import EngineFailed, EngineProgress, EngineReady, EngineRequest, EngineResponse
from trunkline_kernels.cpu.library import end_openmp_threads
from trunkline_worker.engine.allocator import keep_freed_memory, use_one_arena
from trunkline_worker.engine.assembly import assemble, pick_device
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.step_runner import own_gpu
from trunkline_worker.link.channel import FlightRecorder, FrameReader, frame
from trunkline_worker.link.lifeline import die_with
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.kv_budget import OutOfMemory
from trunkline_worker.runner.step_thread import InlineExecutor, WaitingExecutor
from trunkline_worker.settings import EngineSettings

REARM_S = 1.0  # arming starts a thread: no more often than this
INTEGRITY_CHECK_S = 60.0  # an idle engine checks its integrity, no more often than this
RECEIVE_BYTES = 1 << 20  # most bytes taken from the socket at once
# Python's switch interval, instead of 5 ms: the step's thread asks for the interpreter's lock hundreds of times a step.
SWITCH_S = 1e-4


class Watchdog:
    """Ends the process, with every thread's traceback on standard error, `timeout_s` to `timeout_s` + REARM_S after the
    last goes_on(). A thread outside the interpreter waits, so a thread that holds the interpreter lock cannot stop it.
    A timeout of 0 disables it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed_s: float | None = None

    def goes_on(self, now_s: float) -> None:
        """There is work, and it has just advanced."""
        if self._timeout_s and (self._armed_s is None or now_s - self._armed_s >= REARM_S):
            self._armed_s = now_s
            faulthandler.dump_traceback_later(self._timeout_s + REARM_S, exit=True)

    def rests(self) -> None:
        """There is no work until the next goes_on()."""
        if self._armed_s is not None:
            self._armed_s = None
            faulthandler.cancel_dump_traceback_later()


class HasFileno(Protocol):
    """What select() takes."""

    def fileno(self) -> int: ...


class FrontLink:
    """The engine's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameReader()

    def send(self, response: EngineResponse) -> None:
        """Sends a message. Blocks while the front is behind: a front that stops reading stops the engine, and loses
        nothing."""
        self._socket.setblocking(True)
        self._socket.sendall(frame(response))

    def receive(self, timeout_s: float | None, watched: Iterable[HasFileno] = ()) -> list[EngineRequest] | None:
        """Requests that have arrived or arrive within the timeout (None: no limit); None if the front is gone. Returns
        early when something that is watched can be read."""
        if timeout_s is None or timeout_s > 0:
            select.select([self._socket, *watched], [], [], timeout_s)
        self._socket.setblocking(False)
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        return [EngineRequest.FromString(payload) for payload in self._frames.feed(data)]


def run(engine: Engine, link: FrontLink, watchdog: Watchdog) -> None:
    """Runs the engine loop until the front is gone."""
    timeout_s: float | None = 0.0
    checked_s = time.perf_counter()
    watched: list[HasFileno] = [engine.executor] if isinstance(engine.executor, WaitingExecutor) else []
    if engine.guided is not None:
        watched.append(engine.guided)
    while (requests := link.receive(timeout_s, watched)) is not None:
        for request in requests:
            engine.accept(request)
        if any(request.want_stats for request in requests):
            link.send(EngineResponse(stats=engine.stats()))
        if engine.has_work and not (engine.is_computing and engine.is_waiting):  # news of others is no progress
            watchdog.goes_on(time.perf_counter())
        step = engine.step()
        if step is not None:
            link.send(EngineResponse(step=step))
        # With no step in flight, only step() itself can tell that there is nothing to schedule now.
        timeout_s = 0.0 if step is not None and not engine.is_computing else idle_s(engine)
        if timeout_s != 0.0 and not engine.is_computing:
            watchdog.rests()  # all that is left waits, for a resource or until a batch is formed
        if timeout_s is None and not engine.is_computing and time.perf_counter() - checked_s > INTEGRITY_CHECK_S:
            checked_s = time.perf_counter()
            engine.scheduler.check_integrity()


def idle_s(engine: Engine) -> float | None:
    """Seconds until the engine has something to do; None: not before a request arrives."""
    if not engine.has_work:
        return None
    if not engine.is_waiting or engine.has_reports:
        return 0.0
    wakes_s = engine.wakes_s()
    return None if wakes_s is None else max(0.0, wakes_s - time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trunkline's engine process; started by trunkline-worker.")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--recorder-fd", type=int, required=True)
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    arguments = parser.parse_args()
    # Ctrl-C at the terminal reaches the whole process group; the front alone decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(os.getppid())  # even in the middle of a step
    link = FrontLink(socket.socket(fileno=arguments.socket_fd))
    try:
        start(EngineSettings.from_json(arguments.settings), link, FlightRecorder.open(arguments.recorder_fd))
    except ConnectionError:
        sys.exit(0)  # the front is gone


def start(settings: EngineSettings, link: FrontLink, recorder: FlightRecorder) -> None:
    """Loads the model, reports to the front, and runs the engine."""

    reached = "starting"

    def report(stage: str) -> None:
        nonlocal reached
        reached = stage
        link.send(EngineResponse(progress=EngineProgress(stage=stage)))

    try:
        torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
        device = pick_device(settings.device)
        if device.type == "cpu":
            use_one_arena()
        report(f"loading {Path(settings.model).name} onto {device.type}")
        gpu = own_gpu(device)
        engine, description, notes = assemble(settings, device, report, gpu.name)
    except (ModelError, OutOfMemory, torch.OutOfMemoryError) as error:
        message = out_of_memory(error, reached) if isinstance(error, torch.OutOfMemoryError) else str(error)
        link.send(EngineResponse(failed=EngineFailed(message=message)))
        sys.exit(2)
    if device.type == "cpu":
        sys.setswitchinterval(SWITCH_S)
        keep_freed_memory()
    if isinstance(engine.executor, InlineExecutor):
        end_openmp_threads()
        engine.use(engine.executor.on_thread())
    recorder.steps = engine.executor.run_ahead + 1
    engine.before_launch = recorder.launch
    ready = EngineReady(model=description, notes=notes, gpu_uuid=gpu.uuid, load=engine.load())
    link.send(EngineResponse(ready=ready))
    gc.collect()
    gc.freeze()  # these objects stay, so the collector need not visit them again
    run(engine, link, Watchdog(settings.step_timeout_s))
    if engine.is_computing:
        os._exit(0)  # the interpreter cannot be taken down under the thread that computes the step


def out_of_memory(error: torch.OutOfMemoryError, stage: str) -> str:
    """A one-line message about an allocation that failed at this stage."""
    # PyTorch's message has several sentences; one says how much it tried to allocate.
    tried = next((part for part in str(error).split(". ") if part.startswith("Tried to allocate")), "")
    return (
        f"the GPU has too little memory ({stage}{': ' if tried else ''}{tried[:1].lower()}{tried[1:]}): try "
        "--quantization int8, or a smaller --max-step-tokens, --max-running-requests or --kv-memory-fraction"
    )


if __name__ == "__main__":
    main()
