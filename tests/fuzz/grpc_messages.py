"""Messages for every RPC of the router, made from the contract's own descriptors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from tests.fuzz.json_bodies import TEXTS
from trunkline.v1.fleet_pb2 import (
    DrainWorkerRequest,
    ExplainRouteRequest,
    GetRequestRequest,
    ListRequestsRequest,
    ListWorkersRequest,
    UndrainWorkerRequest,
    WatchFleetRequest,
)
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    DetokenizeRequest,
    EmbedRequest,
    GenerateRequest,
    GrantRequest,
    Input,
    ListModelsRequest,
    ScoreRequest,
    TokenIds,
    TokenizeRequest,
)

INFERENCE, FLEET = "/trunkline.v1.InferenceService/", "/trunkline.v1.FleetService/"
FLOATS = [0.0, -0.0, 1e-45, -1e-45, 1e-5, 0.5, 1.0, 1.0000001, 2.0, 2.1, 10.0, 100.0, 100.1, 3.4e38, -1.0, -2.0, -2.1,
          -100.0, math.inf, -math.inf, math.nan]  # fmt: skip
COUNTS = [0, 1, 2, 4, 5, 16, 17, 20, 21, 128, 129, 255, 258, 259, 4095, 4096, 4097, 2**16, 2**31 - 1]
CPP = FieldDescriptor
LONGEST = {CPP.CPPTYPE_INT32: 31, CPP.CPPTYPE_INT64: 63, CPP.CPPTYPE_UINT32: 32, CPP.CPPTYPE_UINT64: 64}
UTF8 = [text for text in TEXTS if text.isascii() or text[0] < "\ud800" or text[0] > "\udfff"]


@dataclass(frozen=True, slots=True)
class Rpc:
    """An RPC of the router.

    base: the smallest request that is answered; of DrainWorker one that is refused, because a drain has no end
    ends: whether its responses end by themselves
    """

    base: Message
    streams_requests: bool = False
    streams_responses: bool = False
    ends: bool = True


_GENERATE = GenerateRequest(text="hi", sampling=SamplingParams(max_tokens=2))
_CHAT = ChatMessages(messages=[ChatMessage(role="user", parts=[ChatPart(text="hi")])])
RPCS: Mapping[str, Rpc] = {
    INFERENCE + "Generate": Rpc(_GENERATE, streams_responses=True),
    INFERENCE + "Grant": Rpc(GrantRequest(request=_GENERATE), streams_requests=True, streams_responses=True),
    INFERENCE + "Embed": Rpc(
        EmbedRequest(inputs=[Input(text="hi"), Input(token_ids=TokenIds(ids=[100]))]), streams_responses=True
    ),
    INFERENCE + "Score": Rpc(ScoreRequest(inputs=[Input(text="hi")], queries=["ho"]), streams_responses=True),
    INFERENCE + "Tokenize": Rpc(TokenizeRequest(chat=_CHAT)),
    INFERENCE + "Detokenize": Rpc(DetokenizeRequest(token_ids=[100])),
    INFERENCE + "ListModels": Rpc(ListModelsRequest()),
    FLEET + "ExplainRoute": Rpc(ExplainRouteRequest(request=_GENERATE)),
    FLEET + "ListWorkers": Rpc(ListWorkersRequest()),
    FLEET + "WatchFleet": Rpc(WatchFleetRequest(), streams_responses=True, ends=False),
    FLEET + "ListRequests": Rpc(ListRequestsRequest()),
    FLEET + "GetRequest": Rpc(GetRequestRequest(request_id="none")),
    FLEET + "DrainWorker": Rpc(DrainWorkerRequest(worker="none")),
    FLEET + "UndrainWorker": Rpc(UndrainWorkerRequest(worker="none")),
}


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in LONGEST:
        most = 2 ** LONGEST[kind] - 1
        least = -most - 1 if kind in (CPP.CPPTYPE_INT32, CPP.CPPTYPE_INT64) else 0
        return st.sampled_from([*COUNTS, most, least, max(least, -1)])
    if kind in (CPP.CPPTYPE_FLOAT, CPP.CPPTYPE_DOUBLE):
        return st.sampled_from(FLOATS)
    if kind == CPP.CPPTYPE_BOOL:
        return st.booleans()
    if kind == CPP.CPPTYPE_ENUM:
        return st.sampled_from([0, 1, 2, 3, 4, 99, -1, 2**31 - 1])
    if field.type == CPP.TYPE_BYTES:
        return st.sampled_from([b"", b"\x00", bytes(32), b"\xff" * 33, bytes(5000)])
    return st.sampled_from(UTF8)


def _many(field: FieldDescriptor) -> st.SearchStrategy[int]:
    """How many entries a repeated field gets."""
    nested = field.cpp_type == CPP.CPPTYPE_MESSAGE
    return st.sampled_from([0, 1, 2, 3] if nested else [0, 1, 2, 5, 17, 129, 1025])


@st.composite
def requests_of(draw: st.DrawFn, base: Message) -> Message:
    """A request like the base, with some more fields."""
    made = type(base)()
    made.CopyFrom(base)
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, made, depth=0)
    return made


def _change(draw: st.DrawFn, message: Any, depth: int) -> None:
    descriptor: Descriptor = message.DESCRIPTOR
    if not descriptor.fields or depth > 6:
        return
    field = draw(st.sampled_from(list(descriptor.fields)))
    if draw(st.integers(0, 29)) == 17:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = getattr(message, field.name)
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(draw(_many(field))):
            entries[draw(_values(key))] = draw(_values(value))
    elif field.is_repeated:
        repeated = getattr(message, field.name)
        for _ in range(draw(_many(field))):
            if field.message_type is None:
                repeated.append(draw(_values(field)))
            else:
                _change(draw, repeated.add(), depth + 1)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        for _ in range(draw(st.integers(1, 3))):
            _change(draw, inner, depth + 1)
    else:
        setattr(message, field.name, draw(_values(field)))


PIECES = (b"\x00", b"\xff" * 10, b"\x80" * 11, b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x00", b"\x0b" * 40,
    b"\x22\x00" * 600,
          b"\x2a\x02\x62\x00", b"\x1a\x0c\x0a\x0a" + b"\xff" * 9 + b"\x01", b"\xc3\x28", b"\xed\xa0\x80")  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with a piece put in, or a part cut out."""
    at = draw(st.integers(0, len(whole)))
    end = draw(st.sampled_from([at, at + 1, at + 4, len(whole)]))
    return whole[:at] + draw(st.one_of(st.just(b""), st.sampled_from(PIECES), st.binary(max_size=4))) + whole[end:]
