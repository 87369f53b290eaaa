"""The components of a tokenizer, such as its decoder, as tokenizer.json describes them."""

import json
from collections.abc import Iterator
from typing import Any

Part = dict[str, Any]


def parts_of(component: Any, key: str) -> list[Part] | None:
    """Returns the parts of a component in order, with sequences flattened, or None if the tokenizer has no such
    component. `key` names the list of parts in a sequence."""
    if component is None:
        return None

    def flat(part: Part) -> Iterator[Part]:
        if part["type"] != "Sequence":
            yield part
            return
        for inside in part[key]:
            yield from flat(inside)

    return list(flat(json.loads(component.__getstate__())))
