"""The Dockerfiles name only what there is, and the router's brings no torch. Building them needs Docker, which tests do
not."""

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCKERFILES = sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
HEAVY = {"torch", "triton", "transformers", "safetensors", "matplotlib"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, the rest) of each, without comments and with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, rest) for name, rest in found]


def copied(file: Path) -> list[str]:
    """What it takes from the repository."""
    rests = [rest for name, rest in instructions(file) if name == "COPY" and "--from" not in rest]
    return [source for rest in rests for source in shlex.split(rest)[:-1]]


def requirements(extra: str) -> set[str]:
    """Names of the packages that an extra asks for directly, those of the extras that it takes in included."""
    project = PROJECT["project"]
    found = {re.split(r"[^\w.-]", entry)[0] for entry in project["dependencies"]}
    for entry in project["optional-dependencies"][extra]:
        inner = re.fullmatch(r"trunkline\[(.+)\]", entry)
        if inner:
            found |= {name for part in inner[1].split(",") for name in requirements(part)}
        else:
            found.add(re.split(r"[^\w.-]", entry)[0])
    return found


def extras(file: Path) -> list[str]:
    (found,) = re.findall(r"'\.\[([\w,]+)\]'", file.read_text())
    return str(found).split(",")


def test_there_is_an_image_for_each_kind_of_process() -> None:
    assert [file.name for file in DOCKERFILES] == ["router.Dockerfile", "worker.Dockerfile"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_what_is_copied_exists_and_is_what_the_package_is_built_from(file: Path) -> None:
    sources = copied(file)
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert f"!{source}" in ignored, "all else is kept from the build"
    for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert any(package == source or package.startswith(source + "/") for source in sources)
    assert PROJECT["project"]["readme"] in sources


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_starts_a_command_of_the_package_as_nobody_special(file: Path) -> None:
    found = instructions(file)
    (entry,) = [rest for name, rest in found if name == "ENTRYPOINT"]
    (command,) = re.findall(r'"([^"]+)"', entry)
    assert command in PROJECT["project"]["scripts"]
    assert [rest for name, rest in found if name == "USER"] == ["10001:10001"]
    bases = [rest.split()[0] for name, rest in found if name == "FROM"]
    assert len(bases) == 2
    assert all(fnmatch(base, "python:3.*-slim-*") for base in bases), "by a tag that names the version"
    assert all(extra in PROJECT["project"]["optional-dependencies"] for extra in extras(file))
    assert "--constraint constraints.txt" in file.read_text()


def test_the_routers_image_has_no_torch_and_the_workers_has() -> None:
    router, worker = ({name for extra in extras(file) for name in requirements(extra)} for file in DOCKERFILES)
    assert not router & HEAVY
    assert {"torch", "triton", "safetensors", "huggingface_hub"} <= worker
    assert "grpcio-health-checking" in router & worker, "trunkline drain and trunkline generate are used in pods"
