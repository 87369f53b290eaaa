"""Random runs for `make bench-outputs`: a tiny checkpoint, an engine's settings and requests, all drawn from a seed."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from trunkline_bench.engine.recorded_outputs import Run, TimedRequest
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec, ExpertsSpec, LinearSpec
from trunkline_worker.model.config_json import parse_spec
from trunkline_worker.model.registry import ARCHITECTURES

FULL, SLIDING = "full_attention", "sliding_attention"
DTYPES = ("float32", "bfloat16", "float16")
DTYPE_WEIGHTS = (5, 4, 1)
MOST_OUTPUT = 24


def random_run(directory: Path, *, seed: int, index: int) -> Run:
    """The run of this number. Writes its checkpoint to the directory."""
    draw = Random(f"{seed} {index}")
    config = _config(draw)
    _write_checkpoint(directory, config, draw.randrange(1 << 30))
    settings = _settings(draw, config)
    longest = min(config["max_position_embeddings"], settings["block_size"] * settings["kv_blocks"])
    requests = _requests(draw, vocab_size=config["vocab_size"], longest=longest)
    return Run(f"run {index}", {"model": str(directory), **settings}, requests)


def golden_runs(demo_model: Path) -> list[Run]:
    """The demo model in every dtype, with the C kernels and the references, deterministic and not."""
    draw = Random(0)
    requests = _requests(draw, vocab_size=500, longest=200, count=16)
    return [
        Run(
            f"demo model {dtype}, {kernels} kernels{', deterministic' * deterministic}",
            {
                "model": str(demo_model),
                "device": "cpu",
                "dtype": dtype,
                "kernels": kernels,
                "deterministic": deterministic,
                "kv_blocks": 40,
                "max_step_tokens": 64,
                **TIMELESS,
            },
            requests,
        )
        for dtype in DTYPES
        for kernels in ("auto", "torch")
        for deterministic in (False, True)
    ]


# The scheduler decides nothing by the time that steps take.
TIMELESS = {"itl_target_ms": 0.0, "aging_s": 1e6}


# Checkpoints


def _config(draw: Random) -> dict[str, Any]:
    architecture = draw.choice(sorted(ARCHITECTURES))
    kv_heads, group = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 3, 4))
    heads, head_dim = kv_heads * group, draw.choice((4, 6, 8, 16, 20, 32))
    num_layers = draw.randint(1, 4)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture].model_type,
        "vocab_size": draw.randint(40, 400),
        "hidden_size": heads * draw.choice((head_dim, head_dim, draw.randint(2, 24))),
        "intermediate_size": draw.randint(3, 160),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": draw.choice((64, 128, 200, 512)),
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-2)),
        "tie_word_embeddings": draw.random() < 0.4,
        "dtype": draw.choices(DTYPES, DTYPE_WEIGHTS)[0],
        "eos_token_id": draw.choice((0, [0, 1, 2])),
        "rope_parameters": _rope(draw, head_dim),
    }
    return config | _own_keys(draw, config)


def _own_keys(draw: Random, config: dict[str, Any]) -> dict[str, Any]:
    """What an architecture's config has in addition to those of all, or instead of it."""

    def chance() -> bool:
        return draw.random() < 0.4

    num_layers, window = config["num_hidden_layers"], draw.randint(1, 40)
    maybe_window = {"sliding_window": draw.choice((None, window))}
    kinds = {"sliding_window": window, "layer_types": [draw.choice((FULL, SLIDING)) for _ in range(num_layers)]}
    windows = {
        "use_sliding_window": chance(),
        "sliding_window": window,
        "max_window_layers": draw.randint(0, num_layers),
    }
    as_wide_as_heads = {"hidden_size": config["num_attention_heads"] * config["head_dim"]}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    num_experts = draw.randint(2, 9)
    experts = {"num_experts_per_tok": draw.randint(1, num_experts)}
    of_qwen = experts | {
        "num_experts": num_experts,
        "norm_topk_prob": chance(),
        "moe_intermediate_size": draw.randint(3, 60),
        "mlp_only_layers": [0] if chance() else [],
    }
    bias, mlp_bias = {"attention_bias": chance()}, {"mlp_bias": chance()}
    own: dict[str, dict[str, Any]] = {
        "Exaone4ForCausalLM": kinds,
        "GraniteForCausalLM": bias | mlp_bias | {
            "embedding_multiplier": draw.uniform(0.5, 4.0),
            "attention_multiplier": draw.uniform(0.1, 0.5),
            "residual_multiplier": draw.uniform(0.2, 1.0),
            "logits_scaling": draw.uniform(0.5, 8.0),
        },
        "LlamaForCausalLM": bias | mlp_bias,
        "MistralForCausalLM": maybe_window,
        "MixtralForCausalLM": experts | maybe_window | {"num_local_experts": num_experts},
        "Olmo2ForCausalLM": bias,
        "Olmo3ForCausalLM": kinds | bias | {"rope_parameters": {FULL: rope, SLIDING: rope}},
        "OlmoeForCausalLM": as_wide_as_heads | experts | {"num_experts": num_experts, "norm_topk_prob": chance()},
        "Phi3ForCausalLM": as_wide_as_heads | maybe_window | {
            "rope_parameters": rope | {"partial_rotary_factor": draw.choice((0.5, 1.0))}
        },
        "Qwen2ForCausalLM": windows,
        "Qwen2MoeForCausalLM": of_qwen | {"shared_expert_intermediate_size": draw.randint(3, 60)},
        "Qwen3ForCausalLM": windows | bias,
        "Qwen3MoeForCausalLM": of_qwen | bias,
        "SeedOssForCausalLM": bias | mlp_bias | {"attention_out_bias": chance()},
        "SmolLM3ForCausalLM": bias | {"no_rope_layers": [draw.randint(0, 1) for _ in range(num_layers)]},
    }  # fmt: skip
    return own[config["architectures"][0]]


def _rope(draw: Random, head_dim: int) -> dict[str, Any]:
    kind = draw.choice(("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope"))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice((100.0, 10_000.0, 1e6))}
    if kind != "default":
        rope["factor"] = draw.choice((1.5, 2.0, 4.0))
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = draw.choice((32, 48))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice((2.0, 4.0))}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            rope[name] = [draw.uniform(1.0, 4.0) for _ in range(head_dim // 2)]
    return rope


def _write_checkpoint(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Writes config.json and model.safetensors, with values so large that every bias and norm shows in the outputs."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 1 + 0.3 * torch.randn(shape, generator=generator)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * (1.5 / shape[1] ** 0.5 if len(shape) > 1 else 0.3)
        for name, shape in _shapes(parse_spec(config)).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    dtype = getattr(torch, config["dtype"])
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def _shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a checkpoint, by their names."""
    hidden, dim = spec.hidden_size, spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for number, layer in enumerate(spec.layers):
        at = f"model.layers.{number}."
        attention, fed = layer.attention, layer.feed_forward
        heads = (1, 1) if attention.qk_norm_span == "head" else (spec.num_heads, spec.num_kv_heads)
        norms = {attention.query_norm: heads[0] * dim, attention.key_norm: heads[1] * dim}
        norms |= dict.fromkeys((attention.norm, attention.post_norm, fed.norm, fed.post_norm), hidden)
        shapes |= {f"{at}{name}.weight": (size,) for name, size in norms.items() if name is not None}
        small: tuple[LinearSpec | None, ...] = (fed.router, fed.shared_gate) if isinstance(fed, ExpertsSpec) else ()
        for product in (*layer.products, *(each for each in small if each is not None)):
            for name, rows in product.tensors:
                shapes[f"{at}{name}.weight"] = (rows, product.inner)
                if product.bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


# Engines


def _settings(draw: Random, config: dict[str, Any]) -> dict[str, Any]:
    block_size = draw.choice((1, 2, 3, 4, 8, 16, 32))
    tokens = draw.choice((40, 80, 160, 600))
    settings = {
        "device": "cpu",
        "dtype": draw.choices(("auto", *DTYPES), (8, *DTYPE_WEIGHTS))[0],
        "kernels": draw.choice(("auto", "auto", "torch")),
        "deterministic": draw.random() < 0.3,
        "block_size": block_size,
        "kv_blocks": max(2, tokens // block_size),
        "max_step_tokens": draw.choice((1, 3, 8, 17, 32, 64, 2048)),
        "max_running_requests": draw.choice((1, 3, 8, 64)),
        "interactive_reserve": draw.choice((0.0, 0.0, 0.3)),
        "admission": draw.choice(("predicted", "optimistic")),
        "batching": draw.choice(("continuous",) * 8 + ("static", "static-unpadded")),
        "batch_size": draw.randint(1, 6),
        "run_ahead": draw.choice((0, 1)),
        **TIMELESS,
    }
    if config["rope_parameters"].get("rope_type") in ("dynamic", "longrope") and draw.random() < 0.5:
        settings["context_length"] = config["max_position_embeddings"]
    return settings


# Requests


def _requests(draw: Random, *, vocab_size: int, longest: int, count: int | None = None) -> list[TimedRequest]:
    """Requests with common prefixes, some of several choices, at random times.

    longest: tokens of prompt and output that the engine can hold
    """
    prefixes = [[draw.randrange(vocab_size) for _ in range(longest)] for _ in range(3)]
    requests: list[TimedRequest] = []
    for _ in range(count or draw.randint(3, 9)):
        length = draw.randint(1, max(1, min(longest - 2, draw.choice((8, 40, 120)))))
        shared = draw.randint(0, length)
        prompt = draw.choice(prefixes)[:shared] + [draw.randrange(vocab_size) for _ in range(length - shared)]
        sampling = _sampling(draw, vocab_size)
        most = min(longest - length, sampling["max_tokens"]) - 1
        resumed = draw.randint(1, min(most, 6)) if most > 0 and draw.random() < 0.2 else 0
        lane, salt, after = draw.randint(1, 3), draw.choice(("", "", "a")), draw.choice((0, 0, draw.randint(1, 30)))
        output = [draw.randrange(vocab_size) for _ in range(resumed)]
        for choice in range(draw.choice((1, 1, 1, 2, 3))):
            requests.append(
                TimedRequest(
                    len(requests) + 1,
                    prompt,
                    sampling,
                    output=output,
                    choice=choice,
                    lane=lane,
                    salt=salt,
                    after=after,
                    ends_after=draw.randint(1, 10) if draw.random() < 0.1 else None,
                    is_aborted=draw.random() < 0.5,
                )
            )
    return requests


def _sampling(draw: Random, vocab_size: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"seed": draw.randrange(1 << 63), "max_tokens": draw.randint(1, MOST_OUTPUT)}
    sampling["temperature"] = draw.choice((0.0, 0.0, draw.uniform(0.1, 2.0)))

    def sometimes(name: str, value: Any, chance: float = 0.25) -> None:
        if draw.random() < chance:
            sampling[name] = value

    sometimes("top_k", draw.randint(1, 40))
    sometimes("top_p", draw.uniform(0.05, 1.0))
    sometimes("min_p", draw.uniform(0.0, 0.4))
    sometimes("repetition_penalty", draw.uniform(0.7, 1.6))
    sometimes("presence_penalty", draw.uniform(-2.0, 2.0))
    sometimes("frequency_penalty", draw.uniform(-2.0, 2.0))
    biased = draw.sample(range(vocab_size), draw.randint(1, 8))
    sometimes("logit_bias", [(token, draw.uniform(-20.0, 20.0)) for token in biased])
    sometimes("stop_token_ids", draw.sample(range(vocab_size), draw.randint(1, 12)))
    sometimes("min_tokens", draw.randint(1, 8))
    sometimes("ignore_eos", True)
    sometimes("logprobs", draw.randint(0, 5), 0.7)
    sometimes("prompt_logprobs", draw.randint(0, 3))
    return sampling
