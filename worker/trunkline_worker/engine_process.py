"""The engine process: owns the device, and talks to its front over a socket that it inherits.

It ends when the socket does, so an engine never outlives its front.
"""

import argparse
import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from trunkline.engine.v1.engine_pb2 import (
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineRequest,
    EngineResponse,
)
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_worker.blocks import KVBlocks
from trunkline_worker.engine import Engine, ModelLimits
from trunkline_worker.frames import FrameReader, frame
from trunkline_worker.kv_budget import OutOfMemory, free_bytes, kv_block_count
from trunkline_worker.model.errors import ModelError
from trunkline_worker.model.loading import LoadedModel, load_model
from trunkline_worker.prefix_tree import PrefixTree
from trunkline_worker.runner import TorchExecutor
from trunkline_worker.scheduler import Scheduler, SchedulerLimits
from trunkline_worker.settings import EngineSettings

PR_SET_PDEATHSIG = 1  # prctl(2)
RECEIVE_BYTES = 1 << 20  # most bytes taken from the socket at once
# Of the memory that is free once the model is loaded. A host runs other things too, other workers for example.
KV_MEMORY_FRACTION = {"cuda": 0.9, "cpu": 0.25}


class FrontLink:
    """The engine's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameReader()

    def send(self, response: EngineResponse) -> None:
        """Blocks while the front is behind: a front that stops reading stops the engine, and loses nothing."""
        self._socket.setblocking(True)
        self._socket.sendall(frame(response))

    def receive(self, *, wait: bool) -> list[EngineRequest] | None:
        """What has arrived; None once the front is gone. With `wait`, at least one piece of data is awaited."""
        self._socket.setblocking(wait)
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        return [EngineRequest.FromString(payload) for payload in self._frames.feed(data)]


def build_engine(settings: EngineSettings, model: LoadedModel, device: torch.device) -> tuple[Engine, GetModelResponse]:
    """An engine around a loaded model, and its description without the worker's names."""
    context_length = model.context_length
    num_blocks = settings.kv_blocks or kv_block_count(
        bytes_per_block=model.kv_bytes_per_block(settings.block_size),
        free_bytes=free_bytes(device),
        fraction=settings.kv_memory_fraction or KV_MEMORY_FRACTION[device.type],
        block_size=settings.block_size,
        context_length=context_length,
        max_running=settings.max_running_requests,
    )
    capacity = num_blocks * settings.block_size
    limits = SchedulerLimits(settings.max_step_tokens, settings.max_running_requests, settings.max_waiting_requests)
    tree = PrefixTree(model.fingerprint, settings.block_size)
    engine = Engine(
        Scheduler(limits, KVBlocks(num_blocks, tree)),
        TorchExecutor(model, num_blocks=num_blocks, block_size=settings.block_size),
        ModelLimits(min(context_length, capacity), frozenset(model.eos_token_ids)),
        clock_s=time.perf_counter,
    )
    description = GetModelResponse(
        fingerprint=model.fingerprint,
        architecture=model.spec.architecture,
        vocab_size=model.spec.vocab_size,
        context_length=context_length,
        kv_token_capacity=capacity,
        block_size=settings.block_size,
        kv_blocks=num_blocks,
        max_step_tokens=settings.max_step_tokens,
        max_running_requests=settings.max_running_requests,
        max_waiting_requests=settings.max_waiting_requests,
        eos_token_ids=sorted(model.eos_token_ids),
        default_sampling=model.default_sampling,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.type,
        deterministic=settings.deterministic,
    )
    return engine, description


def run(engine: Engine, link: FrontLink) -> None:
    """Steps until the front is gone."""
    while (requests := link.receive(wait=not engine.has_work)) is not None:
        for request in requests:
            engine.accept(request)
        step = engine.step()
        if step is not None:
            link.send(EngineResponse(step=step))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trunkline's engine process; started by trunkline-worker.")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    arguments = parser.parse_args()
    # The terminal's Ctrl-C reaches the whole process group; when to stop is the front's decision alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_front()
    link = FrontLink(socket.socket(fileno=arguments.socket_fd))
    try:
        start(EngineSettings.from_json(arguments.settings), link)
    except ConnectionError:
        sys.exit(0)  # the front is gone


def die_with_front() -> None:
    """Has the kernel end this process when its front does, in the middle of a step too (Linux; elsewhere the closed
    socket ends it after the step)."""
    if sys.platform == "linux":
        front = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != front:
            sys.exit(0)


def start(settings: EngineSettings, link: FrontLink) -> None:
    """Loads, reports, runs."""

    def report(stage: str) -> None:
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
            deterministic=settings.deterministic,
            context_length=settings.context_length,
        )
        report("allocating KV blocks")
        engine, description = build_engine(settings, model, device)
    except (ModelError, OutOfMemory) as error:
        link.send(EngineResponse(failed=EngineFailed(message=str(error))))
        sys.exit(2)
    link.send(EngineResponse(ready=EngineReady(model=description)))
    run(engine, link)


def pick_device(name: str) -> torch.device:
    """The device that a setting names. Raises ModelError where it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device=cuda, but torch finds no usable NVIDIA GPU: use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
