"""Validates what workers say, on arrival. Pure.

The functions named `…_problem` take a message and return the problem with it in one line, or None. A valid message
cannot break the arithmetic of routing, the status of a request or another worker's requests. It may still be untrue.
"""

from google.protobuf.message import Message

from trunkline.grant import GrantKeys
from trunkline.protocol import OLDEST_PROTOCOL, PROTOCOL_VERSION
from trunkline.sampling_params import BY_MODEL
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Capability, GetModelResponse, LoadSample
from trunkline.validation import MAX_GRAMMAR_BYTES, validate_sampling
from trunkline_router.routing.route_request import NUM_LANES

MAX_NAME_CHARACTERS = 512  # of names, fingerprints and similar strings
MAX_DIGEST_BYTES = 64
MAX_DIGESTS = 8  # of a worker: its tokenizer's and its grant keys'
MAX_EOS_TOKENS = 1024
MAX_CAPABILITIES = 256
MAX_POOLING_BYTES = 64 << 10  # of prompts, templates and labels
# Each limit is well above the largest value of any known model or machine. The policy computes with products of these
# values in doubles, and reports them in fields of 32 and 64 bits.
MAX_VOCAB_SIZE = 1 << 24
MAX_CONTEXT_TOKENS = 1 << 26
MAX_CHOICES = 1 << 24
MAX_TOKENS = 1 << 48
MAX_PRICE_PER_HOUR = 1e9  # what --price-per-hour of a worker allows


NO_KEYS = GrantKeys()
_NAMES = (
    "model",
    "worker_id",
    "fingerprint",
    "architecture",
    "dtype",
    "device",
    "batching",
    "admission",
    "answer_format",
)
_MODEL_RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 1 << 16),
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "context_length": (1, MAX_CONTEXT_TOKENS),
    "kv_token_capacity": (1, 1 << 44),
    "max_step_tokens": (0, 1 << 24),
    "max_running_requests": (0, MAX_CHOICES),
    "itl_target_ms": (0.0, 60_000.0),
    "interactive_reserve": (0.0, 1.0),
    "batch_window_ms": (0.0, 3.6e6),
    "price_per_hour": (0.0, MAX_PRICE_PER_HOUR),
}
_LOAD_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("running", "waiting"), (0, MAX_CHOICES)),
    **dict.fromkeys(("waiting_uncached_tokens", "waiting_tokens", "running_kv_tokens"), (0, MAX_TOKENS)),
    "other_experts_s": (0.0, 1e3),
}
_COST_RANGES = dict.fromkeys(("fixed_s", "token_s", "kv_token_s", "pair_s"), (0.0, 1e3))
_BY_LANE = ("waiting_by_lane", "retry_delay_ms_by_lane", "uncached_tokens_by_lane")


class WorkerUnusable(Exception):
    """The worker cannot be used, perhaps because it has another version. The message is one line for people."""


class FalseClaim(WorkerUnusable):
    """A message of the worker cannot be true. The router waits longer before it reconnects than after a disconnect."""


def check_model(model: GetModelResponse, keys: GrantKeys = NO_KEYS) -> None:
    """Raises WorkerUnusable if this router cannot send requests to a worker with this description."""
    if model.min_router_protocol > PROTOCOL_VERSION:
        raise WorkerUnusable(
            f"the worker asks for routers that speak protocol {model.min_router_protocol}, and this one speaks "
            f"{PROTOCOL_VERSION}: upgrade routers before workers"
        )
    if model.protocol_version < OLDEST_PROTOCOL:
        raise WorkerUnusable(
            f"the worker speaks protocol {model.protocol_version}, and this router needs {OLDEST_PROTOCOL} or a later "
            "one: upgrade the worker"
        )
    if model.grant_key_ids and not keys.of_worker(model):
        lacks = "has another one" if keys else "has none"
        raise WorkerUnusable(f"the worker has a grant key, and this router {lacks}: start both with one --grant-key")
    if problem := model_problem(model):
        raise WorkerUnusable(problem)


def model_problem(model: GetModelResponse) -> str | None:
    """The problem with a worker's model description."""
    if not model.model:
        return "the worker does not say which model it serves"
    for name in _NAMES:
        text = getattr(model, name)
        if len(text) > MAX_NAME_CHARACTERS or not text.isprintable():
            return f"the worker's {name} is not at most {MAX_NAME_CHARACTERS} printable characters"
    if problem := _range_problem(model, _MODEL_RANGES):
        return problem
    digests = (model.tokenizer_digest, *model.grant_key_ids)
    if any(len(digest) > MAX_DIGEST_BYTES for digest in digests) or len(digests) > MAX_DIGESTS:
        return (
            f"the worker's tokenizer_digest and grant_key_ids are more than {MAX_DIGESTS}, or longer than "
            f"{MAX_DIGEST_BYTES} bytes"
        )
    eos_token_ids = model.eos_token_ids
    if len(eos_token_ids) > MAX_EOS_TOKENS or not all(0 <= token_id < model.vocab_size for token_id in eos_token_ids):
        return f"the worker's eos_token_ids are not at most {MAX_EOS_TOKENS} tokens below its vocab_size"
    if len(model.capabilities) > MAX_CAPABILITIES:
        return f"the worker names {len(model.capabilities)} capabilities; allowed: {MAX_CAPABILITIES}"
    if (pooling_bytes := model.pooling.ByteSize()) > MAX_POOLING_BYTES:
        return f"the worker's pooling has {pooling_bytes} bytes; allowed: {MAX_POOLING_BYTES}"
    if Capability.CAPABILITY_GRAMMARS in model.capabilities and model.max_session_grammar_bytes < MAX_GRAMMAR_BYTES:
        kept = model.max_session_grammar_bytes
        return f"the worker keeps {kept} bytes of grammars, and one grammar can have {MAX_GRAMMAR_BYTES}"
    return _defaults_problem(model.default_sampling)


def load_problem(load: LoadSample) -> str | None:
    """The problem with a load sample."""
    if problem := _range_problem(load, _LOAD_RANGES):
        return problem
    for name in _BY_LANE:
        if (count := len(getattr(load, name))) not in (0, NUM_LANES):
            return f"the worker's {name} has {count} entries; allowed: {NUM_LANES}, or none"
    if any(tokens > MAX_TOKENS for tokens in load.uncached_tokens_by_lane):
        return f"the worker's uncached_tokens_by_lane has more than {MAX_TOKENS} tokens"
    return _range_problem(load.step_cost, _COST_RANGES) if load.HasField("step_cost") else None


def _defaults_problem(defaults: SamplingParams) -> str | None:
    """The problem with the defaults that are used. The model's other defaults are neither checked nor used."""
    filled_in = SamplingParams()
    for name in BY_MODEL:
        if defaults.HasField(name):  # type: ignore[arg-type]
            setattr(filled_in, name, getattr(defaults, name))
    try:
        validate_sampling(filled_in, vocab_size=1, prefix="the worker's default_sampling")
    except RequestRefused as refused:
        return refused.message
    return None


def _range_problem(message: Message, ranges: dict[str, tuple[float, float]]) -> str | None:
    for name, (least, most) in ranges.items():
        value = getattr(message, name)
        if not least <= value <= most:  # NaN fails too
            return f"the worker's {name} is {value}; allowed: {least:.15g} to {most:.15g}"
    return None
