"""The worker's front: everything between the RPCs and the engine process."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from opentelemetry.trace import Span
from tokenizers import Tokenizer

from trunkline.answer.answer_parser import PARSERS
from trunkline.capabilities import Capabilities
from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineStep
from trunkline.names import finish_name
from trunkline.status import RequestRefused, deadline_exceeded, internal, no_worker
from trunkline.v1.worker_pb2 import GetModelResponse, GetStatsResponse, LoadSample, SequenceOutput, Submit, Timeline
from trunkline.validation import max_total_tokens, validate_submit
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry import genai
from trunkline_runtime.tracing import start_span
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.choice import Choice, Deliver, FrontQueue, are_of_one_request
from trunkline_worker.front.telemetry.timeline import ChoiceEnd, ChoiceTimeline, StepTimes, end_spans, take_step
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics
from trunkline_worker.front.text.output_stream import OutputStream
from trunkline_worker.front.text.token_texts import TokenTexts
from trunkline_worker.link.engine_link import EngineLink
from trunkline_worker.step.lanes import Lane, lane_of, queue_full

# Retry delay of a refusal before the engine has first reported its own.
UNKNOWN_RETRY_DELAY_MS = 1000


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of a drain: choices that finished, and choices that were cut off."""

    finished: int
    aborted: int


class Front:
    """Keeps one Choice per unfinished submit, of a session or a direct call, from validation to its last output.

    Every end of a choice goes through `_end`, so that none is left behind. `model` is the engine's report with the
    worker's names filled in; `now_s` must be the clock of the engine's steps; `metrics`: None if none are served.
    """

    def __init__(
        self,
        model: GetModelResponse,
        tokenizer: Tokenizer,
        mirror: CacheMirror,
        now_s: Callable[[], float] = time.perf_counter,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self.model = model
        self.capabilities = Capabilities.of(model)
        self.mirror = mirror
        self.draining = False
        self.dead = asyncio.Event()  # the engine has ended
        self._link: EngineLink | None = None
        marks = PARSERS[model.answer_format].marks() if model.answer_format else ()
        self._texts = TokenTexts(tokenizer, marks)
        self._eos = frozenset(model.eos_token_ids)
        self._choices: dict[int, Choice] = {}
        self._times = StepTimes(model.itl_target_ms / 1e3)
        self._now_s = now_s
        self._metrics = metrics
        self._waiting = FrontQueue(model.max_waiting_requests, model.max_waiting_tokens)
        self._retry_delays_ms: list[int] = []  # by lane, as last reported by the engine
        self._refused = [0 for _ in Lane]  # submits refused by a full queue, without asking the engine
        self._next_handle = 0
        self._last_handle = 0  # the newest one that the engine has received
        self._idle = asyncio.Event()
        self._idle.set()
        self._undrained = asyncio.Event()  # of the present drain; each has its own
        self._log = get_logger()

    def connect(self, link: EngineLink) -> None:
        """Connects the front to its engine. Until then, submit() and stats() refuse."""
        self._link = link

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    def is_idle(self) -> bool:
        """Whether no choice is unfinished."""
        return not self._choices

    def submit(self, submit: Submit, deliver: Deliver) -> Choice | None:
        """Starts a choice and passes its outputs to `deliver` on this thread; the last has a finish or an error.

        Returns None if the ledger already was the complete answer. Raises RequestRefused (NO_WORKER) if the engine has
        ended or the worker drains, (OVERLOADED) if the queue is full, or for an invalid submit.
        """
        if self.dead.is_set() or self._link is None:
            raise no_worker("this worker's engine has ended")
        if self.draining:
            raise no_worker("this worker is draining")
        validate_submit(submit, self.model, self.capabilities)
        ledger = submit.resume.output_token_ids
        if not ledger:
            self._check_queue(submit)
        stream = OutputStream(
            submit,
            self._texts,
            eos=self._eos,
            max_total=max_total_tokens(self.model),
            activation=self.model.pooling.activation,
        )
        complete = stream.ledger_output()
        if complete is not None:
            deliver(complete)
            return None
        if ledger:  # only now, because a complete ledger does not enter the queue
            self._check_queue(submit)
        choice = self._begin(submit, stream, deliver)
        engine_submit = Submit()
        engine_submit.CopyFrom(submit)
        engine_submit.handle = choice.handle
        self._link.submit(engine_submit)
        return choice

    def _check_queue(self, submit: Submit) -> None:
        """Raises RequestRefused if the queue is full, without waiting for the engine's step. Called before anything is
        created for the request, because refusing must stay cheap."""
        lane = lane_of(submit.lane)
        if self._waiting.admits(lane, submit.tenant, submit.tenant_weight or 1.0, _num_tokens(submit)):
            return
        delay_ms = self._retry_delays_ms[lane] if self._retry_delays_ms else UNKNOWN_RETRY_DELAY_MS
        self._refused[lane] += 1
        if self._metrics is not None:
            self._metrics.refused(lane)
        raise queue_full(lane, self._waiting.count, delay_ms)

    def _begin(self, submit: Submit, stream: OutputStream, deliver: Deliver) -> Choice:
        """Creates a choice, puts it into the queue, and starts its deadline."""
        self._next_handle += 1
        received_s, received_unix_ns = self._now_s(), time.time_ns()
        lane = lane_of(submit.lane)
        choice = Choice(
            handle=self._next_handle,
            caller_handle=submit.handle,
            request_id=submit.request_id,
            tenant=submit.tenant,
            lane=lane,
            number=submit.choice,
            stream=stream,
            deliver=deliver,
            span=self._start_span(submit, received_unix_ns),
            timeline=ChoiceTimeline(received_s, received_unix_ns),
            num_prompt=len(submit.prompt_token_ids),
            num_ledger=len(submit.resume.output_token_ids),
            suspect=submit.suspect,
        )
        if submit.HasField("timeout"):
            after_s = submit.timeout.ToNanoseconds() / 1e9
            loop = asyncio.get_running_loop()
            choice.deadline = loop.call_later(after_s, self._break_off, choice, deadline_exceeded())
        self._choices[choice.handle] = choice
        self._waiting.put(choice.handle, lane, submit.tenant, submit.tenant_weight or 1.0, _num_tokens(submit))
        self._idle.clear()
        return choice

    def _start_span(self, submit: Submit, received_unix_ns: int) -> Span:
        return start_span(
            "worker.generate",
            traceparent=submit.traceparent,
            tracestate=submit.tracestate,
            attributes={
                genai.REQUEST_MODEL: self.model.model,
                "trunkline.request_id": submit.request_id,
                "trunkline.worker": self.model.worker_id,
                "trunkline.tenant": submit.tenant,
                "trunkline.choice": submit.choice,
            },
            linked_traceparent=submit.resume.traceparent,
            start_unix_ns=received_unix_ns,
        )

    def cancel(self, choice: Choice) -> None:
        """Ends a choice that its caller no longer needs. Does nothing if it has ended."""
        if choice.handle in self._choices:
            self._abort_in_engine(choice)
            self._end(choice, "cancelled")

    def on_step(self, step: EngineStep) -> None:
        """Takes the results of one engine step."""
        self._last_handle = max(self._last_handle, step.last_handle)
        for handle in step.admitted_handles:
            self._waiting.admitted(handle)
        take_step(step, self._times, self._timeline_of)
        if self._metrics is not None:
            self._metrics.take_step(step)
        for output in step.outputs:
            if output.HasField("prompt"):
                self._take_first(output)
            self._take(output)
        for handle, token_id in zip(step.token_handles, step.token_ids, strict=True):
            self._take(EngineOutput(handle=handle, token_ids=[token_id]))
        if step.cache_events:
            self.mirror.apply(list(step.cache_events))
        self._retry_delays_ms = list(step.load.retry_delay_ms_by_lane)
        self._publish_load(step.load)

    def _take(self, output: EngineOutput) -> None:
        """Takes the engine's output of one choice."""
        choice = self._choices.get(output.handle)
        if choice is None:
            return  # it was cancelled
        if output.trace:
            self._log.error("a bug in the engine ended a request", request_id=choice.request_id, trace=output.trace)
        try:
            result = choice.take(output, self._now_s, self._times)
            if choice.stream.finished and not output.finish_reason:
                assert self._link is not None
                self._link.finish(choice.handle)  # the engine does not see stop strings
            choice.steps += not output.HasField("error")
            if choice.stream.finished or output.HasField("error"):
                result.timeline.CopyFrom(self._ended(choice))
            choice.deliver(result)
        except Exception as error:  # a bug must end this choice only
            self._log.error("unexpected error", request_id=choice.request_id, exc_info=error)
            self._break_off(choice, internal(choice.request_id))
            return
        if result.HasField("error"):
            self._end(choice, result.error.reason)
        elif choice.stream.finished:
            self._end(choice, finish_name(choice.stream.finish))

    def _take_first(self, output: EngineOutput) -> None:
        """Notes the first token of a choice."""
        choice = self._choices.get(output.handle)
        if choice is None:
            return
        choice.timeline.add_first_token(self._times)
        if self._metrics is not None:
            self._metrics.first_token(choice.lane, self._now_s() - choice.timeline.received_s, output.prompt)

    def _timeline_of(self, handle: int) -> ChoiceTimeline | None:
        choice = self._choices.get(handle)
        return None if choice is None else choice.timeline

    def _ended(self, choice: Choice) -> Timeline:
        """The timeline of a choice that ends now. Later calls return the same."""
        if choice.ended is None:
            choice.ended = choice.timeline.end(
                self._now_s(),
                num_outputs=choice.steps,
                cached_tokens=choice.stream.cached_tokens,
                times=self._times,
            )
        return choice.ended

    async def stats(self) -> GetStatsResponse:
        """Returns the engine's statistics. Raises RequestRefused (NO_WORKER) if the engine has ended."""
        if self.dead.is_set() or self._link is None:
            raise no_worker("this worker's engine has ended")
        # A copy, because several callers may get the same answer.
        stats = GetStatsResponse()
        stats.CopyFrom(await self._link.stats())
        for counts in stats.lanes:
            counts.refused += self._refused[lane_of(counts.lane)]
        return stats

    def on_engine_death(self, reason: str) -> None:
        """Ends every stream with an error, and marks those that may have killed the engine as suspects."""
        in_flight = self._in_flight()
        self._log.error("engine died", reason=reason, choices=len(self._choices), in_step=len(in_flight))
        self.dead.set()
        self.draining = True  # tells routers until this process ends that it takes no more requests
        self._publish_load(self.mirror.load)
        refused = no_worker("the worker's engine ended while it computed this request")
        unproven = [choice for choice in in_flight if not choice.is_proven]
        for choice in list(self._choices.values()):
            suspect = choice in in_flight
            sole = suspect and choice.suspect and are_of_one_request([*unproven, choice])
            self._break_off(choice, refused, suspect=suspect, sole_suspect=sole)

    def _in_flight(self) -> set[Choice]:
        """Returns the choices that may have killed the engine: in its last steps, or not known to be received."""
        in_flight = set() if self._link is None else self._link.in_flight()
        return {
            choice
            for choice in self._choices.values()
            if choice.handle in in_flight or choice.handle > self._last_handle
        }

    def drain(self, timeout_s: float) -> Awaitable[Drained]:
        """Admits no more submits from now on. The result waits up to `timeout_s` for running choices, and cuts off the
        rest; if undrain() is called meanwhile, it comes at once, and nothing is cut off. May be called again."""
        if not self.draining:
            self._undrained = asyncio.Event()
        self.draining = True
        self._publish_load(self.mirror.load)
        return self._drained(timeout_s, set(self._choices), self._undrained)

    async def _drained(self, timeout_s: float, begun: set[int], undrained: asyncio.Event) -> Drained:
        over = [asyncio.create_task(event.wait()) for event in (self._idle, undrained)]
        try:
            await asyncio.wait(over, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in over:
                task.cancel()
        left = begun & self._choices.keys()
        if undrained.is_set():
            return Drained(finished=len(begun - left), aborted=0)
        if left:
            self._log.warning("drain timed out", choices=len(left))
        for choice in list(self._choices.values()):
            self._break_off(choice, no_worker("this worker is draining and ended the request"))
        return Drained(finished=len(begun - left), aborted=len(left))

    def undrain(self) -> None:
        """Admits submits again, and ends the drains in progress."""
        self.draining = False
        self._undrained.set()
        self._publish_load(self.mirror.load)

    def _publish_load(self, load: LoadSample) -> None:
        load.draining = self.draining
        self.mirror.set_load(load)

    def _break_off(
        self, choice: Choice, refused: RequestRefused, *, suspect: bool = False, sole_suspect: bool = False
    ) -> None:
        """Ends a choice with an error. For `suspect` and `sole_suspect`, see SequenceOutput."""
        if choice.handle not in self._choices:
            return
        self._abort_in_engine(choice)
        output = SequenceOutput(
            handle=choice.caller_handle,
            error=refused.to_proto(),
            suspect=suspect,
            sole_suspect=sole_suspect,
            begun=not self._waiting.holds(choice.handle),
            timeline=self._ended(choice),
        )
        try:
            choice.deliver(output)
        except Exception as error:  # must not keep other callers from getting their errors
            self._log.error("unexpected error", request_id=choice.request_id, exc_info=error)
        self._end(choice, refused.reason)

    def _abort_in_engine(self, choice: Choice) -> None:
        if self._link is not None and not self.dead.is_set():
            self._link.abort(choice.handle)

    def _end(self, choice: Choice, outcome: str) -> None:
        """Removes a choice and all its state; every end goes through here. Does nothing if the choice has ended: the
        delivery of its last output may have shown that its caller does not read, and cancelled all its choices."""
        if self._choices.pop(choice.handle, None) is None:
            return
        self._waiting.left(choice.handle)
        if not self._choices:
            self._idle.set()
        if choice.deadline is not None:
            choice.deadline.cancel()
        end = ChoiceEnd(
            request_id=choice.request_id,
            tenant=choice.tenant,
            lane=choice.lane,
            outcome=outcome,
            prompt_tokens=choice.num_prompt,
            ledger_tokens=choice.num_ledger,
            output_tokens=choice.stream.num_tokens,
            timeline=self._ended(choice),
            span=choice.span,
        )
        end_spans(end)
        if self._metrics is not None:
            self._metrics.choice_ended(end)
        self._log.info("choice ended", **end.log_fields())


def _num_tokens(submit: Submit) -> int:
    """Tokens of the prompt and the ledger."""
    return len(submit.prompt_token_ids) + len(submit.resume.output_token_ids)
