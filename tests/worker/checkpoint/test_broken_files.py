"""Files of a model directory that are damaged, lie, or are no files: one line names them; nothing else is raised."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import base_config, checked, their_model
from trunkline.sampling_params import BY_MODEL
from trunkline_worker.model.checkpoint.checkpoint import INDEX, SINGLE
from trunkline_worker.model.checkpoint.model_file import MOST_BYTES
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.loading import load_model

CPU = torch.device("cpu")
NOBODY = 65534  # the user id of that name
TOKENS = [random.Random(3).randrange(60) for _ in range(12)]
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, float("nan"), float("inf"), 1e13, 10**13, 10**40, "", "a\nb", "\ud800", "\0",
    "x" * 5000, "..", "/etc/passwd", [], {}, [1], [[2]], {"a": 1}, {"a": None}, {"a": "../b"}, {"a": ["b"]},
]  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model in two shards, with every JSON file that the worker reads."""
    theirs = their_model(tmp_path, base_config("LlamaForCausalLM"))
    (tmp_path / SINGLE).unlink()
    theirs.save_pretrained(tmp_path, max_shard_size="12KB")
    (tmp_path / "config.json").write_text(json.dumps(base_config("LlamaForCausalLM")))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2], "temperature": 0.5, "top_k": 4})
    )
    return tmp_path


def load(directory: Path) -> torch.Tensor:
    return ragged_logits(load_model(directory, device=CPU, kernels="torch"), [TOKENS])[0]


def outcome(directory: Path) -> torch.Tensor | str:
    """The logits, or the one line that says why there are none."""
    try:
        return load(directory)
    except ModelError as error:
        return checked(error)


def problem(directory: Path) -> str:
    result = outcome(directory)
    assert isinstance(result, str)
    return result


@pytest.mark.slow
def test_every_key_of_every_json_file_may_hold_anything(directory: Path) -> None:
    right = load(directory)
    seen = 0
    for name, keys in {
        "config.json": ("vocab_size", "rope_scaling", "quantization_config", "eos_token_id", "secret", "bos_token_id"),
        "generation_config.json": ("eos_token_id", *BY_MODEL, "do_sample", "other"),
        INDEX: ("weight_map", "metadata"),
    }.items():
        path = directory / name
        text = path.read_text()
        for key in keys:
            for value in ODD_VALUES:
                path.write_text(json.dumps({**json.loads(text), key: value}))
                try:
                    result = outcome(directory)
                except Exception as error:
                    raise AssertionError(f"{name}: {key}={str(value)[:40]!r}: {type(error).__name__}") from error
                if isinstance(result, str):
                    assert name in result or "model.safetensors" in result, f"{key}={str(value)[:40]!r}: {result}"
                    seen += 1
                else:
                    assert torch.equal(result, right)
        path.write_text(text)
    assert seen > 150


def nested(depth: int) -> str:
    return '{"architectures": ["LlamaForCausalLM"], "auto_map": ' + "[" * depth + "]" * depth + "}"


CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "no UTF-8": b'{"a": "\xff"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a zero byte": b"\0",
    "a number of many digits": b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}",
    "nested by 100,000": nested(100_000).encode(),
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_json_file_with_other_contents_is_named(name: str, directory: Path) -> None:
    for contents in CONTENTS.values():
        (directory / name).write_bytes(contents)
        assert name in problem(directory)


def test_any_depth_of_nesting_loads_or_is_one_line(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    text = json.dumps(config)[:-1] + ', "auto_map": '
    for depth in (10, *range(850, 1010, 20), 5000, 50_000):
        (directory / "config.json").write_text(text + "[" * depth + "]" * depth + "}")
        result = outcome(directory)
        assert not isinstance(result, str) or "nested too deeply" in result


def test_a_file_without_end_is_not_read(directory: Path) -> None:
    with (directory / "config.json").open("r+b") as file:
        file.truncate(MOST_BYTES + 1)
    assert "config.json cannot be read: it has more" in problem(directory)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


NAMES = ["config.json", "generation_config.json", INDEX, "model-00001"]


@pytest.mark.parametrize("made", [a_directory, a_dangling_link, a_loop, a_pipe])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_named(name: str, made: Callable[[Path], None], directory: Path) -> None:
    path = next(directory.glob(name + "*"))
    path.unlink()
    made(path)
    assert path.name in problem(directory)


@contextmanager
def not_as_root() -> Iterator[None]:
    """As a user who may not read every file."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_may_not_be_read_is_named(name: str, directory: Path) -> None:
    with TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        copy = shutil.copytree(directory, Path(folder) / "model")
        copy.chmod(0o755)
        path = next(copy.glob(name + "*"))
        path.chmod(0)
        with not_as_root():
            assert path.name in problem(copy)


@pytest.mark.parametrize("closed", [".", "model"])
def test_a_closed_folder_is_not_said_to_lack_its_files(closed: str, directory: Path) -> None:
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = shutil.copytree(directory, Path(folder) / "model")
        (Path(folder) / closed).chmod(0o600)
        try:
            with not_as_root():
                assert "denied" in problem(copy)
        finally:
            (Path(folder) / closed).chmod(0o700)


def header_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    return header


def with_header(data: bytes, header: Any) -> bytes:
    """A safetensors file with the same tensors under another header."""
    (size,) = struct.unpack("<Q", data[:8])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def test_headers_that_lie_are_one_line(tmp_path: Path) -> None:
    their_model(tmp_path, base_config("LlamaForCausalLM"))
    file, draw = tmp_path / SINGLE, random.Random(8)
    data, header = file.read_bytes(), header_of(file)
    right, refused = load(tmp_path), 0
    for _ in range(150):
        changed = json.loads(json.dumps(header))
        name = draw.choice(sorted(changed))
        field = draw.choice(("dtype", "shape", "data_offsets", "name", "all"))
        if field == "name":
            changed[draw.choice(("other", "a\nb", "\u00e9", "model.norm.weight"))] = changed.pop(name)
        elif field == "all":
            changed[name] = draw.choice(ODD_VALUES)
        elif field == "dtype":
            changed[name][field] = draw.choice(
                ("F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "I64", "Q", 3, None)
            )
        else:
            value = draw.choice(([], [0], [1, 1], [-1, 5], [1 << 62, 1 << 62], [0, 1 << 40], ["a"], None, 7, [0.5, 1]))
            changed[name][field] = value
        file.write_bytes(with_header(data, changed))
        result = outcome(tmp_path)
        if isinstance(result, str):
            assert SINGLE in result or "lacks the tensor" in result
            refused += 1
        else:
            assert torch.equal(result, right)
    assert refused > 100


def test_files_with_flipped_or_missing_bytes_are_one_line_or_load(tmp_path: Path) -> None:
    their_model(tmp_path, base_config("LlamaForCausalLM"))
    file, draw = tmp_path / SINGLE, random.Random(9)
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(8 + size if draw.random() < 0.8 else len(data))] = draw.randrange(256)
        cut = len(data) if draw.random() < 0.7 else draw.randrange(len(data))
        file.write_bytes(bytes(changed[:cut]))
        outcome(tmp_path)  # any exception but one line would come out of it


def test_a_tensor_of_integers_is_refused_though_its_shape_fits(tmp_path: Path) -> None:
    their_model(tmp_path, base_config("LlamaForCausalLM"))
    file = tmp_path / SINGLE
    header = header_of(file)
    header["model.norm.weight"]["dtype"] = "I32"
    file.write_bytes(with_header(file.read_bytes(), header))
    assert "tensor model.norm.weight is stored as I32, which is not supported; supported: F64, F32" in problem(tmp_path)


def test_a_tensor_in_two_shards_is_refused(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    (directory / "copy.safetensors").write_bytes((directory / first).read_bytes())
    index["weight_map"]["other"] = "copy.safetensors"
    (directory / INDEX).write_text(json.dumps(index))
    assert "has the tensor" in problem(directory)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_absurd_sizes_are_refused_before_memory_is_taken(load_format: str, tmp_path: Path) -> None:
    base = base_config("LlamaForCausalLM")
    their_model(tmp_path, base)
    for changes in (
        {"vocab_size": 1 << 24, "hidden_size": 1 << 16},
        {"intermediate_size": 1 << 20, "hidden_size": 1 << 16},
        {"num_hidden_layers": 1 << 12, "intermediate_size": 1 << 20, "hidden_size": 1 << 12},
        {"num_attention_heads": 1 << 12, "head_dim": 1 << 12, "hidden_size": 1 << 16},
        {"num_hidden_layers": 10**13},
        {"max_position_embeddings": 10**13},
        {"max_position_embeddings": -1},
    ):
        (tmp_path / "config.json").write_text(json.dumps({**base, **changes}))
        with pytest.raises(ModelError) as caught:
            load_model(tmp_path, device=CPU, load_format=load_format)
        assert any(text in checked(caught.value) for text in (*changes, "has shape", "GiB are free"))
