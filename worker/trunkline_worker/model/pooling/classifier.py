"""The heads of classifiers and rerankers: what config.json says of their labels, and their tensors."""

from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.pooling.pooling_spec import ACTIVATIONS, Activation, Pooling, PoolingSpec, ProjectionSpec
from trunkline_worker.model.pooling.sentence_transformers import IDENTITY, SIGMOID

MOST_LABELS = 1 << 16
DEFAULT_LABELS = 2  # of transformers, if config.json has none


def classifier_of(config: dict[str, Any], *, hidden: int, is_decoder: bool) -> PoolingSpec:
    """Returns the pooling of a checkpoint for sequence classification. Raises ModelError with the key."""
    entries = Entries(config)
    labels = _labels(entries)
    if is_decoder:
        score = ProjectionSpec("score", len(labels), hidden, bias=False)
        return PoolingSpec(Pooling.LAST, (score,), _activation(entries, len(labels)), labels=labels)
    pooling, head = _encoder_head(entries, hidden, len(labels))
    return PoolingSpec(pooling, head, _activation(entries, len(labels)), labels=labels)


def _encoder_head(config: Entries, hidden: int, num_labels: int) -> tuple[Pooling, tuple[ProjectionSpec, ...]]:
    model_type = config.text("model_type")
    if model_type == "bert":
        first = ProjectionSpec("bert.pooler.dense", hidden, hidden, bias=True, activation="tanh")
        return Pooling.CLS, (first, ProjectionSpec("classifier", num_labels, hidden, bias=True))
    if model_type != "modernbert":
        first = ProjectionSpec("classifier.dense", hidden, hidden, bias=True, activation="tanh")
        return Pooling.CLS, (first, ProjectionSpec("classifier.out_proj", num_labels, hidden, bias=True))
    name = config.values.get("classifier_pooling", "cls")
    pooling = Pooling(config.one_of("classifier_pooling", name, ("cls", "mean")))
    activation = config.values.get("classifier_activation", "gelu")
    first = ProjectionSpec(
        "head.dense",
        hidden,
        hidden,
        bias=config.flag("classifier_bias", False),
        activation=config.one_of("classifier_activation", activation, ACTIVATIONS),
        norm="head.norm",
        norm_eps=config.positive("norm_eps", 1.0, default=1e-5),
        norm_bias=config.flag("norm_bias", False),
    )
    return pooling, (first, ProjectionSpec("classifier", num_labels, hidden, bias=True))


def _labels(config: Entries) -> tuple[str, ...]:
    if not config.has("id2label"):
        count = config.integer("num_labels", 1, MOST_LABELS, default=DEFAULT_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    names = config.object("id2label").values
    count = len(names)
    if not 1 <= count <= MOST_LABELS or names.keys() != {str(index) for index in range(count)}:
        raise config.refused("id2label", names, "an object with the keys 0, 1 and so on")
    return tuple(str(names[str(index)]) for index in range(count))


def _activation(config: Entries, num_labels: int) -> Activation:
    """As in sentence-transformers' CrossEncoder, one label is a probability unless the checkpoint says otherwise."""
    own = config.values.get("sbert_ce_default_activation_function")
    if config.has("sentence_transformers"):
        own = config.object("sentence_transformers").values.get("activation_fn", own)
    if own is not None:
        config.one_of("activation_fn", own, (IDENTITY, SIGMOID))
        return Activation.NONE if own == IDENTITY else Activation.SIGMOID
    is_of_each = num_labels == 1 or config.values.get("problem_type") == "multi_label_classification"
    return Activation.SIGMOID if is_of_each else Activation.SOFTMAX
