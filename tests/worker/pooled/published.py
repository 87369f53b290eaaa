"""Published models of vectors and scores: the keys and values of their config.json, and how their states are pooled.

Only the numbers of layers and of token ids are smaller here than published.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel

from tests.worker.pooled.checkpoints import write_modules

VOCAB = 1000
YES, NO = 23, 11  # ids of the answers of Qwen3-Reranker in the tokenizer that is written here

BERT_KEYS: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "pad_token_id": 0, "position_embedding_type": "absolute", "torch_dtype": "float32",
    "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
ROBERTA_KEYS: dict[str, Any] = {
    **BERT_KEYS, "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5, "max_position_embeddings": 514,
    "model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1,
}  # fmt: skip
XLM_ROBERTA_KEYS = {**ROBERTA_KEYS, "model_type": "xlm-roberta", "output_past": True, "vocab_size": 250002}
MODERNBERT_KEYS: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu",
    "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281,
    "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
    "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
    "intermediate_size": 1152, "layer_norm_eps": 1e-5, "local_attention": 128, "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
    "norm_bias": False, "norm_eps": 1e-5, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
    "position_embedding_type": "absolute", "repad_logits_with_grad": False, "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100, "sparse_prediction": False, "torch_dtype": "float32",
    "transformers_version": "4.48.0", "vocab_size": 50368,
}  # fmt: skip
QWEN3_KEYS: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.3", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151669,
}  # fmt: skip
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


@dataclass(frozen=True)
class Published:
    """A published model.

    layers: that are computed here; pooling: the key of 1_Pooling/config.json that is true, or None: it scores
    """

    config: dict[str, Any]
    layers: int
    pooling: str | None = None


PUBLISHED = {
    "Qwen3-Embedding-0.6B": Published(QWEN3_KEYS, 3, "pooling_mode_lasttoken"),
    "Qwen3-Embedding-0.6B, one layer": Published(QWEN3_KEYS, 1, "pooling_mode_lasttoken"),
    "e5-mistral-7b-instruct": Published(
        {
            "_name_or_path": "mistralai/Mistral-7B-v0.1", "architectures": ["MistralModel"], "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 2,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.34.0", "use_cache": False, "vocab_size": 32000,
        },
        1,
        "pooling_mode_lasttoken",
    ),
    "KaLM-embedding-multilingual-mini-instruct-v1": Published(
        {
            "architectures": ["Qwen2Model"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
            "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
            "max_position_embeddings": 131072, "max_window_layers": 24, "model_type": "qwen2",
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "float32",
            "transformers_version": "4.44.0", "use_cache": False, "use_sliding_window": False, "vocab_size": 151936,
        },
        3,
        "pooling_mode_mean_tokens",
    ),
    "Skywork-Reward-V2-Llama-3.2-1B": Published(
        {
            "architectures": ["LlamaForSequenceClassification"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128009, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
            **ONE_LABEL, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
            "num_key_value_heads": 8, "pad_token_id": 128004, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0", "use_cache": True, "vocab_size": 128256,
        },
        2,
    ),
    "Qwen3-Reranker-0.6B": Published(
        {**QWEN3_KEYS, "eos_token_id": 151645, "max_position_embeddings": 40960, "transformers_version": "4.51.0"}, 3
    ),
    "bge-small-en-v1.5": Published(
        {
            **BERT_KEYS, **ONE_LABEL, "architectures": ["BertModel"], "hidden_size": 384, "intermediate_size": 1536,
            "num_hidden_layers": 12, "transformers_version": "4.30.0",
            "_name_or_path": "/root/.cache/torch/sentence_transformers/BAAI_bge-small-en/",
        },
        4,
        "pooling_mode_cls_token",
    ),
    "bge-base-en-v1.5": Published(
        {
            **BERT_KEYS, **ONE_LABEL, "architectures": ["BertModel"], "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12, "gradient_checkpointing": False, "transformers_version": "4.30.0",
        },
        3,
        "pooling_mode_cls_token",
    ),
    "ms-marco-MiniLM-L6-v2": Published(
        {
            **BERT_KEYS, **ONE_LABEL, "architectures": ["BertForSequenceClassification"], "hidden_size": 384,
            "intermediate_size": 1536, "num_hidden_layers": 6, "gradient_checkpointing": False,
            "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            "transformers_version": "4.45.0",
        },
        4,
    ),
    "all-distilroberta-v1": Published(
        {
            **ROBERTA_KEYS, "_name_or_path": "distilroberta-base", "architectures": ["RobertaModel"],
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "gradient_checkpointing": False,
            "vocab_size": 50265, "transformers_version": "4.8.2",
        },
        3,
        "pooling_mode_mean_tokens",
    ),
    "multilingual-e5-base": Published(
        {
            **XLM_ROBERTA_KEYS, "architectures": ["XLMRobertaModel"], "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12, "transformers_version": "4.15.0",
        },
        3,
        "pooling_mode_mean_tokens",
    ),
    "bge-reranker-v2-m3": Published(
        {
            **XLM_ROBERTA_KEYS, **ONE_LABEL, "_name_or_path": "BAAI/bge-m3", "hidden_size": 1024,
            "architectures": ["XLMRobertaForSequenceClassification"], "intermediate_size": 4096,
            "max_position_embeddings": 8194, "num_attention_heads": 16, "num_hidden_layers": 24,
            "transformers_version": "4.38.1",
        },
        2,
    ),
    "gte-modernbert-base": Published(
        {**MODERNBERT_KEYS, "architectures": ["ModernBertModel"], "reference_compile": False},
        5,
        "pooling_mode_cls_token",
    ),
    "modernbert-embed-base": Published(
        {**MODERNBERT_KEYS, "architectures": ["ModernBertModel"], "tie_word_embeddings": True},
        5,
        "pooling_mode_mean_tokens",
    ),
    "gte-reranker-modernbert-base": Published(
        {**MODERNBERT_KEYS, **ONE_LABEL, "architectures": ["ModernBertForSequenceClassification"]}, 5
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """What transformers computes in float32."""

    model: Any
    published: Published

    @torch.inference_mode()
    def output(self, prompt: list[int], first_segment_tokens: int) -> torch.Tensor:
        """The state of a prompt that is pooled, or its logits."""
        token_ids = torch.tensor([prompt])
        if self.published.pooling is not None:
            return POOLINGS[self.published.pooling](self.model(input_ids=token_ids).last_hidden_state[0])
        segments = {}
        if self.published.config.get("type_vocab_size") == 2:
            segments["token_type_ids"] = (torch.arange(len(prompt)) >= first_segment_tokens).long()[None]
        logits: torch.Tensor = self.model(input_ids=token_ids, **segments).logits[0]
        return logits if logits.ndim == 1 else logits[-1, [YES]] - logits[-1, [NO]]


POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pooling_mode_cls_token": lambda states: states[0],
    "pooling_mode_lasttoken": lambda states: states[-1],
    "pooling_mode_mean_tokens": lambda states: states.mean(0),
}


def write_published(folder: Path, name: str) -> Truth:
    """Writes a checkpoint with random weights, all of which bfloat16 has exactly, and returns the truth about it."""
    published = PUBLISHED[name]
    config = {**published.config, "num_hidden_layers": published.layers, "vocab_size": VOCAB}
    ids = {key: value % VOCAB for key, value in config.items() if key.endswith("_token_id")}
    text = json.dumps({**config, **ids})
    (folder / "config.json").write_text(text)
    torch.manual_seed(7)
    settings = AutoConfig.from_pretrained(folder)
    settings.dtype = torch.float32
    head = getattr(transformers, config["architectures"][0])
    model: Any = AutoModel.from_config(settings) if published.pooling else head(settings)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # so that biases and norms matter
                parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    if published.pooling:
        write_modules(folder, pooling=published.pooling)
    elif config["architectures"] == ["Qwen3ForCausalLM"]:
        tokenizer = {"model": {"vocab": {"no": NO, "yes": YES}}, "added_tokens": [{"content": "<|im_start|>"}]}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Truth(model.eval(), published)
