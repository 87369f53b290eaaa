"""Writes what is made from the typed settings: the reference in docs/configuration.md, and the flags that `trunkline
serve` passes on. --check only compares."""

from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from deploy.lint.generated_part import replace, update
from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import ENVIRONMENT_PREFIX, base_type, flat_fields
from trunkline_worker.front_settings import WorkerSettings

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "configuration.md"
FLAGS = REPOSITORY / "deploy" / "trunkline_cli" / "server_flags.py"
COMMAND = "make settings-reference"
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
    if isinstance(item.default, tuple):
        return f"`{','.join(item.default)}`"
    return f"`{str(item.default).lower() if isinstance(item.default, bool) else item.default}`"


def flags_module() -> str:
    """A module with the flags of both servers."""
    about = f'"""The flags of routers and workers. Generated from their settings: {COMMAND}."""\n'
    switches = {flag for cls in (RouterSettings, WorkerSettings) for flag in _switches(cls)}
    sets = {
        "ROUTER_FLAGS": _flags(RouterSettings), "WORKER_FLAGS": _flags(WorkerSettings), "SWITCHES": switches
    }  # fmt: skip
    return "\n".join([about, *(_set(name, flags) for name, flags in sets.items())])


def _flags(cls: type) -> set[str]:
    """The flags of a server."""
    values = {f"--{item.name.replace('_', '-')}" for item, hint in flat_fields(cls) if base_type(hint) is not bool}
    return {"--config"} | values | _switches(cls)


def _switches(cls: type) -> set[str]:
    """The flags of a server that take no value."""
    names = [item.name.replace("_", "-") for item, hint in flat_fields(cls) if base_type(hint) is bool]
    return {flag for name in names for flag in (f"--{name}", f"--no-{name}")}


def _set(name: str, flags: set[str]) -> str:
    return "\n".join([f"{name} = {{", *(f'    "{flag}",' for flag in sorted(flags)), "}"]) + "\n"


def main() -> None:
    environment = f"The environment variable of a setting is its name in capitals after `{ENVIRONMENT_PREFIX}`"
    text = (
        f"{environment}, for example `{ENVIRONMENT_PREFIX}REDIS_URL`.\n\n"
        f"### Router (`trunkline-router`)\n\n{table(RouterSettings)}\n"
        f"### Worker (`trunkline-worker`)\n\n{table(WorkerSettings)}\n"
    )
    update(PAGE, "settings", f"\n{text}", COMMAND)
    replace(FLAGS, flags_module(), COMMAND)


if __name__ == "__main__":
    main()
