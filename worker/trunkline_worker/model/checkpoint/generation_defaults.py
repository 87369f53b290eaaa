"""Reads a model directory's generation settings: end-of-sequence tokens, and sampling defaults for requests."""

from pathlib import Path

from trunkline.sampling_params import BY_MODEL
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.validation import validate_sampling
from trunkline_worker.model.checkpoint.entries import Entries, without
from trunkline_worker.model.checkpoint.model_file import exists, read_json
from trunkline_worker.model.checkpoint.refusals import ModelError

MOST_TOP_K = (1 << 31) - 1
MOST_VALUE = 1e6  # of any number; validate_sampling() knows each one's range


def read_generation_defaults(
    directory: Path, vocab_size: int, ignored_keys: tuple[str, ...] = ()
) -> tuple[frozenset[int], SamplingParams]:
    """Returns the end-of-sequence ids, from generation_config.json, else config.json, and the sampling defaults, from
    generation_config.json only. Raises ModelError with file and key.

    As in vLLM, the parameters of BY_MODEL have their defaults in generation_config.json, and do_sample is not read: a
    temperature applies with `do_sample: false` too. Absent parameters have their neutral values, so a file without a
    temperature means 1, not greedy decoding. A top_k of 0 or -1 keeps all tokens.
    Sampling parameters in config.json, their place before generation_config.json existed, have no effect; transformers
    5 drops them, and vLLM takes its defaults from transformers.

    ignored_keys: keys of config.json that are treated as absent
    """
    path = directory / "generation_config.json"
    has_file = exists(path)
    generation = Entries(read_json(path) if has_file else {})
    try:
        defaults = _sampling(generation, vocab_size)
        eos = _token_ids(generation, vocab_size)
    except (ModelError, RequestRefused) as error:
        raise ModelError(f"{path}: {error}") from None
    if eos is None:
        path = directory / "config.json"
        try:
            eos = _token_ids(Entries(without(read_json(path), ignored_keys)), vocab_size)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
    return eos or frozenset(), defaults


def _sampling(generation: Entries, vocab_size: int) -> SamplingParams:
    defaults = SamplingParams()
    for key in BY_MODEL:
        if key != "top_k" and generation.has(key):
            setattr(defaults, key, generation.number(key, -MOST_VALUE, MOST_VALUE))
    if generation.has("top_k"):
        defaults.top_k = max(0, generation.integer("top_k", -1, MOST_TOP_K))
    validate_sampling(defaults, vocab_size=vocab_size, prefix="default")
    return defaults


def _token_ids(config: Entries, vocab_size: int) -> frozenset[int] | None:
    """Returns the end-of-sequence ids, or None if the file has none."""
    if not config.has("eos_token_id"):
        return None
    value = config.values["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id < vocab_size for id in ids):
        raise config.refused("eos_token_id", value, f"token ids in [0, {vocab_size}), one or a list")
    return frozenset(ids)
