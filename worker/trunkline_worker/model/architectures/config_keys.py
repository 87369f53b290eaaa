"""The keys of config.json: keys that are read, keys without effect, and keys without effect for certain values.

Every other key is refused by name. A key that is silently ignored might change what the model computes, and the only
sign of it would be worse text.

The config classes of transformers for these architectures declare the types of their own fields, such as use_cache. A
value of another type is refused here too, even if its key has no effect: such a file is damaged. The values of other
keys without effect, such as id2label of the base class, are not checked.
"""

import json
import shlex
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from trunkline_worker.model.checkpoint.refusals import ModelError, shown


def _words(*texts: str) -> frozenset[str]:
    return frozenset(word for text in texts for word in text.split())


# Read in config_json.py, architecture.py, rope_scaling.py, generation_defaults.py and quantization_config.py.
READ = _words(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings original_max_position_embeddings rms_norm_eps
    rope_theta rope_parameters rope_scaling layer_types tie_word_embeddings eos_token_id dtype torch_dtype
    quantization_config compression_config quantization
    """
)
WITHOUT_EFFECT = _words(
    # Origin of the checkpoint, and the software that wrote it or should load it. Remote code is never run.
    """
    _name_or_path name_or_path _commit_hash transformers_version transformers.js_config auto_map custom_pipelines
    model_name model_max_length tokenizer_class tokenizer_model_max_length unsloth_fixed unsloth_version is_llama_config
    """,
    # Training: initialisation, dropout, losses, checkpointing.
    """
    initializer_range initializer_factor attention_dropout attn_pdrop embd_pdrop resid_pdrop resid_dropout
    hidden_dropout hidden_dropout_prob embedding_dropout classifier_dropout gradient_checkpointing neftune_noise_alpha
    loss_type
    """,
    # How the same function is computed: attention kernels, tensor parallelism, caches, chunks of the feed-forward.
    """
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset attn_implementation
    _flash_attn_2_enabled _experts_implementation _experts_implementation_internal experts_implementation
    use_flash_attn use_flash_attention flash_attention pretraining_tp use_cache chunk_size_feed_forward
    """,
    # The return values of calls in transformers, and fields of every transformers config that no decoder reads.
    """
    output_attentions _output_attentions output_hidden_states return_dict use_return_dict tie_last_hidden_states
    torchscript use_bfloat16 tf_legacy_loss tie_encoder_decoder is_decoder cross_attention_hidden_size finetuning_task
    task_specific_params id2label label2id num_labels problem_type prefix
    """,
    # Special tokens other than the end of sequence: tokenizer.json has them.
    "bos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id",
    # Lengths that older exporters wrote in addition to max_position_embeddings. transformers reads none of them.
    "max_sequence_length max_seq_len max_seq_length seq_length seq_len n_ctx n_positions",
    # Sampling. transformers 5 drops these when it reads a config.json, and vLLM takes its defaults from transformers:
    # only generation_config.json sets defaults.
    """
    temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
    diversity_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids
    renormalize_logits constraints forced_bos_token_id forced_eos_token_id forced_decoder_ids remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias guidance_scale low_memory
    watermarking_config num_return_sequences output_scores output_logits return_dict_in_generate max_length
    max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams num_beam_groups
    penalty_alpha dola_layers cache_implementation cache_config token_healing prompt_lookup_num_tokens
    max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_lookbehind target_lookbehind
    """,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What transformers' config classes, which are strict, allow for a key. They take no integer for a float, and all
    floats among these keys are shares of 1."""

    types: tuple[type, ...]
    name: str

    def allows(self, value: Any) -> bool:
        if type(value) is list:
            return list in self.types and all(type(entry) is int for entry in value)
        if type(value) is float:
            return float in self.types and 0 <= value <= 1
        return type(value) in self.types


INTEGER_OR_NULL = Kind((int, NoneType), "an integer or null")
# Keys whose values are never read here, or are not read beside other files or keys.
KINDS: dict[str, Kind] = {
    "attention_dropout": Kind((float, int), "a number in [0, 1]"),
    "initializer_range": Kind((float,), "a number in [0, 1] with a decimal point"),
    "rms_norm_eps": Kind((float,), "a number in [0, 1] with a decimal point"),
    "use_cache": Kind((bool,), "true or false"),
    "bos_token_id": INTEGER_OR_NULL,
    "pad_token_id": INTEGER_OR_NULL,
    "eos_token_id": Kind((int, list, NoneType), "an integer, a list of integers or null"),
}

# Keys of mixtures of experts that only training reads.
OF_TRAINING_EXPERTS: dict[str, Kind] = {
    "router_aux_loss_coef": Kind((float,), "a number in [0, 1] with a decimal point"),
    "output_router_logits": Kind((bool,), "true or false"),
}

MOST_NAMED = 20  # unknown keys in one error

NONE: tuple[Any, ...] = (None,)
OFF: tuple[Any, ...] = (None, False)
_ONE: tuple[Any, ...] = (None, 1)
# Features of other decoders and formats, with the values that disable them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation": (None, "silu", "swiglu"),
    "partial_rotary_factor": _ONE,
    "rope_interleaved": OFF,
    "use_mrope": OFF,
    "no_rope_layers": (None, []),
    "dual_chunk_attention_config": NONE,
    "attention_chunk_size": NONE,
    "clip_qkv": NONE,
    "attn_logit_softcapping": NONE,
    "final_logit_softcapping": NONE,
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "attention_multiplier": NONE,
    "logits_scaling": _ONE,
    "logit_scale": _ONE,
    "use_qk_norm": OFF,
    "num_nextn_predict_layers": (None, 0),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "is_encoder_decoder": OFF,
    "add_cross_attention": OFF,
    "transformers_weights": NONE,  # weights under another file name
    "configuration_files": ([],),  # another file instead of config.json
    "text_config": NONE,
    "vision_config": NONE,
    "audio_config": NONE,
}


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """The keys of an architecture, in addition to those of all architectures or instead of them."""

    read: Set[str]
    without_effect: Set[str] = frozenset()
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # what transformers' class allows for a key
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values that disable a feature


def check_keys(config: Mapping[str, Any], architecture: str, keys: ConfigKeys) -> None:
    """Raises ModelError if the config has a key that is unknown for this architecture, a value that asks for a feature
    that this decoder lacks, or one of a type that transformers refuses."""
    harmless = READ | keys.read | WITHOUT_EFFECT | keys.without_effect
    neutral = {**NEUTRAL, **keys.neutral}
    for key in sorted(config.keys() & neutral.keys() - harmless):
        value = config[key]
        if not any(_is_same(value, choice) for choice in neutral[key]):
            raise ModelError(
                f"{key} {shown(value)} is not supported for {architecture}; "
                f"supported: {', '.join(map(json.dumps, neutral[key]))}"
            )
    if unknown := sorted(config.keys() - harmless - neutral.keys()):
        names = [_named(key) for key in unknown[:MOST_NAMED]]
        more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
        are, they, them = ("are", "they do", "them") if len(unknown) > 1 else ("is", "it does", "it")
        raise ModelError(
            f"{', '.join(names)}{more} {are} not known for {architecture}, and may change what the model computes: if "
            f"{they} not, --ignore-config-keys {shlex.quote(','.join(names))} serves the model without {them}"
        )
    for key, kind in {**KINDS, **keys.kinds}.items():
        if key in config and not kind.allows(config[key]):
            raise ModelError(f"{key} {shown(config[key])} is not supported; supported: {kind.name}")


def _named(key: str) -> str:
    return key if key.replace(".", "_").isidentifier() and key.isascii() else shown(key)


def _is_same(value: Any, choice: Any) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0, but not true."""
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)
