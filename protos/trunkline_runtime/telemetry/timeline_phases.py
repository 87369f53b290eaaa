"""The phases of a choice, as its worker's timeline tells them: the spans under worker.generate.

The worker makes them for requests that are sampled, and the router for those that turn out to be worth a look.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from opentelemetry.util.types import AttributeValue

from trunkline.v1.worker_pb2 import PrefillChunk, SampledStep, Timeline

Attributes = dict[str, AttributeValue]
Event = tuple[float, str, Attributes]  # seconds after the worker received the choice, name, attributes


class Phase(NamedTuple):
    """Times are seconds after the worker received the choice.  is_part: of the phase before it"""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes
    events: list[Event]
    is_part: bool = False


def phases_of(timeline: Timeline) -> Iterator[Phase]:
    """Yields the phases that the choice has come to: queue, prefill, decode and, within that, detokenize."""
    if not timeline.HasField("admitted_s"):
        yield Phase("queue", 0.0, timeline.ended_s, {}, [])
        return
    has_token = timeline.HasField("first_token_s")
    first_token_s = timeline.first_token_s if has_token else timeline.ended_s
    prefill = [chunk for chunk in timeline.chunks if not has_token or chunk.started_s < first_token_s]
    queue: Attributes = {"trunkline.awaited_s": timeline.awaited_s} if timeline.awaited_s else {}
    yield Phase("queue", 0.0, timeline.admitted_s, queue, [])
    attributes: Attributes = {
        "trunkline.chunks": len(prefill),
        "trunkline.computed_tokens": sum(chunk.tokens for chunk in prefill),
        "trunkline.cached_tokens": timeline.cached_tokens,
    }
    yield Phase("prefill", timeline.admitted_s, first_token_s, attributes, [_chunk_event(chunk) for chunk in prefill])
    if not has_token:
        return
    attributes = {
        "trunkline.decode_steps": timeline.decode_steps,
        "trunkline.gaps": timeline.num_gaps,
        "trunkline.longest_gap_s": timeline.longest_gap_s,
        "trunkline.preemptions": timeline.preemptions,
        "trunkline.recomputed_tokens": timeline.recomputed_tokens,
        "trunkline.detokenize_s": timeline.detokenize_s,
    }
    if timeline.decode_steps:
        attributes["trunkline.time_per_output_token_s"] = (timeline.ended_s - first_token_s) / timeline.decode_steps
    events: list[Event] = [(gap.at_s, "gap", {"trunkline.duration_s": gap.duration_s}) for gap in timeline.gaps]
    events += [_chunk_event(chunk) for chunk in timeline.chunks if chunk.started_s >= first_token_s]
    events += [(step.at_s, "step", _of_step(step)) for step in timeline.sampled_steps]
    events.sort(key=itemgetter(0))
    yield Phase("decode", first_token_s, timeline.ended_s, attributes, events)
    if timeline.detokenize_s:  # in one piece; in truth it is spread over the decode
        end_s = min(first_token_s + timeline.detokenize_s, timeline.ended_s)
        yield Phase("detokenize", first_token_s, end_s, {"trunkline.aggregated": True}, [], is_part=True)


def _chunk_event(chunk: PrefillChunk) -> Event:
    attributes: Attributes = {
        "trunkline.duration_s": chunk.duration_s,
        "trunkline.tokens": chunk.tokens,
        "trunkline.step.prefill_tokens": chunk.step_prefill_tokens,
        "trunkline.step.decode_tokens": chunk.step_decode_tokens,
        "trunkline.step.padding_tokens": chunk.step_padding_tokens,
        "trunkline.step.sequences": chunk.step_sequences,
    }
    return chunk.started_s, "chunk", attributes


def _of_step(step: SampledStep) -> Attributes:
    return {
        "trunkline.duration_s": step.duration_s,
        "trunkline.step.prefill_tokens": step.prefill_tokens,
        "trunkline.step.decode_tokens": step.decode_tokens,
        "trunkline.step.padding_tokens": step.padding_tokens,
        "trunkline.step.sequences": step.sequences,
    }
