"""What a directory says of its outputs is read in full, or refused with the file and what is not supported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.worker.pooled.checkpoints import write_model, write_modules
from tests.worker.pooled.pooled_rig import PooledEngine
from trunkline.v1.worker_pb2 import PoolingActivation
from trunkline_worker.model.checkpoint.refusals import ModelError


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory without modules.json."""
    folder = tmp_path_factory.mktemp("bert")
    write_model(folder, "bert", "Model")
    return folder


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_prompts_and_the_longest_input_are_told(bert: Path, tmp_path: Path) -> None:
    folder = linked(bert, tmp_path)
    prompts = {"query": "query: ", "document": ""}
    write_modules(
        folder,
        pooling="pooling_mode_mean_tokens",
        normalize=False,
        config_sentence_transformers={"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot"},
        sentence_bert_config={"max_seq_length": 128, "do_lower_case": False},
    )
    model = PooledEngine(folder).description
    assert (dict(model.pooling.prompts), model.pooling.default_prompt) == (prompts, "query")
    assert (model.context_length, PooledEngine(folder, context_length=200).description.context_length) == (128, 200)
    assert model.pooling.activation == PoolingActivation.POOLING_ACTIVATION_NONE


@pytest.mark.parametrize("activation", ["Identity", "Sigmoid"])
def test_the_activation_of_a_cross_encoder_is_the_one_that_it_names(activation: str, tmp_path: Path) -> None:
    write_model(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    where = "linear" if activation == "Identity" else "activation"
    name = f"torch.nn.modules.{where}.{activation}"
    change(tmp_path / "config.json", sentence_transformers={"activation_fn": name, "version": "5.0"})
    expected = "NONE" if activation == "Identity" else "SIGMOID"
    activations = PoolingActivation.Name(PooledEngine(tmp_path).description.pooling.activation)
    assert activations == f"POOLING_ACTIVATION_{expected}"


def linked(source: Path, folder: Path) -> Path:
    """A directory with the files of another one."""
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        PooledEngine(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_encoder_without_modules_is_refused(bert: Path) -> None:
    assert "has no modules.json" in refusal(bert)


@pytest.mark.parametrize(
    ("name", "value"),
    [("quantization", "int8"), ("kv_dtype", "fp8"), ("kv_blocks", 7), ("load_format", "dummy")],
)
def test_a_setting_that_has_no_meaning_for_an_encoder_is_refused(
    bert: Path, name: str, value: object, tmp_path: Path
) -> None:
    folder = linked(bert, tmp_path)
    write_modules(folder, pooling="pooling_mode_cls_token")
    assert f"{name}={value} is for decoders" in refusal(folder, **{name: value})


def test_a_task_that_the_checkpoint_is_not_made_for_is_refused(bert: Path, tmp_path: Path) -> None:
    assert "is made to embed" in refusal(bert, task="score")
    write_model(tmp_path, "qwen3", "ForCausalLM")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"maybe": 3}}}))
    assert "lacks the token yes, no or" in refusal(tmp_path, task="score")


BROKEN_FILES = [
    ("modules.json", "{}", "is no list of modules"),
    ("modules.json", "[", "is no JSON"),
    ("modules.json", '[{"type": "a.Transformer", "path": "../elsewhere"}]', "within the directory"),
    ("modules.json", '[{"type": "a.Transformer", "path": ""}, {"type": "a.WeightedPooling", "path": "x"}]',
     "WeightedPooling; supported"),
    ("1_Pooling/config.json", '{"pooling_mode_weightedmean_tokens": true}', "the pooling .*weightedmean"),
    ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}', "the pooling "),
    ("2_Dense/config.json", '{"use_residual": true}', "use_residual true"),
    ("1_Pooling/config.json", '{"pooling_mode_cls_token": true, "include_prompt": false}', "include_prompt false"),
    ("2_Dense/config.json", '{"activation_function": "os.system"}', "activation_function"),
    ("2_Dense/model.safetensors", "x", "damaged or cut short"),
    ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "prompts is not an object of texts"),
    ("config_sentence_transformers.json", '{"default_prompt_name": "a"}', 'default_prompt_name "a" is none of'),
    ("sentence_bert_config.json", '{"max_seq_length": -1}', "max_seq_length -1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BROKEN_FILES)
def test_a_broken_file_is_named(bert: Path, name: str, content: str, message: str, tmp_path: Path) -> None:
    folder = linked(bert, tmp_path)
    write_modules(folder, pooling="pooling_mode_cls_token", dense=[(8, 48)])
    (folder / name).write_text(content)
    error = refusal(folder)
    assert name.rpartition("/")[2] in error
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder true"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"secret": 1}, "secret is not known for BertModel"),
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"max_position_embeddings": 301}, "has shape"),
        ({"matryoshka_dimensions": [49]}, "matryoshka_dimensions"),
        ({"model_type": "roberta"}, "contradicts"),
    ],
)
def test_a_key_that_is_not_supported_is_named(
    bert: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = linked(bert, tmp_path)
    write_modules(folder, pooling="pooling_mode_cls_token")
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**json.loads((bert / "config.json").read_text()), **changes}))
    assert message in refusal(folder)
