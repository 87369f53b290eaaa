"""Which parts of a model a list of names means, by the rules of the software that writes it."""

import re
from collections.abc import Callable, Iterable, Sequence

from trunkline_worker.model.checkpoint.refusals import ModelError, shown

IsNamed = Callable[[str], bool]
REGEX = "re:"
ANY_LINEAR = "Linear"  # the class of every product in transformers


def compiled(regex: str) -> re.Pattern[str]:
    """Returns a regular expression of a file. Raises ModelError if it is none."""
    try:
        return re.compile(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{shown(regex)} is no regular expression: {shown(str(error))}") from None


def named(target: str) -> IsNamed:
    """As in compressed-tensors: a target is a name, a regular expression after "re:", or a class."""
    if target.startswith(REGEX):
        regex = compiled(target.removeprefix(REGEX))
        return lambda name: regex.match(name) is not None
    return lambda name: target in (name, ANY_LINEAR)


def by_precedence(targets: Iterable[str]) -> list[str]:
    """Returns targets in the order in which compressed-tensors tries them: names, regular expressions, classes."""
    return sorted(targets, key=lambda target: (target == ANY_LINEAR, target.startswith(REGEX), target))


def skipped(names: Sequence[str]) -> IsNamed:
    """As in transformers: a key is the start of a name up to a dot, such a start as a regular expression, or an end."""
    starts = [compiled(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names]
    return lambda name: any(start.match(name) for start in starts) or name.endswith(tuple(names))
