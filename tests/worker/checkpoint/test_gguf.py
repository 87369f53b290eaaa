"""GGUF files as models: the logits are transformers' with the same values, and what cannot be served is one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.worker.checkpoint.gguf_files import (
    ARCHITECTURES,
    KINDS,
    SCALES,
    config_for,
    finish,
    mutants,
    random_rows,
    write_model,
    writer_of,
)
from tests.worker.engine_rig import make_engine
from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import checked, their_logits
from trunkline.v1.worker_pb2 import Capability, GetModelResponse
from trunkline_cli.launcher import find_model
from trunkline_kernels.quantized_weight import dequantize
from trunkline_worker.engine.assembly import take_grammars
from trunkline_worker.front.text.tokenizer_files import read_tokenizer_files
from trunkline_worker.front_settings import WorkerSettings
from trunkline_worker.model.checkpoint.checkpoint import Checkpoint
from trunkline_worker.model.checkpoint.dequantization import quantized, values_of
from trunkline_worker.model.checkpoint.gguf_config import ROPE_FACTORS
from trunkline_worker.model.checkpoint.gguf_file import FORMATS, OTHER_FORMATS
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.model.loading import LoadedModel, load_model
from trunkline_worker.settings import EngineSettings

CPU = torch.device("cpu")
PROMPT = [5, 9, 3, 60, 41, 7, 7, 12, 30, 1, 2, 19]


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, **{"dtype": "float32", "device": CPU, **options})


def problem(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(path, **options)
    return checked(caught.value)


def small_file(path: Path, change: Callable[[Any], object] = lambda writer: None, **changes: Any) -> Path:
    """A file of Llama with one layer, which `change` adds to."""
    config = config_for("llama", num_hidden_layers=1, **changes)
    writer = writer_of(path, "llama", config)
    change(writer)
    write_model(path, "llama", ["Q8_0"], config, writer)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_file(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_formats_are_those_of_the_package() -> None:
    sizes = gguf.GGML_QUANT_SIZES
    for number, form in FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *sizes[kind]) == (form.name, form.values, form.num_bytes)
    assert {number: gguf.GGMLQuantizationType(number).name for number in OTHER_FORMATS} == OTHER_FORMATS


@pytest.mark.parametrize("kind", SCALES)
def test_any_bytes_have_the_values_that_the_package_gives_them(kind: str) -> None:
    form = next(form for form in FORMATS.values() if form.name == kind)
    rows = np.random.default_rng(1).integers(0, 256, (200, 4 * form.num_bytes), np.uint8)
    with np.errstate(invalid="ignore"):
        theirs = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(values_of(torch.from_numpy(rows), form).numpy(), theirs)
    kept = quantized(torch.from_numpy(rows), form)
    assert kept is not None
    np.testing.assert_array_equal(dequantize(kept).numpy(), theirs)


def test_a_long_tensor_is_dequantised_in_pieces_with_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    form, rows = FORMATS[3], torch.from_numpy(random_rows("Q4_1", 50, 64, np.random.default_rng(2)))
    whole, kept = values_of(rows, form), quantized(rows, form)
    assert kept is not None
    monkeypatch.setattr("trunkline_worker.model.checkpoint.dequantization.PIECE_BYTES", 300)
    assert torch.equal(values_of(rows, form), whole)
    in_pieces = quantized(rows, form)
    assert in_pieces is not None
    assert torch.equal(dequantize(in_pieces), dequantize(kept))


# Bytes of a value: 4 or 8 bits, and its share of the scales and offsets, which are float32.
BYTES = {"F16": 4.0, "Q8_0": 1 + 4 / 32, "Q4_0": 0.5 + 4 / 32, "Q4_1": 0.5 + 8 / 32, "Q4_K": 0.5 + 8 / 32}


@pytest.mark.parametrize(("kind", "num_bytes"), [*BYTES.items(), ("Q6_K", 1 + 4 / 16)])
def test_blocks_stay_quantised(kind: str, num_bytes: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, "llama", [kind], config_for("llama", num_hidden_layers=1, attention_bias=False, mlp_bias=False))
    model, again = load(path), load(path, quantization="int8")
    norms = 2 * model.spec.hidden_size * 4
    assert model.weight_bytes.layers == model.spec.layer_params * num_bytes + norms
    assert again.weight_bytes.layers < model.spec.layer_params * 1.1 + norms  # quantised again, with a scale per row


def test_rows_that_4_bits_cannot_hold_are_dequantised(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = config_for("llama", hidden_size=96, intermediate_size=96, num_hidden_layers=1)
    theirs = write_model(path, "llama", ["Q4_0"], config)
    model = load(path)
    assert model.weight_bytes.layers > model.spec.layer_params
    (logits,) = ragged_logits(model, [PROMPT])
    torch.testing.assert_close(logits, their_logits(theirs, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=["llama-biases", "llama-tied", "qwen2", "qwen3"],
)
def test_logits_equal_transformers_in_all_formats(
    architecture: str, changes: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    theirs = write_model(path, architecture, KINDS, config_for(architecture, **changes))
    (logits,) = ragged_logits(load(path, kernels=kernels), [PROMPT])
    expected = their_logits(theirs, PROMPT)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_equals_transformers(kind: str, tmp_path: Path) -> None:
    path, scaling = tmp_path / "model.gguf", SCALINGS[kind]
    config = config_for("llama", rope_scaling=scaling)
    writer = writer_of(path, "llama", config)
    if kind == "llama3":
        (tmp_path / "plain").mkdir()
        plain = write_model(tmp_path / "plain" / "plain.gguf", "llama", ["F32"], config_for("llama"))
        scaled = write_model(tmp_path / "plain" / "scaled.gguf", "llama", ["F32"], config)
        factors = plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
        assert len(set(factors.tolist())) > 2
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    else:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    theirs = write_model(path, "llama", ["F16"], config, writer)
    prompt = [index * 7 % 61 for index in range(50)]
    (logits,) = ragged_logits(load(path), [prompt])
    torch.testing.assert_close(logits, their_logits(theirs, prompt), atol=2e-4, rtol=0)


def test_a_quantised_file_is_served_in_bfloat16_unless_another_dtype_is_named(file: Path, tmp_path: Path) -> None:
    assert load(file, dtype="auto").dtype == torch.bfloat16
    half = tmp_path / "half.gguf"
    write_model(half, "llama", ["F16"], config_for("llama", num_hidden_layers=1))
    assert load(half, dtype="auto").dtype == torch.float16
    assert load(file, load_format="dummy").spec == load(file).spec


def test_what_the_metadata_says_is_served(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_eot_token_id(2)
        writer.add_eom_token_id(1)
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(7)
        writer.add_sampling_penalty_repeat(1.25)
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_chat_template(
            [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
        )

    path = small_file(tmp_path / "model.gguf", change)
    model = load(path)
    assert model.spec.context_length == 64
    assert model.eos_token_ids == {1, 2}
    sampling = model.default_sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.5, 7, 1.25)
    assert model.fingerprint == load(path).fingerprint
    files = read_tokenizer_files(path)
    config = json.loads(files.contents["tokenizer_config.json"])
    assert config["add_bos_token"]
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert [one["name"] for one in config["chat_template"]] == ["default", "tool_use"]
    assert files.templates == "{{ 1 }}\n{{ 2 }}"
    other = small_file(tmp_path / "other.gguf", lambda writer: writer.add_name("another"))
    assert load(other).fingerprint != model.fingerprint


def test_an_engine_takes_grammars_with_a_files_own_tokenizer(file: Path) -> None:
    engine, description = make_engine(file), GetModelResponse(vocab_size=61, eos_token_ids=[1])
    assert take_grammars(engine, description, EngineSettings(model=str(file))) == []
    assert Capability.CAPABILITY_GRAMMARS in description.capabilities
    assert engine.guided is not None
    engine.guided._link.close()


def test_a_tensor_in_another_format_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = writer_of(path, "llama", config_for("llama"))
    form = gguf.GGMLQuantizationType.Q5_K
    rows = np.zeros((61, gguf.GGML_QUANT_SIZES[form][1]), np.uint8)
    writer.add_tensor("token_embd.weight", rows, raw_shape=rows.shape, raw_dtype=form)
    finish(writer)
    told = problem(path)
    assert "model.gguf: tensor token_embd.weight is stored as Q5_K, which is not supported; supported: F32, F16" in told
    assert told.endswith("convert the file with llama-quantize, for example to Q8_0")


def test_another_architecture_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    finish(writer_of(path, "gemma3", config_for("llama")))
    told = problem(path)
    assert 'architecture "gemma3" is not supported in GGUF files; supported: llama, qwen2, qwen3' in told
    assert "serve the directory of the checkpoint" in told


ADDED: dict[str, tuple[Callable[[Any], object], str]] = {
    "expert_count": (lambda writer: writer.add_expert_count(8), "llama.expert_count is not known for LlamaForCausalLM"),
    "split": (lambda writer: writer.add_uint16("split.count", 2), "is one of 2 parts of a model: join them"),
    "scaling": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        'rope.scaling.type "longrope" is not supported; supported: none, linear, yarn',
    ),
    "tensor": (
        lambda writer: writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((2, 4), np.float32)),
        "unexpected tensor blk.0.ffn_gate_inp.weight",
    ),
}


@pytest.mark.parametrize("key", ADDED)
def test_what_may_change_the_outputs_is_refused_by_name(key: str, tmp_path: Path) -> None:
    change, told = ADDED[key]
    path = small_file(tmp_path / "model.gguf", change)
    assert told in problem(path)
    if key == "expert_count":
        assert load(path, ignore_config_keys=("llama.expert_count",)).spec.num_layers == 1


def test_a_file_that_was_joined_of_parts_is_served(tmp_path: Path) -> None:
    """llama-gguf-split writes a count of 0."""
    read_spec(small_file(tmp_path / "model.gguf", lambda writer: writer.add_uint16("split.count", 0)))


def test_a_file_behind_a_link_without_its_suffix_is_served_under_the_links_name(file: Path, tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub."""
    blob, link = tmp_path / "9fa1b2", tmp_path / "tales.gguf"
    blob.write_bytes(file.read_bytes())
    link.symlink_to(blob)
    assert find_model(str(link)) == link
    assert WorkerSettings(EngineSettings(str(link))).model_name == "tales"


def test_a_tensor_with_an_empty_axis_is_refused(tmp_path: Path) -> None:
    empty = np.zeros((0,), np.float32)
    path = small_file(tmp_path / "model.gguf", lambda writer: writer.add_tensor(ROPE_FACTORS, empty))
    assert "rope_freqs.weight has shape [0], which F32 cannot store" in problem(path)


def test_a_file_that_is_cut_short_is_refused_with_the_tensor(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-1000])
    assert "tensor output.weight ends at byte" in problem(cut)
    for data, told in ((b"", "is empty"), (b"GGUF", "is damaged or cut short"), (b"GGML....", "is not a GGUF file")):
        cut.write_bytes(data)
        assert told in problem(cut)


def test_tensors_that_contradict_the_metadata_are_named(tmp_path: Path) -> None:
    config = config_for("llama", num_hidden_layers=1)
    for name, changes, told in (
        (
            "wide",
            {"intermediate_size": 512},
            "tensor blk.0.ffn_gate.weight has shape [256, 256], its metadata says [512",
        ),
        ("deep", {"num_hidden_layers": 2}, "deep.gguf lacks the tensor blk.1.attn_norm.weight"),
        ("odd", {"head_dim": 63}, "head_dim 63 is not supported"),
    ):
        path = tmp_path / f"{name}.gguf"
        write_model(path, "llama", ["F16"], config, writer_of(path, "llama", config | changes))
        assert told in problem(path)


def test_values_that_are_not_finite_are_refused_with_the_tensor(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(each for each in reader.tensors if each.name == "blk.0.ffn_down.weight")
    tensor.data[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    reader.data.flush()
    assert "tensor blk.0.ffn_down.weight has NaN or infinite values: the file is damaged" in problem(path)


def test_a_damaged_header_is_one_line_and_nothing_else(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    path = tmp_path / "mutant.gguf"
    refused = 0
    for mutant in mutants(data, 400, most=4000):
        path.write_bytes(mutant)
        try:
            read_spec(path)
            read_tokenizer_files(path)
            Checkpoint(path)
        except ModelError as error:
            checked(error)
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_size_of_the_config_comes_from_the_metadata(architecture: str, tmp_path: Path) -> None:
    path, config = tmp_path / "model.gguf", config_for(architecture, num_hidden_layers=1)
    write_model(path, architecture, ["F32"], config)
    assert read_spec(path) == replace(read_spec(tmp_path / "model-config"), dtype=None)
