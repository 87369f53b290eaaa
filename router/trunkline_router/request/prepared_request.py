"""A prepared request: checked, complete, and ready to be routed and sent."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from trunkline.ledger import Ledger
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.inference_pb2 import PromptInfo
from trunkline.v1.worker_pb2 import Submit
from trunkline_router.access.caller import Scheduling
from trunkline_router.routing.route_request import RouteRequest
from trunkline_runtime.telemetry.trace_context import TraceContext

FIRST_LANE = Lane.LANE_INTERACTIVE  # once: the enum looks up each name that it is asked for


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be sent to any worker of its model."""

    request_id: str
    model: str
    prompt: "array[int]"  # four bytes a token: it is kept until the request ends
    sampling: SamplingParams  # every default filled in, seed included
    choices: int
    scheduling: Scheduling
    most_output_tokens: int  # of a choice: max_tokens, or what the largest worker can hold after the prompt
    vocab_size: int
    affinity_key: str = ""  # equal for requests of one conversation; "": none

    @property
    def seed(self) -> int:
        return self.sampling.seed

    def prompt_info(self) -> PromptInfo:
        """Returns what the client is told of the prompt, as far as it is known before a worker has it."""
        return PromptInfo(model=self.model, prompt_tokens=len(self.prompt), seed=self.seed, lane=self.scheduling.lane)

    def least_room(self, num_output: int = 0) -> int:
        """Returns how many tokens a worker must be able to hold to answer the request, or to continue it after
        `num_output` tokens. Workers of one model may differ in memory."""
        wanted = self.sampling.max_tokens if self.sampling.HasField("max_tokens") else num_output + 1
        return len(self.prompt) + wanted

    def route_request(self, now_s: float, output: "array[int] | None" = None) -> RouteRequest:
        """Returns the request for the routing policy; `output`: tokens generated so far."""
        lane = self.scheduling.lane - FIRST_LANE
        return RouteRequest(
            self.prompt if output is None else self.prompt + output,
            now_s,
            salt=self.scheduling.cache_salt,
            lane=lane,
            choices=self.choices,
            may_use_cache=not self.sampling.HasField("prompt_logprobs"),
            affinity_key=self.affinity_key,
        )

    def submits(
        self,
        choices: Iterable[tuple[int, Ledger]],
        *,
        timeout_ns: int | None,
        trace: TraceContext,
        previous_traceparent: str = "",
        prompt_known: bool = False,
        suspect: bool = False,
    ) -> list[Submit]:
        """Returns one Submit per choice, which continues where its ledger ends.

        trace: of the attempt's span. previous_traceparent: of the attempt before; "": there was none
        prompt_known: the prompt's report has arrived already; suspect: the request may have killed a worker
        """
        submits, traceparent = [], trace.traceparent
        for choice, ledger in choices:
            submit = Submit(
                request_id=self.request_id,
                choice=choice,
                prompt_token_ids=self.prompt,
                sampling=self.sampling,
                resume=ledger.resume(),
                cache_salt=self.scheduling.cache_salt,
                traceparent=traceparent,
                tracestate=trace.tracestate,
                lane=self.scheduling.lane,
                tenant=self.scheduling.tenant,
                tenant_weight=self.scheduling.weight,
                suspect=suspect,
            )
            if previous_traceparent and submit.HasField("resume"):
                submit.resume.traceparent = previous_traceparent
            if choice > 0 or prompt_known:
                submit.sampling.ClearField("prompt_logprobs")  # the same for every choice, so computed once
            if timeout_ns is not None:
                submit.timeout.FromNanoseconds(timeout_ns)
            submits.append(submit)
        return submits
