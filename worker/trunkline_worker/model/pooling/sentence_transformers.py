"""Reads what sentence-transformers writes beside an embedding model: modules.json and the files that it names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries, listed
from trunkline_worker.model.checkpoint.model_file import exists, read_file, read_json
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.pooling.pooling_spec import Activation, AnswerTokens, Pooling, PoolingSpec, ProjectionSpec

MODULES = "modules.json"
MOST_FEATURES = 1 << 17
MOST_PROMPT_BYTES = 16 << 10
FLAGS = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LEN,
    "pooling_mode_max_tokens": Pooling.MAX,
}
MOST_TOKEN = (1 << 31) - 1
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
OTHER_FLAGS = {"pooling_mode_weightedmean_tokens"}
DENSE_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    IDENTITY: "identity",
}


@dataclass(frozen=True, slots=True)
class Module:
    """An entry of modules.json."""

    kind: str
    folder: Path


def has_modules(directory: Path) -> bool:
    """Whether a directory is that of an embedding model of sentence-transformers."""
    return exists(directory / MODULES)


def read_modules(directory: Path) -> PoolingSpec:
    """Returns the pooling of a directory with modules.json. Raises ModelError with the file and what it has that is not
    supported."""
    modules = _modules(directory)
    kinds = [module.kind for module in modules]
    if kinds == ["Transformer", "LogitScore"]:
        return _logit_score(directory, modules[1].folder / "config.json")
    dense = modules[2:-1] if kinds[-1] == "Normalize" else modules[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or any(module.kind != "Dense" for module in dense):
        raise ModelError(
            f"{directory / MODULES} has the modules {listed(kinds)}; supported: Transformer, Pooling, any number of "
            "Dense, and Normalize as the last one; or Transformer, LogitScore"
        )
    prompts, default_prompt = _prompts(directory / "config_sentence_transformers.json")
    return PoolingSpec(
        pooling=_pooling(modules[1].folder / "config.json"),
        head=tuple(_dense(directory, module.folder) for module in dense),
        activation=Activation.NORMALIZE if kinds[-1] == "Normalize" else Activation.NONE,
        prompts=tuple(prompts.items()),
        default_prompt=default_prompt,
        most_tokens=_most_tokens(modules[0].folder / "sentence_bert_config.json"),
    )


def _modules(directory: Path) -> list[Module]:
    path = directory / MODULES
    try:
        entries = json.loads(read_file(path).decode())
    except (ValueError, RecursionError):
        raise ModelError(f"{path} cannot be read: it is no JSON") from None
    modules = []
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case {"type": str(kind), "path": str(folder)} if ".." not in folder and not folder.startswith("/"):
                modules.append(Module(kind.rpartition(".")[2], directory / folder))
            case _:
                raise ModelError(f"{path} is no list of modules, each with a type and a path within the directory")
    if not modules:
        raise ModelError(f"{path} names no modules")
    return modules


def _logit_score(directory: Path, path: Path) -> PoolingSpec:
    """Returns the pooling of a reranker that was trained to answer with one of two tokens."""
    config, settings = Entries(read_json(path)), directory / "config_sentence_transformers.json"
    try:
        yes, no = (
            config.integer(key, 0, MOST_TOKEN) if config.has(key) else None
            for key in ("true_token_id", "false_token_id")
        )
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    if yes is None:
        raise ModelError(f"{path}: true_token_id is missing")
    named = read_json(settings).get("activation_fn") if exists(settings) else None
    if named not in (None, IDENTITY, SIGMOID):
        raise ModelError(f"{settings}: activation_fn {shown(named)} is not supported; supported: {IDENTITY}, {SIGMOID}")
    activation = Activation.NONE if named == IDENTITY else Activation.SIGMOID
    return PoolingSpec(Pooling.LAST, AnswerTokens(yes, no), activation, labels=("yes",))


def _pooling(path: Path) -> Pooling:
    config = Entries(read_json(path))
    try:
        if not config.flag("include_prompt", True):
            raise config.refused("include_prompt", False, "true: prompts are part of what is pooled")
        if config.has("pooling_mode"):
            modes = [config.text("pooling_mode")]
        else:
            modes = [key for key in sorted(FLAGS.keys() | OTHER_FLAGS) if config.flag(key, False)] or ["mean"]
        named = {pooling.value: pooling for pooling in Pooling} | FLAGS
        if len(modes) != 1 or modes[0] not in named:
            raise ModelError(f"the pooling {listed(modes)} is not supported; supported is one of: "
                             f"{listed(pooling.value for pooling in Pooling)}")  # fmt: skip
        return named[modes[0]]
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _dense(directory: Path, folder: Path) -> ProjectionSpec:
    path = folder / "config.json"
    config = Entries(read_json(path))
    try:
        if config.flag("use_residual", False):
            raise config.refused("use_residual", True, "false")
        of_vectors = "sentence_embedding"
        for key in ("module_input_name", "module_output_name"):
            config.one_of(key, config.values.get(key) or of_vectors, (of_vectors,))
        activation = config.text("activation_function")
        config.one_of("activation_function", activation, tuple(DENSE_ACTIVATIONS))
        return ProjectionSpec(
            name="linear",
            rows=config.integer("out_features", 1, MOST_FEATURES),
            inner=config.integer("in_features", 1, MOST_FEATURES),
            bias=config.flag("bias", True),
            activation=DENSE_ACTIVATIONS[activation],
            folder=str(folder.relative_to(directory)),
        )
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _prompts(path: Path) -> tuple[dict[str, str], str]:
    """Returns the prompts by name, and the name of the default one; empty without such a file."""
    config: dict[str, Any] = read_json(path) if exists(path) else {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts is not an object of texts")
    if sum(len((name + text).encode()) for name, text in prompts.items()) > MOST_PROMPT_BYTES:
        raise ModelError(f"{path}: the prompts have more than {MOST_PROMPT_BYTES} bytes")
    if default and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {shown(default)} is none of the prompts {listed(prompts)}")
    return prompts, default


def _most_tokens(path: Path) -> int | None:
    if not exists(path):
        return None
    config = Entries(read_json(path))
    try:
        return config.integer("max_seq_length", 2, 1 << 24) if config.has("max_seq_length") else None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
