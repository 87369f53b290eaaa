"""docs/http.md and README.md: each example does what the page says with a cluster of `make serve`, and the tables and
lists of fields are those of the code."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.cluster.http_page import PAGE, error_rows, examples, limit_rows, protocol_rows
from tests.cluster.processes import Served, script
from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.edge.anthropic.anthropic_requests import ConversationFields, CountRequest, MessageRequest
from trunkline_router.edge.openai.chat import ChatRequest
from trunkline_router.edge.openai.chat_fields import Message
from trunkline_router.edge.openai.completion_request import CompletionRequest
from trunkline_router.edge.openai.generation_fields import GenerationFields, StreamOptions
from trunkline_router.edge.openai.models_and_tokens import DetokenizeBody, TokenizeBody
from trunkline_router.edge.output_format import NamedSchema, ResponseFormat, StructuredOutputs
from trunkline_router.edge.pooling.pooling_fields import (
    ClassifyRequest,
    CohereRerankRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreBody,
)
from trunkline_router.edge.request_fields import Fields
from trunkline_router.edge.responses.response_request import ResponseRequest

README = PAGE.parents[1] / "README.md"
TEXT = PAGE.read_text()
BODIES: list[type[Fields]] = [
    *(CompletionRequest, ChatRequest, Message, ResponseRequest, MessageRequest, CountRequest),
    *(ConversationFields, GenerationFields, StreamOptions, TokenizeBody, DetokenizeBody),
    *(ResponseFormat, NamedSchema, StructuredOutputs),
    *(EmbeddingRequest, ClassifyRequest, RerankRequest, CohereRerankRequest, ScoreBody),
]
OF_A_PART = {"role", "content", "include_usage", "continuous_usage_stats", "include_obfuscation"}  # of nested objects
BETWEEN = "\x1e"  # printed between the outputs of two commands


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("number", range(len(examples(PAGE))))
def test_an_example_prints_what_the_page_says(number: int, served: Served) -> None:
    commands = [(served.at_its_ports(command), printed) for command, printed in examples(PAGE)[number]]
    together = f"\nprintf '{BETWEEN}'\n".join(command for command, _ in commands)
    done = subprocess.run(["bash", "-euc", together], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    for (command, printed), actual in zip(commands, done.stdout.split(BETWEEN), strict=True):
        assert re.fullmatch(pattern(printed), squeezed(actual)), f"{command}\n{actual}"


def test_the_command_of_the_first_page_prints_what_the_page_says(served: Served) -> None:
    (((command, printed),),) = examples(README)
    words = shlex.split(command)
    assert words[:2] == [".venv/bin/trunkline", "generate"]
    done = run(script("trunkline"), *words[1:], f"--server={served.address}")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", printed)


@pytest.mark.parametrize("number", range(2))
def test_a_program_of_the_first_page_runs(number: int, served: Served) -> None:
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(programs) == 2
    done = run(sys.executable, "-c", served.at_its_ports(programs[number]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def pattern(printed: str) -> str:
    """What the page says, in which … stands for anything."""
    return ".*?".join(map(re.escape, squeezed(printed).split("…")))


def test_tables_say_what_the_code_does() -> None:
    lines = TEXT.splitlines()
    assert [row for row in (*error_rows(), *protocol_rows(), *limit_rows()) if row not in lines] == []


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_page_names_every_field(body: type[Fields]) -> None:
    fields, rest = TEXT.split("## Fields")[1].split("**Ignored**")
    ignored, refused = rest.split("## Streams")[0].split("**Refused by name**")
    for names, part in (
        ({field.alias or name for name, field in body.model_fields.items()} - body.ignored, fields),
        (body.ignored, ignored),
        (set(body.unserved), refused),
    ):
        assert [name for name in sorted(names - OF_A_PART) if f"`{name}`" not in part] == []


def test_the_page_names_every_endpoint() -> None:
    table = TEXT.split("## Endpoints")[1].split("###")[0]
    for name in PATHS:
        method, path = name.split(" ")
        shown = re.sub(r"{\w+(:path)?}", "{id}", path)
        assert f"`{method} {shown}`" in table
