"""Finds out what a model directory is for: to generate, to embed, or to score."""

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries, without
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import parse_spec, read_config
from trunkline_worker.model.encoders.encoder_config import PooledEncoder, family_of, parse_encoder
from trunkline_worker.model.pooling.classifier import classifier_of
from trunkline_worker.model.pooling.pooled_decoder import LAST_TOKEN, PooledDecoder, answer_tokens, with_template
from trunkline_worker.model.pooling.pooling_spec import AnswerTokens, PoolingSpec
from trunkline_worker.model.pooling.sentence_transformers import has_modules, read_modules

BASE_MODEL, CLASSIFIER, GENERATOR = "Model", "ForSequenceClassification", "ForCausalLM"
# Keys of config.json that are read here and in classifier.py: of sentence-transformers, and those by which vLLM knows
# the numbers of components that a vector may be cut to.
DIMENSION_KEYS = {"matryoshka_dimensions", "is_matryoshka"}
OF_OUTPUTS = DIMENSION_KEYS | {"sentence_transformers", "sbert_ce_default_activation_function"}


class ModelTask(Enum):
    """What a worker serves a model for."""

    AUTO = "auto"  # what the checkpoint is made for
    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


def pooled_model(
    directory: Path, task: ModelTask, *, any_dimensions: bool = False, ignored_keys: tuple[str, ...] = ()
) -> PooledDecoder | PooledEncoder | None:
    """Returns what loading must know of a model of vectors or scores; None: it is to generate. Raises ModelError if the
    model cannot be used for the task.

    any_dimensions: requests may ask for vectors of any length, even if the checkpoint does not say so
    """
    if task is ModelTask.GENERATE:
        return None
    config = without(read_config(directory), ignored_keys)
    name = _architecture(config)
    modules = read_modules(directory) if has_modules(directory) else None
    made_for = _made_for(name, modules)
    task = made_for if task is ModelTask.AUTO else task
    if task is ModelTask.GENERATE:
        return None
    if task is not made_for and made_for is not ModelTask.GENERATE:
        raise ModelError(f"--task {task.value}: {name} of {directory} is made to {made_for.value}")
    family = family_of(name)
    if modules is None and not name.endswith(CLASSIFIER):
        if family is not None:
            raise ModelError(f"{directory} has no modules.json, which says how the states of an encoder are pooled")
        modules = LAST_TOKEN if task is ModelTask.EMBED else answer_tokens(directory)
    try:
        if family is not None:
            encoder = parse_encoder(_of_model(config), name, family)
            return PooledEncoder(config, encoder, _outputs(config, encoder.sizes.hidden, modules, any_dimensions))
        decoder = parse_spec(_of_model(config) | _generator(name))
        pooling = _outputs(config, decoder.hidden_size, modules, any_dimensions)
    except ModelError as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from None
    most = min(decoder.context_length, pooling.most_tokens or decoder.context_length)
    return PooledDecoder(replace(decoder, context_length=most), pooling)


def _architecture(config: dict[str, Any]) -> str:
    """Returns what `architectures` names; "" if that is not one name."""
    match config.get("architectures"):
        case [str(name)]:
            return name
    return ""


def _made_for(name: str, modules: PoolingSpec | None) -> ModelTask:
    if name.endswith(CLASSIFIER) or (modules is not None and modules.labels):
        return ModelTask.SCORE
    is_base = family_of(name) is not None or name.endswith(BASE_MODEL)
    return ModelTask.EMBED if is_base or modules is not None else ModelTask.GENERATE


def _of_model(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in OF_OUTPUTS}


def _generator(name: str) -> dict[str, Any]:
    """Returns the entry of the decoder that generates, to which a head for other outputs may be attached."""
    base = name.removesuffix(CLASSIFIER).removesuffix(BASE_MODEL).removesuffix(GENERATOR)
    return {"architectures": [f"{base}{GENERATOR}"]} if name else {}


def _outputs(config: dict[str, Any], hidden: int, modules: PoolingSpec | None, any_dimensions: bool) -> PoolingSpec:
    """Returns how outputs are made.  modules: None: as a classifier makes them"""
    if modules is not None and not modules.labels:
        return _with_dimensions(modules, config, hidden, any_dimensions)
    is_decoder = family_of(_architecture(config)) is None
    scores = modules or classifier_of(config, hidden=hidden, is_decoder=is_decoder)
    return with_template(scores) if _is_qwen3_reranker(config, scores) else scores


def _is_qwen3_reranker(config: dict[str, Any], scores: PoolingSpec) -> bool:
    """Whether a model scores as Qwen3-Reranker does, by yes against no, or by the one label of a classifier to which it
    was converted. Rerankers on Qwen3 that score by a single token were trained with other templates."""
    has_one_token = isinstance(scores.head, AnswerTokens) and scores.head.no is None
    return config.get("model_type") == "qwen3" and len(scores.labels) == 1 and not has_one_token


def _with_dimensions(spec: PoolingSpec, config: dict[str, Any], hidden: int, any_dimensions: bool) -> PoolingSpec:
    """Adds the numbers of components that vectors may be cut to."""
    entries, most = Entries(config), spec.dimensions(hidden)
    if not entries.has("matryoshka_dimensions"):
        return replace(spec, any_dimensions=any_dimensions or entries.flag("is_matryoshka", False))
    given = entries.values["matryoshka_dimensions"]
    if not isinstance(given, list) or not all(type(number) is int and 0 < number <= most for number in given):
        raise entries.refused("matryoshka_dimensions", given, f"a list of integers in [1, {most}]")
    offered = tuple(sorted(set(given) - {most}))
    return replace(spec, offered_dimensions=offered, any_dimensions=any_dimensions)
