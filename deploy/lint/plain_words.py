"""Fails if shipped text has words that hide their subject, such as "nobody" where a tenant or a request is meant."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHIPPED = (
    "protos",
    "kernels",
    "router",
    "worker",
    "bench",
    "deploy",
    "helm",
    "docs",
    "README.md",
    "Makefile",
    "pyproject.toml",
)
# Measurements and the log are history. The demo model's corpus is data. This file has to name the words.
LEFT_OUT = re.compile(r"^(bench/results/|bench/log\.md|deploy/demo/|deploy/lint/plain_words\.py)")
TEXT = (
    ".py",
    ".pyi",
    ".proto",
    ".md",
    ".yaml",
    ".tpl",
    ".txt",
    ".json",
    ".sh",
    ".c",
    ".lua",
    ".toml",
    ".js",
    ".html",
    ".css",
    "Makefile",
    "Dockerfile",
)
WORDS = re.compile(
    # Tenants, clients and workers are named, or referred to by "that": "who" often hides which of them is meant.
    r"(?i:\b(?:nobody|somebody|anybody|everybody|whoever|who|whom)\b)"
)


def findings(text: str) -> list[tuple[int, str]]:
    """Line numbers and words of what is found."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [(number, match.group(0).strip()) for match in WORDS.finditer(line)]
    return found


def main() -> None:
    listed = subprocess.run(["git", "ls-files", *SHIPPED], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    problems = []
    for name in listed.stdout.splitlines():
        if name.endswith(TEXT) and not LEFT_OUT.match(name):
            problems += [f"{name}:{line}: {word!r}" for line, word in findings((REPOSITORY / name).read_text())]
    if problems:
        sys.exit("\n".join(problems) + "\nplain_words: name the subject instead")


if __name__ == "__main__":
    main()
