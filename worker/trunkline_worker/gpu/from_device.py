"""A step's results on their way to the host, copied on a stream of their own while the next step computes."""

import torch
from torch import Tensor


class FromDevice:
    """Copies tensors to the host, and measures a step's time. One for all steps of a device.

    The copies wait for what was put on the current stream before them, and for nothing that comes after.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def event(self) -> "torch.cuda.Event | None":
        """A mark on the current stream; None where there is no stream: a CPU."""
        if self._stream is None:
            return None
        # Waiting for it sleeps: the thread that waits must not keep a core, or the interpreter, busy.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def send(self, tensors: list[Tensor]) -> "Arriving":
        """The tensors, as they will be when the current stream has come to here."""
        computed = self.event()
        if self._stream is None or computed is None:
            return Arriving(tensors, None, None)
        self._stream.wait_event(computed)
        with torch.cuda.stream(self._stream):
            hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            arrived = self.event()
        return Arriving(hosts, computed, arrived)


class Arriving:
    """Tensors that will have arrived when wait() returns."""

    def __init__(
        self, tensors: list[Tensor], computed: "torch.cuda.Event | None", arrived: "torch.cuda.Event | None"
    ) -> None:
        self._tensors = tensors
        self._computed = computed
        self._arrived = arrived

    def wait(self) -> list[Tensor]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors

    def seconds_since(self, start: "torch.cuda.Event | None") -> float:
        """From a mark until what was sent had been computed; after wait(). 0 on a CPU."""
        return start.elapsed_time(self._computed) / 1e3 if start is not None and self._computed is not None else 0.0
