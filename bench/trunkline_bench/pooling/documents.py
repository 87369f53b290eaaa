"""Documents of heavy-tailed lengths, cut from this project's documentation."""

from pathlib import Path
from random import Random

from tokenizers import Tokenizer

SHORTEST, LONGEST = 16, 4096  # tokens, with the special ones
TAIL = 1.0  # exponent of the Pareto distribution: half of the documents have up to 32 tokens, a hundredth 1,600 or more
SPECIAL_TOKENS = 2  # before and after a text
TEXTS = Path(__file__).parents[3] / "docs"


def lengths(count: int) -> list[int]:
    """Returns the lengths of so many documents, in tokens: quantiles of a Pareto distribution, in random order."""
    found = [min(LONGEST, int(SHORTEST * ((index + 0.5) / count) ** (-1 / TAIL))) for index in range(count)]
    Random(count).shuffle(found)
    return found


class Documents:
    """A long text from which documents are cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = "\n".join(path.read_text() for path in sorted(TEXTS.glob("*.md")))
        self._offsets = tokenizer.encode(self._text, add_special_tokens=False).offsets

    def draw(self, wanted: list[int], seed: int) -> list[str]:
        """Returns documents of these lengths, give or take a token. Those of different seeds begin at other places, so
        no cached prefix is of use."""
        draw, found = Random(seed), []
        for length in wanted:
            first = draw.randrange(len(self._offsets) - length)
            last = first + max(1, length - SPECIAL_TOKENS) - 1
            found.append(self._text[self._offsets[first][0] : self._offsets[last][1]])
        return found
