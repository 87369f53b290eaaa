"""The Dockerfiles name only existing files and packages, and the router's image has no torch. They are not built here,
because the tests do not need Docker."""

import re
import shlex
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
DOCKERFILES = sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile"))
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text().splitlines()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
HEAVY = {"torch", "triton", "transformers", "safetensors", "matplotlib"}
# Environment markers of an image's Python, as far as packages use them.
MARKERS = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
}


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions as (name, arguments), without comments and with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, rest) for name, rest in found]


def copied(file: Path) -> list[str]:
    """The paths that a Dockerfile copies from the repository."""
    rests = [rest for name, rest in instructions(file) if name == "COPY" and "--from" not in rest]
    return [source for rest in rests for source in shlex.split(rest)[:-1]]


def asked_for(name: str, extra: str) -> list[str]:
    """A package's requirements that apply to an image, with an extra or "". Raises PackageNotFoundError."""
    if name == PROJECT["project"]["name"]:
        project = PROJECT["project"]
        return list(project["optional-dependencies"][extra] if extra else project["dependencies"])
    return requires(name) or []


def reached(requirements: Iterable[str]) -> dict[str, str]:
    """All packages that some requirements install, by name, with the package that required each of them first.

    The requirements are read from the versions installed here; constraints.txt gives an image the same versions.
    """
    asked_by: dict[str, str] = {}
    looked_at: set[tuple[str, str]] = set()
    waiting = [(entry, "", "") for entry in requirements]
    while waiting:
        text, extra, whose = waiting.pop()
        entry = Requirement(text)
        if entry.marker is not None and not entry.marker.evaluate(MARKERS | {"extra": extra}):
            continue
        name = canonicalize_name(entry.name)
        asked_by.setdefault(name, whose)
        for part in {"", *entry.extras} - {part for seen, part in looked_at if seen == name}:
            looked_at.add((name, part))
            waiting += [(below, part, name) for below in asked_for(name, part)]
    return asked_by


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
    assert all(extra in PROJECT["project"]["optional-dependencies"] for extra in extras(file))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_whoever_builds_an_image_can_say_by_digest_what_it_is_built_on(file: Path) -> None:
    found = instructions(file)
    assert [rest.split()[0] for name, rest in found if name == "FROM"] == ["${BASE}", "${BASE}"]
    assert found[0][0] == "ARG", "before the first FROM, or it would be unknown there"
    name, _, base = found[0][1].partition("=")
    assert name == "BASE"
    assert fnmatch(base, "python:3.12-slim-*"), "by a tag that names the version"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_has_the_versions_that_tests_have_seen(file: Path) -> None:
    found = instructions(file)
    (at,) = [at for at, (name, rest) in enumerate(found) if name == "ENV" and "PIP_CONSTRAINT" in rest]
    settings = dict(entry.split("=") for entry in shlex.split(found[at][1]))
    assert settings["PIP_CONSTRAINT"] == settings["PIP_BUILD_CONSTRAINT"] == "/src/constraints.txt"
    assert ("WORKDIR", "/src") in found[:at]
    assert any(name == "RUN" and "pip install" in rest for name, rest in found[at:])
    pinned = {canonicalize_name(line.split("==")[0]) for line in CONSTRAINTS if "==" in line}
    # Some builds of torch require CUDA's libraries, each in the one version that torch names.
    installed = reached(asks(file)).keys() - {PROJECT["project"]["name"]}
    assert {name for name in installed if not name.startswith(("nvidia-", "cuda-"))} <= pinned
    assert {canonicalize_name(Requirement(entry).name) for entry in PROJECT["build-system"]["requires"]} <= pinned


def asks(file: Path) -> list[str]:
    return [f"{PROJECT['project']['name']}[{','.join(extras(file))}]"]


def test_the_routers_image_has_no_torch_and_the_workers_has() -> None:
    router, worker = (reached(asks(file)) for file in DOCKERFILES)
    assert {name: router[name] for name in HEAVY & router.keys()} == {}, "and who asks for it"
    assert {"torch", "triton", "safetensors", "huggingface-hub"} <= worker.keys()
    assert "grpcio-health-checking" in router.keys() & worker.keys(), (
        "trunkline drain and trunkline generate run in pods"
    )


def test_the_routers_image_returns_freed_memory_with_jemalloc() -> None:
    found = instructions(DOCKERFILES[0])
    (at,) = [at for at, (name, rest) in enumerate(found) if name == "ENV" and "LD_PRELOAD" in rest]
    settings = dict(entry.split("=") for entry in shlex.split(found[at][1]))
    assert settings["LD_PRELOAD"] == "libjemalloc.so.2"
    assert "dirty_decay_ms" in settings["MALLOC_CONF"]
    assert any(name == "RUN" and "libjemalloc2" in rest for name, rest in found[:at]), "before it is preloaded"


def test_a_package_is_found_however_far_behind_the_one_that_asks_for_it() -> None:
    router = reached(asks(DOCKERFILES[0]))
    assert router["markupsafe"] == "jinja2", "which is asked for by name"
    assert router["googleapis-common-protos"] in router, "and that one by another"
    assert "torch" in reached(["safetensors[torch]"])
    assert "torch" not in reached(["safetensors", "transformers"])
    assert "colorama" not in router, "of Windows alone"
