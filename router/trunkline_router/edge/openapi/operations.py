"""The endpoints of the page: what each takes, answers and refuses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trunkline.status import (
    CONTEXT_LENGTH_EXCEEDED,
    DEADLINE_EXCEEDED,
    FORBIDDEN,
    INTERNAL,
    INVALID_REQUEST,
    MODEL_NOT_FOUND,
    NO_WORKER,
    OVERLOADED,
    QUARANTINED,
    QUOTA_EXCEEDED,
    REQUEST_NOT_FOUND,
    UNAUTHENTICATED,
    WORKER_NOT_FOUND,
)
from trunkline_router.edge.anthropic.anthropic_requests import CountRequest, MessageRequest
from trunkline_router.edge.live.fleet_endpoints import DrainBody, UndrainBody
from trunkline_router.edge.openai.chat import ChatRequest
from trunkline_router.edge.openai.completion_request import CompletionRequest
from trunkline_router.edge.openai.models_and_tokens import DetokenizeBody, TokenizeBody
from trunkline_router.edge.openapi.answer_schemas import Shape
from trunkline_router.edge.pooling.pooling_fields import (
    ClassifyRequest,
    CohereRerankRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreBody,
)
from trunkline_router.edge.request_fields import Fields
from trunkline_router.edge.responses.response_request import ResponseRequest
from trunkline_router.record.error_statuses import PAGE_FILE_NOT_FOUND, PREVIOUS_RESPONSE_NOT_FOUND, RESPONSE_NOT_FOUND

JSON = "application/json"

# Reasons of refusals. These are common to all endpoints that need credentials:
CALLER = (INVALID_REQUEST, UNAUTHENTICATED, FORBIDDEN, OVERLOADED, INTERNAL)
COUNTED = (*CALLER, CONTEXT_LENGTH_EXCEEDED, MODEL_NOT_FOUND, NO_WORKER, DEADLINE_EXCEEDED)
GENERATED = (*COUNTED, QUOTA_EXCEEDED, QUARANTINED)


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint.

    summary: one sentence
    answer: the schema of status 200, a name of the page's components; "": any object
    media_type: of the answer; of events, `answer` is their data
    refuses: reasons of the error table
    request: the body's fields; None: there is no body
    streams: with `stream: true` the answer is server-sent events
    parameters: of path and query, with descriptions and shapes, by place and name
    others: schemas of other answers than refusals, by status
    """

    summary: str
    answer: str
    refuses: tuple[str, ...] = ()
    request: type[Fields] | None = None
    streams: bool = False
    parameters: Mapping[tuple[str, str], tuple[str, Shape]] = field(default_factory=dict)
    others: Mapping[int, str] = field(default_factory=dict)
    media_type: str = JSON


_TENANT = {("query", "tenant"): ("only requests of this tenant", str)}
_WORKER = {("path", "worker"): ("its name, or host:port", str)}
_SORTS, _SCORES = "Sorts documents by their relevance for a query.", "Scores pairs of texts."
_RESPONSE = {("path", "response"): ("the id of a stored response", str)}

OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/completions": Operation(
        "Continues one or more prompts.", "Completion", GENERATED, CompletionRequest, streams=True
    ),
    "POST /v1/chat/completions": Operation(
        "Continues a conversation.", "ChatCompletion", GENERATED, ChatRequest, streams=True
    ),
    "GET /v1/models": Operation("Lists the models that the caller may use.", "ModelList", CALLER),
    "GET /v1/models/{model:path}": Operation(
        "Describes a model.",
        "Model",
        (*CALLER, MODEL_NOT_FOUND),
        parameters={("path", "model"): ("the name, which may have slashes", str)},
    ),
    "POST /v1/responses": Operation(
        "Answers a text or a conversation.",
        "Response",
        (*GENERATED, PREVIOUS_RESPONSE_NOT_FOUND),
        ResponseRequest,
        streams=True,
    ),
    "GET /v1/responses/{response}": Operation(
        "Returns a stored response.",
        "Response",
        (*CALLER, RESPONSE_NOT_FOUND),
        parameters={
            **_RESPONSE,
            ("query", "include"): ("ignored: a stored response is returned whole", [str]),
            ("query", "stream"): ("must be false: a stored response is returned whole", ("false", "0")),
            ("query", "include_obfuscation"): ("ignored", str),
        },
    ),
    "DELETE /v1/responses/{response}": Operation(
        "Deletes a stored response.", "DeletedResponse", (*CALLER, RESPONSE_NOT_FOUND), parameters=_RESPONSE
    ),
    "POST /v1/messages": Operation(
        "Continues a conversation, in Anthropic's shape.", "MessageAnswer", GENERATED, MessageRequest, streams=True
    ),
    "POST /v1/messages/count_tokens": Operation(
        "Counts the tokens of the prompt that the same fields of /v1/messages make.",
        "TokenCount",
        COUNTED,
        CountRequest,
    ),
    "POST /v1/embeddings": Operation("Returns vectors of inputs.", "Embeddings", GENERATED, EmbeddingRequest),
    "POST /v1/rerank": Operation(_SORTS, "Reranking", GENERATED, RerankRequest),
    "POST /rerank": Operation(_SORTS, "Reranking", GENERATED, RerankRequest),
    "POST /v2/rerank": Operation(
        "Sorts documents by their relevance for a query, in Cohere's shape.",
        "CohereReranking",
        GENERATED,
        CohereRerankRequest,
    ),
    "POST /v1/score": Operation(_SCORES, "Scores", GENERATED, ScoreBody),
    "POST /score": Operation(_SCORES, "Scores", GENERATED, ScoreBody),
    "POST /pooling": Operation("Returns vectors or scores of inputs.", "PooledValues", GENERATED, EmbeddingRequest),
    "POST /classify": Operation("Returns probabilities of classes.", "Classes", GENERATED, ClassifyRequest),
    "POST /tokenize": Operation("Returns the tokens of a text or a conversation.", "Tokens", COUNTED, TokenizeBody),
    "POST /detokenize": Operation("Returns the text of tokens.", "Text", COUNTED, DetokenizeBody),
    "GET /fleet/events": Operation(
        "Streams the state of the fleet: an event `snapshot`, then an event `update` each second, whose data is this.",
        "WatchFleetResponse",
        CALLER,
        media_type="text/event-stream",
    ),
    "GET /fleet/requests": Operation(
        "Lists recent requests of this router, the newest first.",
        "RequestList",
        CALLER,
        parameters={
            ("query", "limit"): ("at most so many, up to 500", int),
            ("query", "only"): (
                "notable: failed, resumed and slow requests; running: those that have not ended, the oldest first",
                ("notable", "running"),
            ),
            **_TENANT,
        },
    ),
    "GET /fleet/requests/{request:path}": Operation(
        "Tells what became of one recent request, and when.",
        "RequestStory",
        (*CALLER, REQUEST_NOT_FOUND),
        parameters={("path", "request"): ("its id", str), **_TENANT},
    ),
    "POST /fleet/workers/{worker:path}/drain": Operation(
        "Drains a worker: it takes no new requests until it is undrained, or its process is restarted.",
        "DrainWorkerResponse",
        (*CALLER, WORKER_NOT_FOUND, NO_WORKER),
        DrainBody,
        parameters=_WORKER,
    ),
    "POST /fleet/workers/{worker:path}/undrain": Operation(
        "Ends a worker's drain: it takes requests again.",
        "UndrainWorkerResponse",
        (*CALLER, WORKER_NOT_FOUND, NO_WORKER),
        UndrainBody,
        parameters=_WORKER,
    ),
    "GET /": Operation("The live page.", "", (PAGE_FILE_NOT_FOUND,), media_type="text/html"),
    "GET /page/{file}": Operation(
        "A file of the live page.",
        "",
        (PAGE_FILE_NOT_FOUND,),
        media_type="*/*",
        parameters={("path", "file"): ("its name", str)},
    ),
    "GET /health": Operation("Tells that the process is alive.", "Status"),
    "GET /ready": Operation("Tells whether a worker accepts requests.", "Status", CALLER, others={503: "Status"}),
    "GET /version": Operation("Tells the version of the server.", "Version", CALLER),
    "GET /metrics": Operation(
        "Tells metrics, in Prometheus's text format or OpenMetrics.", "", CALLER, media_type="text/plain"
    ),
    "GET /openapi.json": Operation("This page.", "", CALLER),
}
