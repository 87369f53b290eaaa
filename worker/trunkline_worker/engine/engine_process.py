"""The engine process: owns the device, and talks to its front over a socket that it inherits.

It ends when the socket closes, so an engine never outlives its front.
"""

import argparse
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trunkline.engine.v1.engine_pb2 import EngineFailed, EngineProgress, EngineReady, EngineRequest, EngineResponse
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.engine.largest_step import activation_bytes
from trunkline_worker.engine.model_floor import step_floor
from trunkline_worker.engine.own_gpu import own_gpu
from trunkline_worker.engine.rehearsal import rehearse
from trunkline_worker.engine.step_runner import executor_for, step_runner
from trunkline_worker.engine.watchdog import Watchdog
from trunkline_worker.link.channel import FlightRecorder, FrameReader, frame
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.kv_budget import OutOfMemory, check_block_count, kv_block_count, usable_bytes
from trunkline_worker.model.loading import LoadedModel, load_model
from trunkline_worker.runner.step_thread import WaitingExecutor
from trunkline_worker.scheduler.limits import AdmissionRule, Batching, SchedulerLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.settings import EngineSettings

PR_SET_PDEATHSIG = 1  # prctl(2)
INTEGRITY_CHECK_S = 60.0  # an idle engine checks its integrity, no more often than this
RECEIVE_BYTES = 1 << 20  # most bytes taken from the socket at once
# Of the memory that is free once the model is loaded. A host runs other programs too, such as other workers.
KV_MEMORY_FRACTION = {"cuda": 0.9, "cpu": 0.25}


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

    def receive(self, timeout_s: float | None, steps: WaitingExecutor | None = None) -> list[EngineRequest] | None:
        """Requests that have arrived or arrive within the timeout (None: no limit); None if the front is gone. Returns
        early when a step is done."""
        if timeout_s is None or timeout_s > 0:
            watched: list[socket.socket | WaitingExecutor] = [self._socket]
            if steps is not None:
                watched.append(steps)
            select.select(watched, [], [], timeout_s)
        self._socket.setblocking(False)
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        return [EngineRequest.FromString(payload) for payload in self._frames.feed(data)]


def build_engine(
    settings: EngineSettings,
    model: LoadedModel,
    device: torch.device,
    report: Callable[[str], None] | None = None,
    gpu_name: str = "",
) -> tuple[Engine, GetModelResponse]:
    """An engine for a loaded model, and its description without the worker's names.

    report: called with the progress of warming up and of the rehearsal; None: neither is done
    gpu_name: as torch reports it
    """
    num_blocks = kv_blocks_for(settings, model, device)
    tree = PrefixTree(model.fingerprint, settings.block_size)
    stats = EngineStats(time.perf_counter())
    runner = step_runner(model, settings, num_blocks=num_blocks, report=report)
    executor = executor_for(runner, settings, device.type)
    scheduler = Scheduler(scheduler_limits(settings), KVBlocks(num_blocks, tree), stats)
    if report is not None:
        report("measuring what steps cost")
        rehearse(
            runner,
            scheduler.cost,
            scheduler.limits,
            context_length=model.context_length,
            num_blocks=num_blocks,
            block_size=settings.block_size,
        )
    engine = Engine(
        scheduler,
        executor,
        ModelLimits(min(model.context_length, num_blocks * settings.block_size), frozenset(model.eos_token_ids)),
        clock_s=time.perf_counter,
        price_per_hour=settings.price_per_hour,
        floor=step_floor(model, settings, gpu_name),
    )
    return engine, description_of(model, settings, device, num_blocks=num_blocks, run_ahead=executor.run_ahead)


def kv_memory_fraction(settings: EngineSettings, device: torch.device) -> float:
    """The part of the free memory that the KV pool takes, unless the number of its blocks is set."""
    return settings.kv_memory_fraction or KV_MEMORY_FRACTION[device.type]


def kv_blocks_for(settings: EngineSettings, model: LoadedModel, device: torch.device) -> int:
    """The number of KV blocks: as set, or as many as fit. Raises OutOfMemory if that is too much or too few."""
    needed = activation_bytes(model, settings)  # first, because it frees memory cached while loading
    available = max(0, usable_bytes(device, settings.gpu_memory_share) - needed)
    bytes_per_block = model.kv_bytes_per_block(settings.block_size)
    if settings.kv_blocks:
        check_block_count(settings.kv_blocks, bytes_per_block=bytes_per_block, free_bytes=available)
        return settings.kv_blocks
    return kv_block_count(
        bytes_per_block=bytes_per_block,
        free_bytes=available,
        fraction=kv_memory_fraction(settings, device),
        block_size=settings.block_size,
        context_length=model.context_length,
        max_running=settings.max_running_requests,
    )


def description_of(
    model: LoadedModel, settings: EngineSettings, device: torch.device, *, num_blocks: int, run_ahead: int
) -> GetModelResponse:
    """What clients and routers are told of the engine and its model, without the worker's names."""
    return GetModelResponse(
        fingerprint=model.fingerprint,
        architecture=model.spec.architecture,
        vocab_size=model.spec.vocab_size,
        context_length=model.context_length,
        kv_token_capacity=num_blocks * settings.block_size,
        block_size=settings.block_size,
        kv_blocks=num_blocks,
        max_step_tokens=settings.max_step_tokens,
        max_running_requests=min(settings.max_running_requests, settings.max_step_tokens),
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        itl_target_ms=settings.itl_target_ms,
        kv_memory_fraction=0.0 if settings.kv_blocks else kv_memory_fraction(settings, device),
        interactive_reserve=settings.interactive_reserve,
        batching=settings.batching,
        admission=settings.admission,
        aging_s=settings.aging_s,
        price_per_hour=settings.price_per_hour,
        batch_size=settings.batch_size,
        batch_window_ms=settings.batch_window_ms,
        run_ahead=run_ahead,
        eos_token_ids=sorted(model.eos_token_ids),
        default_sampling=model.default_sampling,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.type,
        deterministic=settings.deterministic,
    )


def scheduler_limits(settings: EngineSettings) -> SchedulerLimits:
    """The scheduler's part of the settings, in the scheduler's units."""
    return SchedulerLimits(
        max_step_tokens=settings.max_step_tokens,
        max_running_requests=settings.max_running_requests,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        itl_target_s=settings.itl_target_ms / 1e3,
        interactive_reserve=settings.interactive_reserve,
        aging_s=settings.aging_s,
        batching=Batching(settings.batching),
        batch_size=settings.batch_size,
        batch_window_s=settings.batch_window_ms / 1e3,
        admission=AdmissionRule(settings.admission),
    )


def run(engine: Engine, link: FrontLink, watchdog: Watchdog) -> None:
    """Runs the engine loop until the front is gone."""
    timeout_s: float | None = 0.0
    checked_s = time.perf_counter()
    executor = engine.executor if isinstance(engine.executor, WaitingExecutor) else None
    while (requests := link.receive(timeout_s, executor)) is not None:
        for request in requests:
            engine.accept(request)
        if any(request.want_stats for request in requests):
            link.send(EngineResponse(stats=engine.stats()))
        if engine.has_work:
            watchdog.goes_on(time.perf_counter())
        step = engine.step() if engine.has_work else None
        if step is not None:
            link.send(EngineResponse(step=step))
        # With no step in flight, only step() itself can tell that there is nothing to schedule now.
        timeout_s = 0.0 if step is not None and not engine.is_computing else idle_s(engine)
        if timeout_s is None:
            watchdog.rests()
        if timeout_s is None and time.perf_counter() - checked_s > INTEGRITY_CHECK_S:
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
    die_with_front()
    link = FrontLink(socket.socket(fileno=arguments.socket_fd))
    try:
        start(EngineSettings.from_json(arguments.settings), link, FlightRecorder.open(arguments.recorder_fd))
    except ConnectionError:
        sys.exit(0)  # the front is gone


def die_with_front() -> None:
    """Makes the kernel kill this process when its front ends, even in the middle of a step (Linux; elsewhere the closed
    socket ends it after the step)."""
    if sys.platform == "linux":
        front = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != front:
            sys.exit(0)


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
        report(f"loading {Path(settings.model).name} onto {device.type}")
        model = load_model(
            Path(settings.model),
            dtype=settings.dtype,
            device=device,
            load_format=settings.load_format,
            kernels=settings.kernels,
            quantization=settings.quantization,
            kv_dtype=settings.kv_dtype,
            deterministic=settings.deterministic,
            context_length=settings.context_length,
            ignore_config_keys=settings.ignore_config_keys,
        )
        report("allocating KV blocks")
        gpu = own_gpu(device)
        engine, description = build_engine(settings, model, device, report, gpu.name)
    except (ModelError, OutOfMemory, torch.OutOfMemoryError) as error:
        message = out_of_memory(error, reached) if isinstance(error, torch.OutOfMemoryError) else str(error)
        link.send(EngineResponse(failed=EngineFailed(message=message)))
        sys.exit(2)
    recorder.steps = engine.executor.run_ahead + 1
    engine.before_launch = recorder.launch
    ready = EngineReady(model=description, notes=model.notes, gpu_uuid=gpu.uuid, load=engine.load())
    link.send(EngineResponse(ready=ready))
    gc.collect()
    gc.freeze()  # these objects stay, so the collector need not visit them again
    run(engine, link, Watchdog(settings.step_timeout_s))


def out_of_memory(error: torch.OutOfMemoryError, stage: str) -> str:
    """A one-line message about an allocation that failed at this stage."""
    # PyTorch's message has several sentences; one says how much it tried to allocate.
    tried = next((part for part in str(error).split(". ") if part.startswith("Tried to allocate")), "")
    return (
        f"the GPU has too little memory ({stage}{': ' if tried else ''}{tried[:1].lower()}{tried[1:]}): try "
        "--quantization int8, or a smaller --max-step-tokens, --max-running-requests or --kv-memory-fraction"
    )


def pick_device(name: str) -> torch.device:
    """The device that a setting names. Raises ModelError if it is not available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device=cuda, but torch finds no usable NVIDIA GPU: use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
