"""Every key of config.json: logits are those that transformers computes from the same file, or the key is refused."""

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import (
    VOCAB,
    base_config,
    checked,
    parse_problem,
    silence,
    their_logits,
    their_model,
    write_config,
)
from trunkline_worker.model.architectures.config_keys import KINDS, NEUTRAL, READ, WITHOUT_EFFECT
from trunkline_worker.model.checkpoint.entries import without
from trunkline_worker.model.checkpoint.generation_defaults import read_generation_defaults
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import parse_spec
from trunkline_worker.model.loading import load_model
from trunkline_worker.model.registry import ARCHITECTURES

CPU = torch.device("cpu")
TOKENS = [random.Random(2).randrange(VOCAB) for _ in range(30)]
ABSENT = object()

ODD_VALUES: list[Any] = [
    ABSENT, None, True, False, 0, -1, 1, 2, 3, 7, 1.0, 2.5, -0.5, float("nan"), float("inf"), 1e13, 10**13, 10**40, "",
    "many", "8", [], {}, [1], [[2]], {"a": 1}, [None], "\ud800", "\n",
]  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
PARTIAL_LONG = LONG | {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
# What a key may sensibly hold, and near misses.
VALUES: dict[str, list[Any]] = {
    "architectures": [["LlamaForCausalLM"], ["GPT2LMHeadModel"], ["LlamaForCausalLM", "Other"], "LlamaForCausalLM"],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "gpt2"],
    "num_key_value_heads": [4],
    "head_dim": [4, 5, 6, 16],
    "hidden_act": ["silu", "swish", "gelu", "relu"],
    "hidden_size": [25],
    "rms_norm_eps": [1e-6, 0.1, 1e-3],
    "rope_theta": [500000.0, 10000, 1.5],
    "dtype": ["float32", "torch.float32", "auto", "int8", "float64"],
    "torch_dtype": ["float32", "int8"],
    "eos_token_id": [[2, 3], VOCAB, [VOCAB]],
    "layer_types": [
        [FULL, SLIDING], [SLIDING, FULL], [SLIDING, SLIDING], [FULL, FULL], [FULL], [FULL] * 3, [FULL, "other"],
        ["attention", FULL], ["chunked_attention", FULL],
    ],
    "rope_scaling": [
        YARN, LLAMA3, {"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0},
        {**YARN, "rope_theta": 5e5}, LLAMA3 | {"original_max_position_embeddings": 8}, {"rope_type": "default"},
        {"rope_type": "default", "factor": 2.0},
        {"type": "yarn", "rope_type": "linear", "factor": 2.0}, {"factor": 2.0}, LONG,
        LONG | {"original_max_position_embeddings": 64},
        {FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "linear", "factor": 2.0}},
    ],
    "rope_parameters": [
        YARN | {"rope_theta": 5e5}, LLAMA3 | {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5},
        {FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "linear", "factor": 2.0}}, {"rope_theta": None},
        {"rope_type": None}, {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    "original_max_position_embeddings": [8, 64],
    "partial_rotary_factor": [0.5],
    "no_rope_layers": [[0, 0], [1, 1], [0, 1, 2], [0], [True, False], [1, "0"]],
    "no_rope_layer_interval": [4],
}  # fmt: skip

# A norm of the result of one intermediate value divides by almost nothing if that is almost 0.
WELL_CONDITIONED = [13, 40]
EXPERTS: dict[str, list[Any]] = {"num_experts_per_tok": [1, 2, 5]}
QWEN_EXPERTS = EXPERTS | {
    "num_experts": [1, 2, 7, 16],
    "norm_topk_prob": [ABSENT, True, False],
    "moe_intermediate_size": [1, 5, 33],
    "decoder_sparse_step": [ABSENT, 1, 2, 3],
    "mlp_only_layers": [ABSENT, None, [], [0], [1, 7]],
}
# What random configurations of an architecture may hold in addition to those of all.
OWN_CHOICES: dict[str, dict[str, list[Any]]] = {
    "Exaone4ForCausalLM": {"layer_types": ["random"], "intermediate_size": WELL_CONDITIONED},
    "GraniteForCausalLM": {
        "embedding_multiplier": [ABSENT, 1, 12.0],
        "attention_multiplier": [ABSENT, 0.0625, 0.5],
        "residual_multiplier": [ABSENT, 1.0, 0.22],
        "logits_scaling": [ABSENT, 8.0, 0.7],
    },
    "MixtralForCausalLM": EXPERTS | {"num_local_experts": [1, 2, 7, 16], "sliding_window": [ABSENT, None, 1, 3, 16]},
    "Olmo2ForCausalLM": {"intermediate_size": WELL_CONDITIONED},
    "Olmo3ForCausalLM": {
        "intermediate_size": WELL_CONDITIONED,
        "rope_theta": [ABSENT, 5e5],
        "rope_scaling": [ABSENT, None, {}, YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}],
        "rope_parameters": [
            ABSENT, None, {}, {FULL: YARN | {"rope_theta": 1e4}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
            {FULL: LLAMA3}, {SLIDING: {"rope_theta": 1e4, "rope_type": "default"}},
        ],
    },
    "OlmoeForCausalLM": EXPERTS | {"num_experts": [1, 2, 7, 16], "norm_topk_prob": [ABSENT, True, False]},
    "Phi3ForCausalLM": {
        "hidden_size": [16, 32, 40],
        "head_dim": [ABSENT],
        "partial_rotary_factor": [ABSENT, 0.25, 0.5, 0.75, 1.0],
        "rope_scaling": [ABSENT, None, {}, LONG, PARTIAL_LONG, {"rope_type": "default", "partial_rotary_factor": 0.5}],
        "rope_parameters": [ABSENT, None, PARTIAL_LONG],
    },
    "Qwen2MoeForCausalLM": QWEN_EXPERTS
    | {"shared_expert_intermediate_size": [1, 5, 33], "qkv_bias": [ABSENT, True, False]},
    "Qwen3MoeForCausalLM": QWEN_EXPERTS,
    "SeedOssForCausalLM": {"attention_out_bias": [ABSENT, True, False]},
    "SmolLM3ForCausalLM": {
        "no_rope_layers": [ABSENT, None, [0, 1, 1, 0, 1], [1] * 5],
        "no_rope_layer_interval": [ABSENT, 1, 2, 3],
    },
}  # fmt: skip


def mutations(architecture: str) -> list[tuple[str, Any]]:
    own = ARCHITECTURES[architecture].keys
    keys = sorted(READ | own.read | NEUTRAL.keys() | own.neutral.keys())
    return [(key, value) for key in keys for value in ODD_VALUES + VALUES.get(key, [])]


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    made = {name: entry for name, entry in config.items() if name != key}
    return made if value is ABSENT else {**made, key: value}


def outcome(directory: Path, config: dict[str, Any]) -> str:
    """ "equal" where the logits are transformers', else why the config is refused, by us or by them."""
    problem = parse_problem(config)
    if problem is not None:
        return problem
    vocab, length = config.get("vocab_size", VOCAB), min(len(TOKENS), parse_spec(config).context_length)
    write_config(directory, config)
    try:
        read_generation_defaults(directory, vocab)
        theirs = their_model(directory, config)
    except ModelError as error:
        return checked(error)
    except Exception as error:  # whatever it is, it is a refusal
        return f"theirs: {error}"
    tokens = [token % vocab for token in TOKENS[:length]]
    model = load_model(directory, device=CPU, kernels="torch")
    expected, (got,) = their_logits(theirs, tokens), ragged_logits(model, [tokens])
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    return "equal"


@pytest.mark.parametrize("one_of", [24, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mutated_key_gives_the_logits_of_transformers_or_is_refused_by_name(
    architecture: str, one_of: int, tmp_path: Path
) -> None:
    base = base_config(architecture)
    equal = 0
    # Each architecture begins elsewhere, so that together they see more.
    for key, value in mutations(architecture)[sorted(ARCHITECTURES).index(architecture) :: one_of]:
        shown = f"{key}={'absent' if value is ABSENT else repr(value)}"
        try:
            result = outcome(tmp_path, changed(base, key, value))
        except Exception as error:
            raise AssertionError(f"{shown}: {error}") from error
        equal += result == "equal"
        if result != "equal":
            words = {key, key.removesuffix("s"), "RoPE scaling"} if "rope" in key else {key, key.removesuffix("s")}
            assert any(word in result for word in words), f"{shown}: {result}"
    assert equal > 100 // one_of


@pytest.mark.parametrize("count", [15, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_configs_give_the_logits_of_transformers_or_are_refused(
    architecture: str, count: int, tmp_path: Path
) -> None:
    draw = random.Random(architecture)
    choices: dict[str, list[Any]] = {
        "head_dim": [ABSENT, 2, 4, 6, 10, 16],
        "num_key_value_heads": [ABSENT, 1, 2, 4],
        "num_hidden_layers": [1, 2, 3, 5],
        "hidden_size": [8, 20, 24, 28],
        "intermediate_size": [1, 13, 40],
        "sliding_window": [ABSENT, None, 1, 3, 16, 100],
        "use_sliding_window": [ABSENT, True, False],
        "max_window_layers": [ABSENT, 0, 1, 2, 28],
        "layer_types": [ABSENT, ABSENT, None, "random"],
        "attention_bias": [ABSENT, True, False],
        "mlp_bias": [ABSENT, True, False],
        "tie_word_embeddings": [ABSENT, True, False],
        "rope_scaling": [ABSENT, None, {}, *VALUES["rope_scaling"]],
        "rope_parameters": [ABSENT, ABSENT, None, {}, *VALUES["rope_parameters"]],
        "original_max_position_embeddings": [ABSENT, ABSENT, ABSENT, 8, 32],
        "rope_theta": [ABSENT, 10000.0, 5e5],
        "max_position_embeddings": [64, 300],
    }
    choices |= OWN_CHOICES.get(architecture, {})
    results = []
    for _ in range(count):
        config = base_config(architecture)
        for key in draw.sample(sorted(choices), draw.randrange(1, 7)):
            config = changed(config, key, draw.choice(choices[key]))
        if config.get("layer_types") == "random":
            config["layer_types"] = [draw.choice((FULL, SLIDING)) for _ in range(config["num_hidden_layers"])]
        if architecture == "MistralForCausalLM" and "layer_types" in config:
            # For transformers this is a Ministral then, whose code needs both.
            config |= {"head_dim": config.get("head_dim", 6), "sliding_window": config.get("sliding_window") or 7}
        try:
            results.append(outcome(tmp_path, config))
        except Exception as error:
            raise AssertionError(f"{json.dumps(config)}: {error}") from error
        assert not results[-1].startswith("theirs: "), f"{json.dumps(config)}: {results[-1]}"
    assert results.count("equal") > count // 8


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ARCHITECTURES if name != "LlamaForCausalLM"),
        # Without windows, other keys of windows have no effect.
        ("Qwen2ForCausalLM", {"use_sliding_window": False}),
        pytest.param("Qwen3ForCausalLM", {"use_sliding_window": False}, marks=pytest.mark.slow),
    ],
)
def test_a_value_that_transformers_config_class_refuses_is_refused_by_name(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    base = base_config(architecture) | changes
    write_config(tmp_path, base)
    values = [value for value in ODD_VALUES[1:] if not isinstance(value, int) or value < 10**13]  # it lists all layers
    refused = 0
    # The class's own fields: the base class checks no types.
    for key in sorted(vars(type(AutoConfig.from_pretrained(tmp_path)))["__annotations__"]):
        for value in values:
            write_config(tmp_path, changed(base, key, value))
            try:
                with silence():
                    AutoConfig.from_pretrained(tmp_path)
            except Exception:
                problem = parse_problem(changed(base, key, value)) or ""
                assert key in problem or key == "rope_parameters", f"{key}={value!r}: {problem}"
                refused += 1
    assert refused > 300


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_without_effect_may_hold_anything(architecture: str) -> None:
    base = base_config(architecture)
    expected = parse_spec(base)
    for key in sorted(WITHOUT_EFFECT - KINDS.keys() - ARCHITECTURES[architecture].keys.kinds.keys()):
        for value in ODD_VALUES:
            assert parse_spec(changed(base, key, value)) == expected


def test_an_unknown_key_is_refused_by_name_unless_the_operator_names_it(tmp_path: Path) -> None:
    draw = random.Random(4)
    base = base_config("LlamaForCausalLM")
    their_model(tmp_path, base)
    plain = load_model(tmp_path, device=CPU)
    known = READ | WITHOUT_EFFECT | NEUTRAL.keys()
    for _ in range(100):
        key = "".join(draw.choices(string.ascii_lowercase + "_", k=draw.randrange(1, 20)))
        if key in known:
            continue
        value = draw.choice(ODD_VALUES[1:])
        assert f"--ignore-config-keys {key} serves" in (parse_problem({**base, key: value}) or "")
        assert parse_spec(without({**base, key: value}, (key,))) == parse_spec(base)
    write_config(tmp_path, {**base, "secret_sauce": 3})
    with pytest.raises(ModelError, match="--ignore-config-keys secret_sauce"):
        load_model(tmp_path, device=CPU)
    served = load_model(tmp_path, device=CPU, ignore_config_keys=("secret_sauce",))
    assert torch.equal(ragged_logits(served, [TOKENS])[0], ragged_logits(plain, [TOKENS])[0])
    assert served.fingerprint != plain.fingerprint


def test_all_unknown_keys_are_named_at_once() -> None:
    config = base_config("LlamaForCausalLM")
    problem = parse_problem({**config, "sauce": 1, "a b": 2, "other": None}) or ""
    assert problem.startswith('"a b", other, sauce are not known')
    assert "--ignore-config-keys '\"a b\",other,sauce' serves" in problem
    many = parse_problem({**config, **{f"key_{n}": n for n in range(500)}}) or ""
    assert "and 480 more are not known" in many
    assert len(many) < 1000


@pytest.mark.parametrize("key", sorted(READ - {"vocab_size"}))
def test_a_known_key_that_is_ignored_counts_as_absent_in_every_reader(key: str, tmp_path: Path) -> None:
    base = {**base_config("LlamaForCausalLM"), "eos_token_id": 2, "rope_scaling": {"type": "linear", "factor": 2.0}}
    their_model(tmp_path, base)

    def outcome(config: dict[str, Any], ignored: tuple[str, ...]) -> Any:
        write_config(tmp_path, config)
        try:
            model = load_model(tmp_path, device=CPU, ignore_config_keys=ignored)
        except ModelError as error:
            return str(error)
        return model.spec, model.eos_token_ids, model.context_length

    absent = {name: value for name, value in base.items() if name != key}
    assert outcome({**base, key: "nonsense"}, (key,)) == outcome(absent, ())


def test_keys_that_are_ignored_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    base = {**base_config("LlamaForCausalLM"), "rope_scaling": {"type": "linear", "factor": 2.0}}
    their_model(tmp_path, base)
    scaled = load_model(tmp_path, device=CPU)
    unscaled = load_model(tmp_path, device=CPU, ignore_config_keys=("rope_scaling",))
    assert not torch.allclose(ragged_logits(scaled, [TOKENS])[0], ragged_logits(unscaled, [TOKENS])[0])
    assert scaled.fingerprint != unscaled.fingerprint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fields_of_transformers_own_config_classes_are_all_known(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    # A config.json that transformers writes with everything in it, defaults included.
    write_config(tmp_path, base_config(architecture))
    config = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
    assert parse_problem(config) is None
