"""Whatever is wrong with a tokenizer's files, a worker refuses them in one line, or serves what routers can read."""

import contextlib
import copy
import json
import os
import random
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.parameters import one_in
from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import CHAT_TEMPLATE, VOCAB_SIZE, tokenizer_files
from trunkline.status import RequestRefused
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer, TokenizerError
from trunkline_worker.front.text.tokenizer_files import read_tokenizer_files
from trunkline_worker.model.checkpoint.model_file import MOST_BYTES
from trunkline_worker.model.checkpoint.refusals import ModelError

FILES = {
    **tokenizer_files(
        chat_template=CHAT_TEMPLATE,
        pad_token={"__type": "AddedToken", "content": "<pad>"},
        extra_special_tokens={"image_token": "<image>"},
        chat_template_=[{"name": "default", "template": CHAT_TEMPLATE}],
    ),
    "special_tokens_map.json": json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}).encode(),
    "additional_chat_templates/rag.jinja": CHAT_TEMPLATE.encode(),
}
FILES["tokenizer_config.json"] = FILES["tokenizer_config.json"].replace(b'"chat_template_"', b'"chat_template"')
Made = TypeVar("Made")
WRONG: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**30, 1.5, float("nan"), "", "text", "\ud800", "\0", [], ["a"], [None], [{}], {}),
    *({"content": 5}, {"content": "\udfff"}, {"type": "Sequence"}, [{"name": "default"}], {"default": 3}),
)
WHOLE = (
    *(b"", b"[]", b'"text"', b"null", b"5", b"{", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\0", b"{}", b"[" * 100_000),
    *(
        b'{"a":' * 100_000,
        b"{{ 1" + b"0" * 5000 + b" }}",
        b"{" + b"(" * 3000,
        b"{{" + b"[" * 3000,
        b"{% for %}",
        b"1" * 5000,
    ),
    *(b"1" * 5000, "{}".encode("utf-16"), b'{"bos_token": 1' + b"0" * 5000 + b"}", b"{% if 1 %}" * 300),
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of long lists and vocabularies the first few."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries)[:12]:
        yield from paths_of(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def damaged(rng: random.Random) -> tuple[str, dict[str, bytes]]:
    """One file with one kind of damage; its name, and all files."""
    name = rng.choice(sorted(FILES))
    data = bytearray(FILES[name])
    kind = rng.choice(["truncated", "flipped", "cut out", "whole", "wrong", "wrong", "gone"])
    if kind == "truncated":
        del data[rng.randrange(len(data)) :]
    elif kind == "flipped":
        for _ in range(rng.choice([1, 1, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == "cut out":
        start = rng.randrange(len(data))
        del data[start : start + rng.randrange(1, 20)]
    elif kind == "wrong" and name.endswith(".json"):
        value = json.loads(FILES[name])
        path = rng.choice(list(paths_of(value)))
        data = bytearray(json.dumps(replaced(value, path, rng.choice(WRONG))).encode())
    else:
        data = bytearray(rng.choice(WHOLE))
    files = {**FILES, name: bytes(data)}
    if kind == "gone":
        del files[name]
    if rng.random() < 0.5:  # else the templates of files hide those of the configuration
        files = {key: content for key, content in files.items() if not key.endswith(".jinja") or key == name}
    return name, files


def write(directory: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)


def attempt(make: Callable[[], Made], *refusals: type[Exception]) -> tuple[Made | None, str]:
    """What is made, or why it is not: in one line. Other exceptions go on."""
    try:
        return make(), ""
    except refusals as error:
        problem = str(error)
    assert problem
    assert "\n" not in problem
    return None, problem


async def check(files: dict[str, bytes], helpers: Helpers) -> str:
    """What becomes of the files: refused, text alone, or served."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), files)
        sent, problem = attempt(lambda: read_tokenizer_files(Path(folder)), ModelError)
    if sent is None:
        assert any(name in problem for name in FILES), problem
        attempt(lambda: PromptTokenizer(files, helpers), TokenizerError)  # of a worker that sends them all the same
        return "refused"
    assert sent.contents == files
    prompts = PromptTokenizer(sent.contents, helpers)
    with contextlib.suppress(RequestRefused):
        ids = await prompts.encode("a <s> \n")
        await prompts.decode(array("i", [*ids, VOCAB_SIZE + 5]), keep_special=True)
    assert "\n" not in sent.template_problem
    return "text alone" if sent.template_problem or prompts.template_problem else "served"


@pytest.mark.parametrize("seed", one_in(4, range(4)))
async def test_a_worker_refuses_in_one_line_or_sends_what_a_router_reads(seed: int, helpers: Helpers) -> None:
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(400):
        _, files = damaged(rng)
        outcomes.add(await check(files, helpers))
    assert outcomes == {"refused", "text alone", "served"}


@pytest.mark.parametrize("name", FILES)
async def test_every_file_may_be_nothing_like_it_should_be(name: str, helpers: Helpers) -> None:
    for content in WHOLE:
        await check({**FILES, name: content}, helpers)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_or_a_dangling_link_in_the_place_of_a_file_is_one_line(name: str, tmp_path: Path) -> None:
    write(tmp_path, FILES)
    for as_link in (False, True):
        (tmp_path / name).unlink()
        if as_link:
            (tmp_path / name).symlink_to(tmp_path / "nowhere")
        else:
            (tmp_path / name).mkdir()
        with pytest.raises(ModelError, match=Path(name).name):
            read_tokenizer_files(tmp_path)
        if not as_link:
            (tmp_path / name).rmdir()
            (tmp_path / name).touch()


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_or_an_endless_file_in_the_place_of_a_file_is_one_line(name: str, tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=Path(name).name):
        read_tokenizer_files(tmp_path)
    (tmp_path / name).unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ModelError, match=f"{Path(name).name} cannot be read: it has more than"):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("length", [2, 10**6, 10**10])
def test_padding_and_truncation_of_any_length_cost_nothing(length: int, tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": length}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<pad>"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": 0}
    whole = json.loads(FILES["tokenizer.json"])
    write(tmp_path, {**FILES, "tokenizer.json": json.dumps({**whole, "padding": padding}).encode()})
    assert len(read_tokenizer_files(tmp_path).tokenizer.encode("a b c").ids) < 10
    write(tmp_path, {**FILES, "tokenizer.json": json.dumps({**whole, "truncation": truncation}).encode()})
    assert len(read_tokenizer_files(tmp_path).tokenizer.encode("a b c d e f").ids) > 2


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    files = read_tokenizer_files(tmp_path)
    for vocab_size in (VOCAB_SIZE, VOCAB_SIZE + 1, 100_000):
        files.check_vocabulary(vocab_size)
    for vocab_size in (VOCAB_SIZE - 1, 1):
        with pytest.raises(ModelError, match=f"tokenizer.json is another model's.* ends at {vocab_size - 1}"):
            files.check_vocabulary(vocab_size)


async def test_a_worker_with_bad_files_costs_one_line_and_the_others_serve(capsys: pytest.CaptureFixture[str]) -> None:
    bad = [
        FakeWorker(f"bad-{index}", files={**FILES, "tokenizer_config.json": content}, tokenizer_digest=b"bad")
        for index, content in enumerate([b"[]", b"\xff", b"[" * 100_000])
    ]
    good = FakeWorker("good")
    async with cluster(good, *bad, expected=(True, False, False, False)) as router:
        await until(lambda: all(worker.asked >= 3 for worker in bad))
        assert await router.answer([5, 6])
        assert [worker.tokenizer_calls for worker in bad] == [1, 1, 1], "the same files are not read again and again"
    printed = capsys.readouterr().out
    assert printed.count("tokenizer files are damaged") == 3
    assert "Traceback" not in printed
    assert "unexpected" not in printed
