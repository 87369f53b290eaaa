"""A front with one choice, whose clock and engine a test drives."""

from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link, Reader
from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineStep, StepRecord
from trunkline.v1.generation_pb2 import FinishReason, PromptReport, SamplingParams
from trunkline.v1.worker_pb2 import Submit, Timeline
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.front import Front
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics

LENGTH = FinishReason.FINISH_REASON_LENGTH
START_S = 1000.0


class TimedFront:
    """A front whose clock a test sets, with one choice; steps take half a second on the device."""

    def __init__(self, submit: Submit | None = None, metrics: WorkerMetrics | None = None, **sampling: object) -> None:
        self.now_s = START_S
        self.tick_s = 0.0  # by which each look at the clock moves it
        self.front = Front(MODEL, TOKENIZER, CacheMirror(1), self.clock_s, metrics)
        self.front.connect(Link())
        self.reader = Reader()
        submit = submit or Submit()
        submit.handle, submit.request_id = 7, "r"
        submit.prompt_token_ids[:] = PROMPT
        submit.sampling.CopyFrom(SamplingParams(seed=1, **sampling))  # type: ignore[arg-type]
        self.choice = self.front.submit(submit, self.reader)
        self.num_steps = 0

    def clock_s(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def step(self, token_id: int, *, finish: bool = False, error: bool = False, awaited_s: float = 0.0) -> None:
        """The engine ends a step, a second after the one before."""
        self.now_s += 1.0
        output = EngineOutput(handle=1, token_ids=[token_id], finish_reason=LENGTH if finish else 0)  # type: ignore[arg-type]
        record = StepRecord(done_s=self.now_s, device_s=0.5, decode_tokens=1, sequences=1, regular_tokens=1)
        step = EngineStep(outputs=[output], last_handle=1, record=record)
        if not self.num_steps:
            step.admitted_handles.append(1)
            step.admitted_s.append(self.now_s - 0.75)
            if awaited_s:
                step.awaited_handles.append(1)
                step.awaited_s.append(awaited_s)
            step.outputs[0].prompt.CopyFrom(PromptReport(prompt_tokens=len(PROMPT), cached_tokens=1))
            record.prefill_tokens, record.decode_tokens, record.regular_tokens = len(PROMPT) - 1, 0, 0
            record.chunk_handles.append(1)
            record.chunk_tokens.append(len(PROMPT) - 1)
            record.chunk_recomputed.append(0)
            step.record.CopyFrom(record)
        if error:
            step.outputs[0].error.reason = "INTERNAL"
            del step.outputs[0].token_ids[:]
        self.num_steps += 1
        self.front.on_step(step)

    @property
    def timeline(self) -> Timeline:
        assert not any(output.HasField("timeline") for output in self.reader.news[:-1]), "with the last output only"
        assert self.reader.news[-1].HasField("timeline")
        return self.reader.news[-1].timeline
