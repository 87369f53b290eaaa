"""Model directories: what loads, and the one clear line for what does not."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.worker.engine_rig import DEMO_MODEL
from tests.worker.model.checkpoints import write_checkpoint
from tests.worker.model.oracle import weights_of
from trunkline.sampling_params import BY_MODEL, TABLE
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_worker.model import loading
from trunkline_worker.model.architectures.unsupported import feature_of
from trunkline_worker.model.block_format import BlockFormat
from trunkline_worker.model.checkpoint.checkpoint import Checkpoint
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.weight_stream import WeightStream
from trunkline_worker.model.config_json import parse_spec
from trunkline_worker.model.loading import LoadedModel, load_model
from trunkline_worker.model.registry import ARCHITECTURES
from trunkline_worker.model.weights import whole_product


def load(directory: Path, **options: object) -> LoadedModel:
    return load_model(directory, device=torch.device("cpu"), **options)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint("llama2", tmp_path)
    return tmp_path


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def problem(directory: Path, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_shards_make_the_same_model_as_one_file(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path / "one")
    write_checkpoint("qwen3", tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load(tmp_path / name, kernels="torch") for name in ("one", "many"))
    for a, b in zip(weights_of(one).layers, weights_of(many).layers, strict=True):
        for product, other in zip(a.products, b.products, strict=True):
            one_matrix, other_matrix = (
                whole_product(each, torch.float32).matrix(torch.float32) for each in (product, other)
            )
            assert torch.equal(one_matrix, other_matrix)


def test_an_unsupported_architecture_is_named(checkpoint: Path) -> None:
    change_config(checkpoint, architectures=["BertModel"])
    assert "BertModel is not supported; supported: Exaone4ForCausalLM, GraniteForCausalLM" in problem(checkpoint)


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("DeepseekV3ForCausalLM", "multi-head latent attention"),
        ("Qwen3NextForCausalLM", "recurrent"),
        ("GraniteMoeHybridForCausalLM", "recurrent"),
        ("Gemma3ForCausalLM", "windows that need KV blocks of their own"),
        ("GPT2LMHeadModel", "norms that subtract a mean"),
        ("Qwen2_5_VLForConditionalGeneration", "other than text"),
    ],
)
def test_a_well_known_architecture_is_refused_with_what_it_would_need(
    name: str, feature: str, checkpoint: Path
) -> None:
    change_config(checkpoint, architectures=[name])
    assert re.search(f"{name} is not supported for its .*{feature}.*; supported: ", problem(checkpoint))


def test_no_architecture_is_both_served_and_refused() -> None:
    assert not [name for name in ARCHITECTURES if feature_of(name)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters.short_factor is missing"),
        ({"rope_parameters": {"rope_type": "proportional"}}, '"proportional"'),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"vocab_size": "many"}, "config.json"),
    ],
)
def test_what_the_decoder_cannot_do_is_named(checkpoint: Path, changes: dict[str, object], named: str) -> None:
    change_config(checkpoint, **changes)
    assert named in problem(checkpoint)


def test_a_directory_of_gguf_files_is_refused_with_a_way_out(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "MODEL.GGUF").write_bytes(b"GGUF")
    told = "is a directory without safetensors: to serve a GGUF file, name the file itself, such as "
    assert problem(folder) == f"{folder} {told}{folder / 'MODEL.GGUF'}"
    (checkpoint / "model.gguf").write_bytes(b"GGUF")
    load(checkpoint)  # with safetensors beside it
    (checkpoint / "model.safetensors").unlink()
    assert told in problem(checkpoint)


def test_a_missing_entry_of_the_config_is_named() -> None:
    with pytest.raises(ModelError, match="num_attention_heads is missing"):
        parse_spec({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48})


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors is damaged or cut short" in problem(checkpoint)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint("llama2", tmp_path, max_shard_size="20KB")
    next(iter(tmp_path.glob("model-00002-*"))).unlink()
    assert "model-00002" in problem(tmp_path)


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    write_checkpoint("llama2", tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "../model-00002"))
    assert "missing" in problem(tmp_path)


def test_a_tensor_of_another_shape_or_name_is_named(checkpoint: Path) -> None:
    change_config(checkpoint, intermediate_size=96)
    assert "mlp.gate_proj.weight has shape [80, 48], config.json says [96, 48]" in problem(checkpoint)
    change_config(checkpoint, intermediate_size=80, num_hidden_layers=2)
    assert "unexpected tensor model.layers.2" in problem(checkpoint)
    change_config(checkpoint, num_hidden_layers=4)
    assert "lacks the tensor model.layers.3" in problem(checkpoint)


def test_pickled_weights_are_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert "refusing pickled weights" in problem(checkpoint)
    assert "pytorch_model.bin" in problem(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "refusing pickled weights" in problem(checkpoint)


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "model.gguf"])
def test_a_missing_file_is_named_whatever_lies_beside_the_safetensors(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_bytes(b"")
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    assert "holds no model.safetensors" in problem(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "config.json is missing" in problem(checkpoint)


@pytest.mark.parametrize("name", ["x.bin", "Foo.gguf"])
def test_a_directory_is_not_judged_by_its_name_or_its_folders(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert f"{name}/config.json is missing" in problem(tmp_path / name)
    assert "config.json is missing" in problem(tmp_path)


def test_a_directory_without_weights_or_config_is_named(tmp_path: Path) -> None:
    assert "config.json is missing" in problem(tmp_path)
    for name in ("nowhere", "absent.gguf", "absent.pt"):
        assert f"{name} is neither a directory nor a GGUF file" in problem(tmp_path / name)
    write_checkpoint("llama2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "holds no model.safetensors" in problem(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in problem(tmp_path)


def test_dummy_weights_need_a_config_only_and_repeat(tmp_path: Path) -> None:
    write_checkpoint("qwen2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    one, two = (load(tmp_path, load_format="dummy", kernels="torch") for _ in range(2))
    assert torch.equal(weights_of(one).head.weight, weights_of(two).head.weight)
    assert one.fingerprint == two.fingerprint


def test_the_fingerprint_tells_weights_dtype_and_config_apart(checkpoint: Path) -> None:
    seen = {load(checkpoint).fingerprint, load(checkpoint, dtype="bfloat16").fingerprint}
    assert load(checkpoint).fingerprint in seen
    change_config(checkpoint, rms_norm_eps=1e-6)
    seen.add(load(checkpoint).fingerprint)
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    seen.add(load(checkpoint).fingerprint)
    assert len(seen) == 4


def test_the_execution_fingerprint_tells_formats_of_blocks_apart(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(checkpoint)
    block = model.block_format(16)
    assert block.num_bytes == model.kv_pool(3, 16).whole_blocks.shape[1]
    seen = {model.execution_fingerprint(16), replace(model, kv_dtype=torch.bfloat16).execution_fingerprint(16)}
    seen.add(model.execution_fingerprint(32))
    assert load(checkpoint).execution_fingerprint(16) in seen
    monkeypatch.setattr(loading, "BlockFormat", partial(BlockFormat, layout=block.layout + 1))
    seen.add(model.execution_fingerprint(16))
    assert len(seen) == 4


def test_generation_defaults_come_from_generation_config(checkpoint: Path) -> None:
    settings = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    model = load(checkpoint)
    assert model.eos_token_ids == {2, 7}
    assert model.default_sampling.temperature == pytest.approx(0.6)
    assert model.default_sampling.top_k == 40
    (checkpoint / "generation_config.json").unlink()
    assert load(checkpoint).eos_token_ids == {2}


DEFAULTS: list[tuple[dict[str, object], dict[str, float]]] = [
    ({}, {}),
    ({"temperature": 0.6}, {"temperature": 0.6}),
    ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.6}),
    ({"do_sample": False}, {}),
    ({"do_sample": True}, {}),
    ({"do_sample": True, "top_k": 20, "top_p": 0.8, "min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.1}),
    ({"top_k": -1, "temperature": None, "repetition_penalty": 1.1}, {"top_k": 0, "repetition_penalty": 1.1}),
    ({"temperature": 1, "top_k": 0, "max_new_tokens": 5}, {"temperature": 1.0, "top_k": 0}),
]


@pytest.mark.parametrize(("settings", "expected"), DEFAULTS)
def test_sampling_defaults_count_whatever_do_sample_says(
    checkpoint: Path, settings: dict[str, object], expected: dict[str, float]
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    defaults = load(checkpoint).default_sampling
    assert {field.name for field, _ in defaults.ListFields()} == expected.keys()
    for name, value in expected.items():
        assert getattr(defaults, name) == pytest.approx(value)


@pytest.mark.parametrize("name", BY_MODEL)
def test_every_parameter_of_which_the_table_says_so_has_a_default_of_the_model(checkpoint: Path, name: str) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({name: TABLE[name].example}))
    assert load(checkpoint).default_sampling == SamplingParams(**{name: TABLE[name].example})


def test_sampling_parameters_in_config_json_have_no_effect(checkpoint: Path) -> None:
    change_config(checkpoint, temperature=0.1, top_k=3, do_sample=True)
    assert not load(checkpoint).default_sampling.ListFields()


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token_id": 4000},
        {"eos_token_id": -1},
        {"eos_token_id": [[2]]},
        {"eos_token_id": 1.0},
        {"eos_token_id": True},
        {"do_sample": True, "top_p": 0.0},
        {"temperature": -0.1},
        {"temperature": 101},
        {"temperature": "0.7"},
        {"temperature": True},
        {"repetition_penalty": 0},
        {"top_k": -2},
        {"top_k": 2.0},
        {"min_p": float("nan")},
    ],
)
def test_generation_defaults_that_no_request_could_use_are_refused(
    checkpoint: Path, settings: dict[str, object]
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    assert "generation_config.json" in problem(checkpoint)


def test_a_context_longer_than_the_models_is_refused(checkpoint: Path) -> None:
    assert "256" in problem(checkpoint, context_length=257)
    assert load(checkpoint, context_length=100).context_length == 100


def test_the_demo_model_is_small_and_has_what_users_expect() -> None:
    model = load(DEMO_MODEL)
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= 8 << 20
    assert model.spec.head_dim == 64
    assert model.context_length >= 1024
    for name in ("README.md", "samples.md", "training.json", "chat_template.jinja", "tokenizer.json"):
        assert (DEMO_MODEL / name).is_file()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_streamed_arrive_whole(dtype: torch.dtype) -> None:
    stream = WeightStream(torch.device("cpu"), piece_bytes=64)
    for shape in ((1,), (16,), (17,), (5, 33), (0,)):
        source, target = torch.randn(shape).bfloat16(), torch.full(shape, float("nan"), dtype=dtype)
        stream.copy(target, source)
        assert torch.equal(target, source.to(dtype))
    whole = torch.zeros(7, 4, dtype=dtype)
    parts = torch.randn(3, 4), torch.randn(4, 4)
    for part, into in zip(parts, torch.split(whole, [3, 4]), strict=True):
        stream.copy(into, part)
    assert torch.equal(whole, torch.cat(parts).to(dtype))


def test_a_checkpoint_reads_through_a_stream(tmp_path: Path) -> None:
    write_checkpoint("llama2", tmp_path)
    stream = WeightStream(torch.device("cpu"), piece_bytes=1 << 10)
    with Checkpoint(tmp_path, stream) as streamed, Checkpoint(tmp_path) as plain:
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            shape = plain._handles[name].get_slice(name).get_shape()
            one, other = (torch.full(shape, float("nan")) for _ in range(2))
            streamed.read_into(one, name)
            plain.read_into(other, name)
            assert torch.equal(one, other)
