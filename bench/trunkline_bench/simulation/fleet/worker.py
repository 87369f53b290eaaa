"""One worker of the fleet: the real engine loop on a clock of its own, driven up to a time by the fleet."""

from collections import deque
from collections.abc import Callable

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.v1.worker_pb2 import LoadSample, Submit
from trunkline_bench.simulation.replay import StatsOfAllTime, Worker, simulated_engine
from trunkline_bench.simulation.simulated_executor import VirtualClock
from trunkline_worker.cache_mirror import LOAD_INTERVAL_S
from trunkline_worker.stats import StepCounts
from trunkline_worker.submission import Prompt

BUSY_BIN_S = 10.0
NEVER_S = float("inf")


class FleetStats(StatsOfAllTime):
    """And how busy the device was, over time."""

    def __init__(self, now_s: float) -> None:
        super().__init__(now_s)
        self.busy_s = [0.0]  # by bins of BUSY_BIN_S: steps that ended in them

    def step(self, counts: StepCounts, now_s: float) -> None:
        super().step(counts, now_s)
        number = int(now_s / BUSY_BIN_S)
        while len(self.busy_s) <= number:
            self.busy_s.append(0.0)
        self.busy_s[number] += counts.device_time_s


class FleetWorker:
    """See the module.

    on_step: hears of every EngineStep, and when; on_load: of load samples, at the times at which the worker's front
    sends them: at most one every LOAD_INTERVAL_S, the newest there is. That the times are fixed, rather than counted
    from the first change, lets an engine that repeats its plans tell what one that does not would tell.
    load_phase_s: the first of these times
    """

    def __init__(
        self,
        spec: Worker,
        on_step: Callable[[float, EngineStep], None],
        on_load: Callable[[float, LoadSample], None],
        *,
        load_phase_s: float = 0.0,
    ) -> None:
        self.stats = FleetStats(0.0)
        self.clock = VirtualClock()
        self._output_lengths: dict[int, int] = {}
        self.engine, self._executor = simulated_engine(spec, self.clock, self._output_lengths, self.stats)
        self._on_step = on_step
        self._on_load = on_load
        # On their way, with the times when they are there, and with their prompts.
        self._submits: deque[tuple[float, Submit, Prompt]] = deque()
        self._next_s = NEVER_S  # when the engine has something to do again, unless a submit comes first
        self._load: LoadSample | None = None  # not sent yet
        self._load_at_s = load_phase_s
        self.due_s = NEVER_S  # when advance() has something to do again: asked at every event of the whole fleet

    @property
    def has_work(self) -> bool:
        """Whether anything is left to happen here."""
        return bool(self._submits) or self.engine.has_work

    @property
    def busy_s(self) -> float:
        """How long its device has computed so far."""
        return self.stats.total.device_time_s

    def submit(self, at_s: float, submit: Submit, prompt: Prompt, output_tokens: int) -> None:
        """Will be there at a time that is no earlier than any submit's before, nor than advance() has been told of."""
        self._output_lengths[submit.handle] = output_tokens
        self._submits.append((at_s, submit, prompt))
        self.due_s = min(self.due_s, self.next_s)

    @property
    def next_s(self) -> float:
        """When something happens here next; it has not happened yet."""
        if not self._submits:
            return self._next_s
        # What came while a step was collected is seen after it.
        return min(self._next_s, max(self._submits[0][0], self.clock.now_s))

    def advance(self, until_s: float) -> None:
        """Lets everything happen that begins before a time. What has been begun is told of as it ends.

        Nothing may be submitted later that would be there before `until_s`.
        """
        while True:
            event_s = self.next_s
            if self._load is not None and self._load_at_s < min(event_s, until_s):
                self._send_load()
            elif event_s >= until_s:
                self.due_s = event_s if self._load is None else min(event_s, self._load_at_s)
                return
            else:
                self.clock.advance_to(event_s)
                self._run(until_s)

    def _run(self, until_s: float) -> None:
        """From an event on to where nothing is to be done, or the time is over; then `_next_s` says when to go on."""
        clock, engine, submits = self.clock, self.engine, self._submits
        while clock.now_s < until_s:
            if self._load is not None and self._load_at_s <= clock.now_s:
                self._send_load()
            while submits and submits[0][0] <= clock.now_s:
                _, submit, prompt = submits.popleft()
                engine.submit(submit, prompt)
            if not engine.has_work:
                self._next_s = NEVER_S
                return
            # Repeated plans stop where somebody may want to know how it stands.
            known_s = min(until_s, submits[0][0]) if submits else until_s
            engine.next_arrival_s = min(known_s, self._next_load_s())
            step = engine.step()
            if step is not None:
                self._tell(step)
            elif engine.is_waiting:
                wakes_s, now_s = engine.wakes_s(), clock.now_s
                self._next_s = done_s if (done_s := self._executor.next_done_s) > now_s else NEVER_S
                if wakes_s is not None and wakes_s > now_s:
                    self._next_s = min(self._next_s, wakes_s)
                if self._next_s == NEVER_S and not submits:
                    raise RuntimeError(f"an engine is stuck at {clock.now_s:.3f} s: it has work and waits for nothing")
                return
        self._next_s = clock.now_s

    def _next_load_s(self) -> float:
        """When the next sample is sent, or would be if there were something to say."""
        if self._load is None and self._load_at_s <= self.clock.now_s:
            periods = int((self.clock.now_s - self._load_at_s) / LOAD_INTERVAL_S) + 1
            self._load_at_s += periods * LOAD_INTERVAL_S
        return self._load_at_s

    def _tell(self, step: EngineStep) -> None:
        now_s = self.clock.now_s
        if self._load is not None and self._load_at_s < now_s:
            self._send_load()
        self._next_load_s()
        self._load = step.load
        for output in step.outputs:
            if output.finish_reason or output.HasField("error"):
                del self._output_lengths[output.handle]
        self._on_step(now_s, step)

    def _send_load(self) -> None:
        assert self._load is not None
        self._on_load(self._load_at_s, self._load)
        self._load = None
        self._load_at_s += LOAD_INTERVAL_S
