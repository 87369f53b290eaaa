"""Commands with a key and TLS, against a real server that demands both."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.client.certificates import Certificates, make_certificates
from tests.client.guarded_front import guarded_front
from tests.client.scripted_service import ScriptedService, serving
from tests.parameters import one_in
from trunkline_bench.servers.ports import free_port
from trunkline_cli.connection import API_KEY_VARIABLE, TLS_FILES, speaks_tls
from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import flat_fields
from trunkline_worker.front_settings import WorkerSettings

KEY = "tl-canary-1b7d"
USE_TLS = "use --tls, with --tls-ca FILE unless a public authority signed its certificate"
SERVERS = (RouterSettings, WorkerSettings)


@dataclass(frozen=True)
class Front:
    address: str
    certificates: Certificates


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    certificates, service = make_certificates(tmp_path), ScriptedService()
    async with serving(service), guarded_front(service.address, certificates, lambda key: key == KEY) as port:
        yield Front(f"127.0.0.1:{port}", certificates)


async def trunkline(*arguments: str, **variables: str) -> tuple[int | None, str, str]:
    """Exit status and what it prints on standard output and standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRUNKLINE_")}
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "trunkline_cli.main", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env={**environment, **variables})
    printed, errors = await process.communicate()
    assert KEY not in printed.decode() + errors.decode()
    return process.returncode, printed.decode(), errors.decode()


async def test_key_and_authority_are_given_by_flags(front: Front, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    flags = ["--server", front.address, "--api-key-file", str(key_file), "--tls-ca", str(front.certificates.ca_file)]
    assert await trunkline("generate", "x", *flags) == (0, "xab\n", "")
    named = [*flags, "--tls-server-name", "localhost"]
    assert await trunkline("models", *named) == (0, "m\tcontext 0\tworkers 0\n", "")


async def test_key_and_authority_are_given_by_variables(front: Front) -> None:
    variables = {"TRUNKLINE_API_KEY": KEY, "TRUNKLINE_CLIENT_TLS_CA": str(front.certificates.ca_file)}
    assert await trunkline("generate", "x", "--stream", "--server", front.address, **variables) == (0, "xab\n", "")
    assert await trunkline("models", "--server", front.address, **variables) == (0, "m\tcontext 0\tworkers 0\n", "")


async def test_without_the_key_the_command_says_so(front: Front) -> None:
    flags = ["--server", front.address, "--tls-ca", str(front.certificates.ca_file)]
    assert await trunkline("models", *flags) == (1, "", "trunkline models: the key is not valid\n")


@pytest.mark.parametrize("command", one_in(2, [["generate", "x"], ["models"]]), ids=["generate", "models"])
async def test_what_cannot_be_used_is_one_line(command: list[str], tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    missing = str(tmp_path / "missing")
    cases = {
        "plaintext: use --tls, or --allow-insecure-key": (
            ["--server", "router.example:50051"],
            {"TRUNKLINE_API_KEY": KEY},
        ),
        "No such file": (["--api-key-file", missing], {}),
        "the file is empty": (["--api-key-file", str(empty)], {}),
        "not UTF-8": (["--api-key-file", str(binary)], {}),
        f"{missing}: No such file": (["--tls-ca", missing], {}),
        "must be given together": (["--tls-cert", missing], {}),
        "api_key must be": ([], {"TRUNKLINE_API_KEY": f"{KEY} x"}),
    }
    for said, (flags, variables) in cases.items():
        code, printed, errors = await trunkline(*command, *flags, **variables)
        assert (code, printed, errors.count("\n")) == (1, "", 1)
        assert errors.startswith(f"trunkline {command[0]}: ")
        assert said in errors


@pytest.mark.parametrize("command", [["generate", "x", "--stream"], ["generate", "x"], ["models"]], ids=" ".join)
async def test_a_server_that_speaks_tls_is_told_from_one_that_is_not_there(command: list[str], front: Front) -> None:
    told = (1, "", f"trunkline {command[0]}: {front.address} speaks TLS: {USE_TLS}\n")
    assert await trunkline(*command, "--server", front.address) == told
    code, printed, errors = await trunkline(*command, "--server", f"127.0.0.1:{free_port()}")
    assert (code, printed) == (1, ""), "the prompt is not printed before there is an answer"
    assert "TLS" not in errors
    assert "Connection refused" in errors


async def test_a_drain_without_tls_says_that_the_worker_speaks_it(front: Front) -> None:
    told = (1, "", f"trunkline drain: {front.address} speaks TLS: {USE_TLS}\n")
    assert await trunkline("drain", "--address", front.address) == told


async def test_a_server_in_plaintext_does_not_speak_tls() -> None:
    service = ScriptedService()
    async with serving(service):
        assert not await asyncio.to_thread(speaks_tls, service.address)
    assert not speaks_tls("unix:/nowhere")


async def test_the_command_tells_its_version() -> None:
    assert await trunkline("--version") == (0, f"trunkline {version('trunkline')}\n", "")


def test_the_variables_of_clients_are_no_settings_of_servers() -> None:
    settings = {f"TRUNKLINE_{item.name.upper()}" for cls in SERVERS for item, _ in flat_fields(cls)}
    assert "TRUNKLINE_TLS_CERT" in settings
    assert settings.isdisjoint({API_KEY_VARIABLE, *(variable for _, variable, _ in TLS_FILES.values())})


@pytest.mark.parametrize("given", ["flags", "variables"])
async def test_a_drain_presents_its_certificate_as_the_other_commands_do(
    given: str, front: Front, tmp_path: Path
) -> None:
    """The front is no worker, but it demands TLS, and answers what it does not serve."""
    ca = str(front.certificates.ca_file)
    flags, variables = (["--tls-ca", ca], {}) if given == "flags" else ([], {"TRUNKLINE_CLIENT_TLS_CA": ca})
    code, _, errors = await trunkline("drain", "--address", front.address, *flags, **variables)
    assert code == 1
    assert errors == f"trunkline drain: {front.address}: the key is not valid\n"
    code, _, errors = await trunkline("drain", "--address", front.address, "--tls-cert", str(tmp_path / "none"))
    assert (code, errors.count("\n")) == (2, 1)
    assert "must be given together" in errors
