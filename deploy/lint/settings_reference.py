"""Writes the reference part of docs/configuration.md from the typed settings; --check only compares."""

from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from deploy.lint.generated_part import update
from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import ENVIRONMENT_PREFIX, base_type, flat_fields
from trunkline_worker.front_settings import WorkerSettings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KINDS = {int: "integer", float: "number", bool: "boolean", str: "text", tuple: "list"}


def table(cls: type) -> str:
    """A Markdown table with one row for each setting."""
    rows = [_row(item, hint) for item, hint in flat_fields(cls)]
    return "\n".join(["| flag | type, range | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _row(item: Field[Any], hint: Any) -> str:
    flag = "--" + item.name.replace("_", "-")
    cells = (f"`{flag}`", _range(item, base_type(hint)), _default(item), item.metadata["help"].replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def _range(item: Field[Any], base: type) -> str:
    least, most, choices = (item.metadata.get(name) for name in ("minimum", "maximum", "choices"))
    if choices is not None:
        return ", ".join(f"`{choice}`" for choice in choices)
    if least is None and most is None:
        return KINDS[base]
    if most is None:
        return f"{KINDS[base]}, {_shown(least)} or more"
    return f"{KINDS[base]}, {_shown(least)} to {_shown(most)}"


def _shown(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _default(item: Field[Any]) -> str:
    if item.default is MISSING:
        return "required"
    if item.default in (None, "", ()):
        return ""
    return f"`{str(item.default).lower() if isinstance(item.default, bool) else item.default}`"


def main() -> None:
    environment = f"The environment variable of a setting is its name in capitals after `{ENVIRONMENT_PREFIX}`"
    text = (
        f"{environment}, for example `{ENVIRONMENT_PREFIX}REDIS_URL`.\n\n"
        f"### Router (`trunkline-router`)\n\n{table(RouterSettings)}\n"
        f"### Worker (`trunkline-worker`)\n\n{table(WorkerSettings)}\n"
    )
    update(PAGE, "settings", f"\n{text}", "make settings-reference")


if __name__ == "__main__":
    main()
