"""Every RPC, message, field and value of the contract has a comment. This also checks it where buf cannot run."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

PROTOS = Path(__file__).parents[2] / "protos"
FILES = sorted(str(file.relative_to(PROTOS)) for file in PROTOS.rglob("*.proto"))


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "set.pb"
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_source_info"]
    subprocess.run([*compiler, f"--descriptor_set_out={out}", *FILES], check=True, cwd=PROTOS)
    return {file.name: file for file in FileDescriptorSet.FromString(out.read_bytes()).file}


def elements(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Names of the elements that need a comment, by their paths in SourceCodeInfo (numbers of descriptor.proto)."""
    found: dict[tuple[int, ...], str] = {}

    def message(path: tuple[int, ...], one: DescriptorProto, name: str) -> None:
        if one.options.map_entry:
            return
        found[path] = name
        for i, item in enumerate(one.field):
            found[(*path, 2, i)] = f"{name}.{item.name}"
        for i, nested in enumerate(one.nested_type):
            message((*path, 3, i), nested, f"{name}.{nested.name}")

    for i, one in enumerate(file.message_type):
        message((4, i), one, one.name)
    for i, enum in enumerate(file.enum_type):
        found[5, i] = enum.name
        found |= {(5, i, 2, j): f"{enum.name}.{v.name}" for j, v in enumerate(enum.value)}
    for i, service in enumerate(file.service):
        found[6, i] = service.name
        found |= {(6, i, 2, j): f"{service.name}.{rpc.name}" for j, rpc in enumerate(service.method)}
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_part_of_the_contract_has_a_comment(name: str, described: dict[str, FileDescriptorProto]) -> None:
    file = described[name]
    said = {tuple(at.path) for at in file.source_code_info.location if at.leading_comments.strip()}
    wanted = elements(file)
    assert wanted
    assert [what for path, what in wanted.items() if path not in said] == []
