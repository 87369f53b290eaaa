"""What was put on a stream, so that a captured graph can be compared with what a step would launch by itself."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.worker.device.contracts import MAY_EXCEED
from tests.worker.device.faults import GraphFault
from tests.worker.device.launches import Launch
from tests.worker.device.memory import Allocation, Allocations


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation: a kernel of ours with its grid, or one of torch."""

    name: str
    grid: tuple[int, ...]
    arguments: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Recording:
    """Operations in order. Tensors made inside are named by when they were made, others by where they lie."""

    blocks: Allocations
    entries: list[Entry] = field(default_factory=list)
    inside: dict[int, int] = field(default_factory=dict)  # blocks by number: place in the order
    outside: dict[int, Allocation] = field(default_factory=dict)  # by number

    def made(self, block: Allocation) -> None:
        self.inside[block.number] = len(self.inside)

    def launch(self, launch: Launch) -> None:
        named = [(name, self._named(value)) for name, value in (launch.arguments | launch.options).items()]
        self.entries.append(Entry(launch.name, launch.grid, tuple(named)))

    def operation(self, name: str, leaves: Iterable[Any], outputs: Iterable[Tensor]) -> None:
        named = [("", self._named(value)) for value in leaves]
        named += [("→", self._named(value)) for value in outputs]
        self.entries.append(Entry(name, (), tuple(named)))

    def _named(self, value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            return self._named(value.base), tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
        if not isinstance(value, Tensor):
            return value
        block = self.blocks.of(value)
        place = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
        if block.number in self.inside:
            return "inside", self.inside[block.number], *place
        self.outside[block.number] = block
        return "outside", block.number, *place

    def check_covers(self, step: "Recording") -> None:
        """Raises GraphFault unless replaying this does what `step` does."""
        if len(self.entries) != len(step.entries):
            raise GraphFault(f"{len(self.entries)} operations were captured, and the step has {len(step.entries)}")
        for number, (captured, wanted) in enumerate(zip(self.entries, step.entries, strict=True)):
            where = f"operation {number}, {captured.name}"
            if captured.name != wanted.name:
                raise GraphFault(f"{where}: the step launches {wanted.name} there")
            if captured.grid != wanted.grid and not (
                captured.name in MAY_EXCEED
                and all(has >= needs for has, needs in zip(captured.grid, wanted.grid, strict=True))
            ):
                raise GraphFault(f"{where}: a grid of {captured.grid} was captured, and the step needs {wanted.grid}")
            for (name, has), (_, needs) in zip(captured.arguments, wanted.arguments, strict=True):
                if has != needs:
                    raise GraphFault(f"{where}: {name} was captured as {has}, and the step has {needs}")

    def check_alive(self) -> None:
        for block in self.outside.values():
            if not block.alive:
                raise GraphFault(
                    f"a graph reads or writes block {block.number} ({block.num_bytes} bytes), made before it and freed"
                )


class FakeGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.recording: Recording | None = None
        self.pool_number: int | None = None
        self.replays = 0

    def pool(self) -> tuple[int, int]:
        assert self.pool_number is not None, "nothing was captured"
        return self.pool_number, 0

    def replay(self) -> None:
        self.replays += 1
        self._device.replayed(self)
