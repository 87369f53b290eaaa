"""The front's end of the socket to its engine process."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from trunkline.engine.v1.engine_pb2 import EngineRequest, EngineResponse, EngineStep
from trunkline.status import RequestRefused, no_worker
from trunkline.v1.worker_pb2 import GetModelResponse, GetStatsResponse, LoadSample, Submit
from trunkline_runtime.log import get_logger
from trunkline_worker.link.channel import FlightRecorder, FrameReader, frame
from trunkline_worker.link.shared_grammars import share_grammars
from trunkline_worker.link.silence import SLICE_S, Silence
from trunkline_worker.settings import EngineSettings

ENGINE_COMMAND = (sys.executable, "-m", "trunkline_worker.engine.engine_process")
RECEIVE_BYTES = 1 << 20
QUESTION_PERIOD_S = 5.0  # between an answer of the engine and the next request for statistics
LAST_OUTPUT_S = 1.0  # for the last lines of an engine that has ended
STOP_GRACE_S = 2.0  # an engine that does not finish its step within this time after it was asked to stop is killed


class EngineStartError(Exception):
    """The engine could not start. The message is one line for the operator."""


class EngineLink:
    """Starts the engine process, sends it work in batches, and passes on its steps."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = tuple(command)
        self.gpu_uuid = ""  # of the engine's GPU, once it is ready; empty on a CPU
        self.first_load = LoadSample()  # of the idle engine, once it is ready; each step brings a newer sample
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pending = EngineRequest()
        self._flush_scheduled = False
        # Callers of stats(): those for which the engine has been asked, and those that came after it was asked.
        self._stats_asked: list[asyncio.Future[GetStatsResponse]] = []
        self._stats_wanted: list[asyncio.Future[GetStatsResponse]] = []
        self._stopping = False
        self._log = get_logger()

    @property
    def pid(self) -> int:
        """Process id of the engine, which must have been started."""
        assert self._process is not None
        return self._process.pid

    async def start(self, settings: EngineSettings) -> GetModelResponse:
        """Spawns the engine and waits until it is ready. Returns the model's description. Call follow() next.

        Raises EngineStartError if the engine cannot start.
        """
        started_s = time.monotonic()
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        self._recorder, record = FlightRecorder.create()
        arguments = ["--socket-fd", str(theirs.fileno()), "--recorder-fd", str(record.fileno())]
        arguments += ["--settings", settings.to_json()]
        # The engine has a process group of its own: Ctrl-C at the terminal reaches the front, which decides. It has no
        # session of its own: Linux may divide the processor between sessions (sched(7), "The autogroup feature"), and
        # the front then waited up to 150 ms for a core that its engine used.
        # The spawn takes a millisecond, and no request is served yet.
        self._process = subprocess.Popen(  # noqa: ASYNC220
            [*self._command, *arguments],
            pass_fds=[theirs.fileno(), record.fileno()],
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._printing = threading.Thread(target=relay_output, args=(self._process,), name="engine output", daemon=True)
        self._printing.start()
        theirs.close()
        record.close()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=RECEIVE_BYTES)
        self._frames = FrameReader()
        while True:
            for response in await self._receive():
                kind = response.WhichOneof("item")
                if kind == "progress":
                    self._log.info("engine starting", stage=response.progress.stage)
                elif kind == "failed":
                    await self.stop()
                    raise EngineStartError(response.failed.message)
                elif kind == "ready":
                    for note in response.ready.notes:
                        self._log.info("model note", note=note)
                    response.ready.model.start_up_s = time.monotonic() - started_s
                    self.gpu_uuid, self.first_load = response.ready.gpu_uuid, response.ready.load
                    return response.ready.model

    def follow(self, on_step: Callable[[EngineStep], None], on_death: Callable[[str], None]) -> None:
        """Passes on the steps of the engine, which is ready, until it ends.

        on_death: called once with the reason if the engine ends without being asked to
        """
        self._on_step = on_step
        self._on_death = on_death
        self._reading = asyncio.create_task(self._read_steps())

    def in_flight(self) -> set[int]:
        """Handles in the steps that were in flight when the engine died."""
        return self._recorder.in_flight()

    def submit(self, submit: Submit) -> None:
        """Sends work to the engine, together with everything else of this iteration of the event loop."""
        self._pending.submits.append(submit)
        self._schedule_flush()

    def abort(self, handle: int) -> None:
        """Aborts work that no client waits for any more."""
        self._pending.abort_handles.append(handle)
        self._schedule_flush()

    def finish(self, handle: int) -> None:
        """Ends work at a stop string."""
        self._pending.finished_handles.append(handle)
        self._schedule_flush()

    async def stats(self) -> GetStatsResponse:
        """The engine's statistics; it answers between two steps. Raises RequestRefused if it ends before.

        At most one question is open, however many callers wait: an answer costs the engine time.
        """
        answer: asyncio.Future[GetStatsResponse] = asyncio.get_running_loop().create_future()
        self._stats_wanted.append(answer)
        if not self._stats_asked:
            self._ask_for_stats()
        return await answer

    def _ask_for_stats(self) -> None:
        self._stats_asked, self._stats_wanted = self._stats_wanted, []
        self._pending.want_stats = True
        self._schedule_flush()

    async def kill_when_silent(self, silence: Silence, is_idle: Callable[[], bool]) -> None:
        """Asks the engine for statistics periodically, and kills it if an answer takes too long. Returns when it has
        killed the engine, or the engine has ended.

        The engine's own watchdog ends a step that hangs. But if the process is stopped, so is its watchdog.

        is_idle: whether the engine has no work
        """
        while True:
            answer = asyncio.ensure_future(self.stats())
            silence.answered()
            was_idle = is_idle()
            while not (await asyncio.wait({answer}, timeout=SLICE_S))[0]:
                if silence.is_too_long(idle=was_idle and is_idle()):
                    self._log.error("engine does not answer: it is killed", silent_s=silence.silent_s)
                    self._kill()
                    return
                was_idle = is_idle()
            if isinstance(answer.exception(), RequestRefused):
                return
            answer.result()
            await asyncio.sleep(QUESTION_PERIOD_S)

    def _take(self, response: EngineResponse) -> None:
        if response.HasField("stats"):
            for answer in self._stats_asked:
                if not answer.done():
                    answer.set_result(response.stats)
            self._stats_asked = []
            if self._stats_wanted:
                self._ask_for_stats()
        else:
            self._on_step(response.step)

    async def stop(self) -> None:
        """Closes the socket, which ends the engine; kills it if it does not end in time."""
        self._stopping = True
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        process = self._process
        if process is None:
            return  # stopped before it was started
        try:
            await asyncio.to_thread(process.wait, STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            await asyncio.to_thread(process.wait)
        await asyncio.to_thread(self._printing.join, LAST_OUTPUT_S)

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        request, self._pending = self._pending, EngineRequest()
        share_grammars(request.submits)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(request))

    async def _receive(self) -> list[EngineResponse]:
        """Receives messages of the engine. Raises EngineStartError if it has closed its socket."""
        data = await self._reader.read(RECEIVE_BYTES)
        if not data:
            raise EngineStartError(f"the engine process ended while starting{await self._exit_status()}")
        return [EngineResponse.FromString(payload) for payload in self._frames.feed(data)]

    async def _read_steps(self) -> None:
        try:
            while data := await self._reader.read(RECEIVE_BYTES):
                for payload in self._frames.feed(data):
                    self._take(EngineResponse.FromString(payload))
        except ConnectionError as error:
            self._log.warning("engine socket broke", error=str(error))
        except Exception as error:  # after any error, this engine is not read from any more
            self._log.error("unexpected error", exc_info=error)
            self._kill()
        for answer in (*self._stats_asked, *self._stats_wanted):
            if not answer.done():
                answer.set_exception(no_worker("this worker's engine has ended"))
        if not self._stopping:
            self._on_death("the engine closed its socket")  # first, because streams wait for it
            self._log.error("engine process ended", status=await self._exit_status())

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _exit_status(self) -> str:
        assert self._process is not None
        try:
            status = await asyncio.to_thread(self._process.wait, STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return " (it closed its socket and was killed)"
        await asyncio.to_thread(self._printing.join, LAST_OUTPUT_S)  # its traceback comes first
        return f" (signal {signal.Signals(-status).name})" if status < 0 else f" (exit status {status})"


def relay_output(process: subprocess.Popen[bytes]) -> None:
    """Prints what the engine prints, until it ends: an engine that wrote to the log itself would stop when the log's
    reader stalls."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            sys.stderr.write(line.decode(errors="backslashreplace"))
