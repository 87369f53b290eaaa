"""Streams and events without a device: what comes before what, as vector clocks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tests.worker.device.faults import HostSync

Clock = dict[int, int]  # by stream: number of its last operation that is certainly done, or comes before


class FakeStream:
    """A queue of the device."""

    def __init__(self, timeline: "Timeline", number: int) -> None:
        self._timeline = timeline
        self.number = number
        self.clock: Clock = {}

    def wait_event(self, event: "FakeEvent") -> None:
        merge(self.clock, event.recorded)

    def wait_stream(self, stream: "FakeStream") -> None:
        merge(self.clock, stream.clock)

    def synchronize(self) -> None:
        self._timeline.wait(self.clock, "Stream.synchronize()")

    def told_of(self, tensor: Tensor) -> None:
        """Tensor.record_stream(): the tensor's memory is not used again before this stream is done with it."""
        self._timeline.told_of(self, tensor)


class FakeEvent:
    """A mark on a stream."""

    def __init__(self, timeline: "Timeline", *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timeline = timeline
        self._timing = enable_timing
        self._recorded: Clock | None = None

    @property
    def recorded(self) -> Clock:
        assert self._recorded is not None, "this event was never recorded"
        return self._recorded

    def record(self, stream: FakeStream | None = None) -> None:
        assert not self._timeline.capturing, "an event inside a capture marks nothing outside it"
        chosen = stream or self._timeline.current
        self._timeline.tick(chosen)
        self._recorded = dict(chosen.clock)

    def synchronize(self) -> None:
        self._timeline.wait(self.recorded, "Event.synchronize()")

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Milliseconds; an error where either is not known to be done, as on a device."""
        for event in (self, end):
            assert event._timing, "this event keeps no time"
            if not covers(self._timeline.host, event.recorded):
                raise HostSync("elapsed_time() of events that were not waited for")
        return 1.0


class Timeline:
    """All streams of a device, and what the host knows to be done."""

    def __init__(self, waited: Callable[[], None], told_of: Callable[[FakeStream, Tensor], None]) -> None:
        self._waited = waited  # called when the host knows more
        self.told_of = told_of
        self._count = 0
        self.main = self.stream()
        self.current = self.main
        self.host: Clock = {}
        self.may_wait = True
        self.capturing = False

    def stream(self, *_: Any, **__: Any) -> FakeStream:
        self._count += 1
        return FakeStream(self, self._count)

    def event(self, **options: Any) -> FakeEvent:
        return FakeEvent(self, **options)

    def tick(self, stream: FakeStream | None = None) -> tuple[int, int]:
        """One more operation on a stream → (stream, number)"""
        chosen = stream or self.current
        chosen.clock[chosen.number] = chosen.clock.get(chosen.number, 0) + 1
        return chosen.number, chosen.clock[chosen.number]

    def wait(self, clock: Clock, how: str) -> None:
        """The host waits until all this is done."""
        if not self.may_wait:
            raise HostSync(f"{how} while a step is being launched")
        if self.capturing:
            raise HostSync(f"{how} inside a capture")
        merge(self.host, clock)
        self._waited()

    def synchronize(self, *_: Any) -> None:
        everything: Clock = {}
        for stream in (self.main, self.current):
            merge(everything, stream.clock)
        self.wait(everything, "torch.cuda.synchronize()")

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(stream, 0) >= number for stream, number in other.items())
