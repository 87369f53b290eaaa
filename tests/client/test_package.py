"""The contract package as a user gets it: typed, and without the servers' dependencies."""

import inspect
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from trunkline import Client, SyncClient
from trunkline.client.client_requests import GenerateOptions
from trunkline.sampling_params import Sampling

REPOSITORY = Path(__file__).parents[2]
# As in pyproject.toml, by their modules, and what grpc itself depends on.
DEPENDENCIES = {"trunkline", "grpc", "grpc_status", "google", "xxhash", "typing_extensions"}
ONLY_ASYNC = {"direct", "inter_token_timeout_s"}

# What users write, and what mypy says to it.
RIGHT = """
import asyncio
from contextlib import aclosing, closing

from trunkline import Client, ClientTls, SyncClient
from trunkline.client.client_requests import Message
from trunkline.errors import TrunklineError, TryAgain


async def token() -> str:
    return "key"


async def main() -> int:
    async with Client("127.0.0.1:1", api_key=token, tls=ClientTls(ca_file="ca.pem"), timeout_s=1.0) as client:
        async with aclosing(client.generate("x", max_tokens=3, stop=["."], lane="batch")) as pieces:
            async for piece in pieces:
                text: str = piece.text
        done = await client.complete([("user", "hi")], n=2, seed=7)
        tool = {"type": "function", "function": {"name": "f"}}
        chat: list[Message] = [("user", "hi"), done.choices[0].message]
        called = await client.complete(chat, tools=[tool])
        arguments: list[str] = [call.arguments for call in called.tool_calls]
        ids: list[int] = await client.tokenize("x")
        return len(done.choices) + len(text) + len(ids) + len(arguments)


def blocking() -> str:
    with SyncClient(api_key=lambda: "key", retries=0) as client:
        try:
            with closing(client.generate([1, 2])) as pieces:
                text = "".join(piece.text for piece in pieces)
        except TryAgain as error:
            later: float | None = error.retry_after_s
            return f"{later} {error.request_id}"
        except TrunklineError as error:
            return error.reason
        return text + client.complete("x").text


asyncio.run(main())
"""
WRONG = """
from trunkline import Client, SyncClient


async def key() -> str:
    return "key"


SyncClient(api_key=key)
SyncClient().complete("x", max_tokenz=1)
SyncClient().generate("x", max_tokens="many")
Client().complete(7)
text: int = SyncClient().complete("x").text
"""


def test_both_clients_work_where_only_their_dependencies_are_installed() -> None:
    script = f"""
import asyncio, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {sorted(DEPENDENCIES)} + list(sys.stdlib_module_names):
            raise ImportError(name)

sys.meta_path.insert(0, Refuses())
from trunkline import Client, SyncClient
from trunkline.errors import NoWorker

async def main():
    async with Client("127.0.0.1:1", retries=0) as client:
        await client.complete("x")

for call in (lambda: asyncio.run(main()), lambda: SyncClient("127.0.0.1:1", retries=0).complete("x")):
    try:
        call()
    except NoWorker as error:
        print(type(error).__name__)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "protos")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("NoWorker\nNoWorker\n", "")


def test_the_marker_of_types_is_in_the_wheel() -> None:
    """hatch packs what git does not ignore in the packages that pyproject.toml names."""
    marker = "protos/trunkline/py.typed"
    listed = subprocess.run(["git", "ls-files", marker], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert listed.stdout.split() == [marker]
    wheel = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "protos/trunkline" in wheel["packages"]
    assert "exclude" not in wheel


@pytest.mark.slow
def test_mypy_sees_the_types_in_a_users_program(tmp_path: Path) -> None:
    """The package is found as an installed one, in a virtual environment: there mypy demands the marker."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    installed = [str(REPOSITORY / "protos"), *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "packages.pth").write_text("\n".join(installed))
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(home / "bin" / "python")]
    done = subprocess.run(
        [*command, "--config-file=", "--cache-dir=cache", "right.py", "wrong.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if not line.startswith("wrong.py")] == []
    assert {line.split(":")[1] for line in errors} == {"9", "10", "11", "12", "13"}


@pytest.mark.parametrize("client", [Client, SyncClient])
def test_complete_takes_the_options_of_generate(client: type[Client] | type[SyncClient]) -> None:
    arguments = set(inspect.signature(client.generate).parameters) - {"self", "prompt", "sampling"}
    assert set(GenerateOptions.__annotations__) - set(Sampling.__annotations__) == arguments


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def face(client: type) -> dict[str, list[tuple[str, object]]]:
        methods = {name: item for name, item in vars(client).items() if callable(item) and not name.startswith("_")}
        methods["__init__"] = vars(client)["__init__"]
        return {
            name: [(one.name, one.default) for one in inspect.signature(method).parameters.values()]
            for name, method in methods.items()
        }

    blocking, asynchronous = face(SyncClient), face(Client)
    asynchronous["__init__"] = [one for one in asynchronous["__init__"] if one[0] not in ONLY_ASYNC]
    assert blocking == asynchronous
