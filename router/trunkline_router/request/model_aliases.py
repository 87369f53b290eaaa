"""Further names of served models, so that clients with a fixed model name can be served by another model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ALLOWED = "allowed: NAME=MODEL, where only the last character of NAME may be *"


@dataclass(frozen=True, slots=True)
class ModelAliases:
    """`exact`: alias → model. `prefixes`: the same for aliases that end with *, without it, the longest first."""

    exact: Mapping[str, str] = field(default_factory=dict)
    prefixes: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, entries: Sequence[str]) -> "ModelAliases":
        """Returns the aliases of --model-aliases, in which aliases_problem() has found no mistake."""
        pairs = [(name, model) for name, _, model in (entry.partition("=") for entry in entries)]
        prefixes = [(name[:-1], model) for name, model in pairs if name.endswith("*")]
        return cls(
            {name: model for name, model in pairs if not name.endswith("*")},
            sorted(prefixes, key=lambda pair: len(pair[0]), reverse=True),
        )

    def model_of(self, name: str) -> str | None:
        """Returns the model that a name stands for; None if it is no alias. An exact name takes precedence over a
        prefix, and a longer prefix over a shorter one. An empty name is no alias."""
        if not name or name in self.exact:
            return self.exact.get(name)
        return next((model for prefix, model in self.prefixes if name.startswith(prefix)), None)


def aliases_problem(entries: Sequence[str]) -> str | None:
    """Returns what is wrong with --model-aliases, in one line; None if it is valid."""
    pairs = [(name, model) for name, _, model in (entry.partition("=") for entry in entries)]
    names = [name for name, _ in pairs]
    for entry, (name, model) in zip(entries, pairs, strict=True):
        if not name or not model or "*" in name[:-1] + model or name.strip() != name or model.strip() != model:
            return f"--model-aliases: {entry!r} is no alias; {ALLOWED}"
        if names.count(name) > 1:
            return f"--model-aliases: {name!r} is there twice; each NAME may be there once"
        if model in names:
            return f"--model-aliases: {entry!r}: {model!r} is an alias itself; MODEL must be a served name"
    return None
