"""What config.json and generation_config.json would say of a GGUF file, from its metadata."""

from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries, listed
from trunkline_worker.model.checkpoint.gguf_file import GgufFile, Texts
from trunkline_worker.model.checkpoint.refusals import ModelError, shown

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaling, as a factor for each frequency
# Keys behind the architecture's name and a dot → keys of config.json.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
# Each has to be the size of a head: rotary embedding turns all of it, and values are as wide as keys.
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
ROPE_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
WITHOUT_EFFECT = {"vocab_size", "rope.scaling.type", "rope.scaling.finetuned"}  # or read by name
END_OF_SEQUENCE = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns a config.json. Keys of the architecture that are not known are in it under their own names, for the
    reader of config.json to refuse them. Raises ModelError with the key that is missing or not supported."""
    metadata = file.metadata
    if (parts := metadata.get("split.count", 1)) not in (0, 1):  # 0: llama-gguf-split has joined them
        raise ModelError(
            f"{file.path} is one of {shown(parts)} parts of a model: join them with llama-gguf-split --merge"
        )
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {shown(architecture)} is not supported in GGUF files; supported: "
            f"{listed(ARCHITECTURES)}: serve the directory of the checkpoint that the file was made of"
        )
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    entries = Entries(own)
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture}
    for key, name in SIZES.items():
        if key not in own:
            raise ModelError(f"{file.path}: {architecture}.{key} is missing")
        config[name] = own[key]
    config |= {name: own[key] for key, name in OPTIONAL.items() if key in own}
    try:
        config |= {"head_dim": _head_dim(entries), "rope_scaling": _rope_scaling(file, entries)}
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from None
    tokens = metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = own.get("vocab_size", tokens.count if isinstance(tokens, Texts) else None)
    config["tie_word_embeddings"] = HEAD not in file.tensors
    if architecture != "qwen2":  # its biases are fixed
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    config["eos_token_id"] = [metadata[key] for key in END_OF_SEQUENCE if key in metadata]
    known = {*SIZES, *OPTIONAL, *HEAD_SIZES, *ROPE_SCALING, *WITHOUT_EFFECT}
    others = {key: value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    return config | {key: value for key, value in others.items() if key.removeprefix(f"{architecture}.") not in known}


def sampling_of(file: GgufFile) -> dict[str, Any]:
    """Returns a generation_config.json."""
    return {name: file.metadata[key] for key, name in SAMPLING.items() if key in file.metadata}


def _head_dim(own: Entries) -> int:
    sizes = {key: own.integer(key, 1, 1 << 12) for key in HEAD_SIZES if own.has(key)}
    if not sizes:
        hidden, heads = own.integer("embedding_length", 1, 1 << 17), own.integer("attention.head_count", 1, 1 << 12)
        return hidden // heads
    if len({*sizes.values()}) > 1:
        given = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise ModelError(f"{given} are not supported; supported: one size for all")
    return next(iter(sizes.values()))


def _rope_scaling(file: GgufFile, own: Entries) -> dict[str, Any] | None:
    kind = own.values.get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none" or (form := file.tensors[ROPE_FACTORS].format.name) != "F32":
            raise ModelError(
                f"tensor {ROPE_FACTORS} is not supported beside RoPE scaling {shown(kind)}, or not as {form}"
            )
        factors = file.stored(ROPE_FACTORS).cast("f").tolist()
        # longrope divides each frequency by a factor of its own. Here they are the same at every length.
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"rope.scaling.type {shown(kind)} is not supported; supported: none, linear, yarn")
    keys = ROPE_SCALING if kind == "yarn" else {"rope.scaling.factor": "factor"}
    return {"rope_type": kind} | {name: own.values[key] for key, name in keys.items() if key in own.values}
