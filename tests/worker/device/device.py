"""A device made of rules: tensors on it have shapes and no memory, and each operation is checked instead of run.

Tensors of the host are real, because the program fills its pinned buffers through NumPy. What the host sends is kept,
so that contracts can look at tables; what comes back is made up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.worker.device import contracts
from tests.worker.device.cards import CONTEXT_BYTES, Card
from tests.worker.device.copies import Copies, Invent
from tests.worker.device.faults import DeviceFault, GraphFault, HostSync, MixedDevices, Race
from tests.worker.device.launches import Launch
from tests.worker.device.memory import Allocation, Allocations, Ledger
from tests.worker.device.recording import FakeGraph, Recording
from tests.worker.device.tensor import META, DeviceTensor, metas
from tests.worker.device.timeline import FakeStream, Timeline

HOST_READS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__array__")
# Their results, or the shapes of their results, are known only once the device has computed them.
WAITING = frozenset({"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique"})
MOVES = frozenset({"to", "_to_copy"})


class FakeDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One GPU. Inside running() it is there for torch, Triton and the program."""

    def __init__(self, card: Card, invent: Invent, *, others: int = 0) -> None:
        """invent: fills a tensor of the host with what could have come from the device
        others: bytes of the card that other processes have"""
        super().__init__()  # type: ignore[no-untyped-call]
        # So that torch does not look for a driver.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.card = card
        self.ledger = Ledger(card.memory, CONTEXT_BYTES + others)
        self.timeline = Timeline(lambda: self.copies.waited(), self._told_of)
        self.blocks = Allocations(self.ledger, self._freed)
        self.graphs: list[FakeGraph] = []
        self.compiled: set[tuple[Any, ...]] = set()
        self.launches: dict[str, int] = {}  # by kernel
        self.recording: Recording | None = None
        self.compiles = True  # whether a kernel may be compiled now
        self._capture_pool: int | None = None
        self._capture_stream = self.timeline.stream()
        self.copies = Copies(self.timeline, self.blocks, self._use, invent)
        self._faults: list[DeviceFault] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    @contextmanager
    def running(self) -> Iterator["FakeDevice"]:
        """The only device there is."""
        cuda: dict[str, Any] = {
            "Stream": self.timeline.stream, "Event": self.timeline.event, "stream": self.timeline.on,
            "current_stream": lambda *_: self.timeline.current, "synchronize": self.timeline.synchronize,
            "CUDAGraph": lambda: FakeGraph(self), "graph": self._capture, "empty_cache": lambda: None,
            "memory_reserved": lambda *_: self.ledger.reserved,
            "memory_allocated": lambda *_: self.ledger.allocated,
            "max_memory_allocated": lambda *_: self.ledger.peak, "reset_peak_memory_stats": self._reset_peak,
            "mem_get_info": lambda *_: (self.ledger.free, self.ledger.total),
            "get_device_properties": lambda *_: self.card.properties, "is_available": lambda: True,
        }  # fmt: skip
        with ExitStack() as stack:
            for name, fake in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, fake))
            for name in HOST_READS:
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._reading(getattr(torch.Tensor, name))))
            for kind in (InterpretedFunction, JITFunction):
                stack.enter_context(mock.patch.object(kind, "run", self._runner()))
            stack.enter_context(torch.inference_mode())
            stack.enter_context(self)
            yield self

    @contextmanager
    def launching(self) -> Iterator[None]:
        """The host puts a step on the queue: it may not wait, nor may a kernel be compiled."""
        before = self.timeline.may_wait, self.copies.launching, self.compiles
        self.timeline.may_wait, self.copies.launching, self.compiles = False, True, False
        try:
            yield
        finally:
            self.timeline.may_wait, self.copies.launching, self.compiles = before
        self.check()

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """What is launched inside, which is not carried out for the step itself."""
        assert self.recording is None, "one recording at a time"
        self.recording = recording = Recording(self.blocks)
        try:
            yield recording
        finally:
            self.recording = None

    def check(self) -> None:
        """Raises what went wrong where nothing could be raised."""
        if self._faults:
            raise self._faults.pop(0)

    def replayed(self, graph: FakeGraph) -> None:
        if graph.recording is None:
            raise GraphFault("a graph is replayed that was never captured")
        graph.recording.check_alive()
        self.timeline.tick()
        for block in graph.recording.outside.values():
            self._use(block)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        self.check()
        pinned = kwargs.pop("pin_memory", False)
        leaves = _leaves((*args, *kwargs.values()))
        device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)]
        for tensor in host:
            self.copies.check_read(tensor)
        if name in MOVES and (target := _named(func, args, kwargs, "device")) is not None:
            if torch.device(target).type == "cuda" and host:
                kind = _named(func, args, kwargs, "dtype") or host[0].dtype
                made = DeviceTensor(torch.empty(host[0].shape, dtype=kind, device=META))
                self._track(made)
                return self.copies.copy(made, host[0], bool(_named(func, args, kwargs, "non_blocking")))
            if torch.device(target).type == "cpu" and device:
                raise HostSync("a tensor of the device is brought to the host at once")
        if name == "copy_" and host and device:
            return self.copies.copy(*args, **kwargs)
        if not device and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            out = func(*args, **kwargs)
            if pinned:
                self.copies.pin(out)
            return out
        if host:
            shapes = [tuple(tensor.shape) for tensor in host]
            raise MixedDevices(f"{name} of {shapes} on the host and a tensor of the device")
        if name in WAITING or (name == "index" and _has_mask(args[1])):
            raise HostSync(f"{name} of a tensor of the device")
        if name == "add" and len({(tensor.shape, tensor.dtype) for tensor in device}) == 1 and len(device) == 2:
            # torch computes the shape in Python, and imports its compiler for that, which takes seconds.
            out = torch.empty_like(device[0].meta)
        else:
            out = func(*metas(args), **dict(zip(kwargs, metas([*kwargs.values()]), strict=True)))
        same = {id(tensor.meta): tensor for tensor in device}  # what is handed back as it is
        wrapped = _wrapped(out, same)
        self._ran(name, leaves, device, [leaf for leaf in _leaves((wrapped,)) if isinstance(leaf, Tensor)])
        return wrapped

    def _ran(self, name: str, leaves: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Of an operation on the device: its new tensors are tracked, and it is one more thing on the stream."""
        new = [tensor for tensor in outputs if self.blocks.is_new(tensor)]
        for tensor in new:
            self._track(tensor)
        writes = name.endswith("_")
        if not inputs or name.startswith(("new_empty", "empty")):
            is_kernel = name in ("zeros", "ones", "full", "arange")
        else:
            is_kernel = bool(new) or writes
        if not is_kernel:
            return
        self.timeline.tick()
        for tensor in (*inputs, *new):
            self._use(self.blocks.of(tensor))
        if self.recording is not None:
            self.recording.operation(name, [leaf for leaf in leaves if not isinstance(leaf, torch.device)], new)

    def _track(self, tensor: Tensor) -> None:
        block = self.blocks.add(tensor, pool=self._capture_pool, stream=self.timeline.current.number)
        if self._capture_pool is not None:
            block.stream = self.timeline.main.number  # a graph's memory is used where it is replayed
        if self.recording is not None:
            self.recording.made(block)

    def _use(self, block: Allocation) -> None:
        """The current stream's newest operation reads or writes a block."""
        if self.timeline.capturing:
            return
        stream = self.timeline.current
        for other, number in block.uses.items():
            if other != stream.number and stream.clock.get(other, 0) < number:
                raise Race(f"a block of {block.num_bytes} bytes is used before another stream is done with it")
        block.uses[stream.number] = stream.clock.get(stream.number, 0)

    def _freed(self, block: Allocation) -> None:
        for stream, number in block.uses.items():
            if stream in (block.stream, *block.recorded) or self.timeline.host.get(stream, 0) >= number:
                continue
            self._faults.append(Race("memory is freed while a stream uses that record_stream() was not told of"))

    def _told_of(self, stream: FakeStream, tensor: Tensor) -> None:
        """Tensor.record_stream()"""
        self.blocks.of(tensor).recorded.add(stream.number)

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.copies.check_read(tensor)
            return read(tensor, *args, **kwargs)

        return checked

    def _runner(self) -> Callable[..., None]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launched(Launch(kernel, grid, args, kwargs, self.blocks.contents))

        return run

    def _launched(self, launch: Launch) -> None:
        self.check()
        contracts.check(launch)
        key = launch.specialisation()
        if key not in self.compiled:
            if self.timeline.capturing:
                raise GraphFault(f"{launch.name} is compiled inside a capture: {key}")
            if not self.compiles:
                raise launch.fault(f"it is compiled while requests wait: nothing like it was warmed up: {key}")
            self.compiled.add(key)
        self.launches[launch.name] = self.launches.get(launch.name, 0) + 1
        self.timeline.tick()
        for tensor in launch.tensors().values():
            self._use(self.blocks.of(tensor))
        if self.recording is not None:
            self.recording.launch(launch)

    @contextmanager
    def _capture(self, graph: FakeGraph, pool: tuple[int, int] | None = None) -> Iterator[None]:
        """torch.cuda.graph()"""
        if self.copies.launching:
            raise GraphFault("a graph is captured while requests wait")
        if graph.recording is not None:
            raise GraphFault("a graph is captured twice")
        self.timeline.synchronize()
        graph.pool_number = pool[0] if pool is not None else len(self.graphs) + 1
        self._capture_pool = graph.pool_number
        with self.recorded() as recording, self.timeline.on(self._capture_stream):
            self.timeline.capturing = True
            try:
                yield
            finally:
                self.timeline.capturing = False
                self._capture_pool = None
        graph.recording = recording
        self.graphs.append(graph)

    def _reset_peak(self, *_: object) -> None:
        self.ledger.peak = self.ledger.allocated


def _named(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """An argument of an operator, however it was given."""
    if name in kwargs:
        return kwargs[name]
    names = [argument.name for argument in func._schema.arguments]
    return args[names.index(name)] if name in names and names.index(name) < len(args) else None


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _leaves(values: Sequence[Any]) -> list[Any]:
    """Arguments of an operator, those in lists too."""
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, list | tuple) else [value]
    return found


def _wrapped(out: Any, same: dict[int, DeviceTensor]) -> Any:
    if isinstance(out, Tensor):
        return same[id(out)] if id(out) in same else DeviceTensor(out)
    return type(out)(_wrapped(part, same) for part in out) if isinstance(out, list | tuple) else out
