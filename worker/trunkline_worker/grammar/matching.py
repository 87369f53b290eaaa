"""What may follow an output: tokens that are forced, then a mask of tokens that may be sampled.

Forced tokens are computed at decision points. The first one is output position 0. If tokens are forced at a decision
point, they are taken, and the position after them is the next one; if not, one token is sampled under the mask, and the
position after it is the next one. An output is matched again by the same walk from position 0, whatever process does
it. So it is known whether the output ends among forced tokens, and a continued stream gets the rest of them.
"""

import traceback
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Time and memory of one mask are bounded by these, and those of a whole output by the number of its tokens.
LIMITS = LLParserLimits(
    verbose_errors=False,  # they quote outputs
    max_lexer_states=50_000,  # of 1 to 2 kB, for each sequence
    max_items_in_row=5_000,  # an object has 4 for each optional property that may come next
)
MOST_REPEATS = 1_000  # of forced tokens at one position, each time of at least one token
SLOW_S = 10e-3  # of a processor, to find what may follow one token
TOO_COMPLEX = ("limit", "max is", "too big", "too many", "too large", "too complex", "fuel")

BUG = "an internal error; see the worker's log"  # for the client

# What the library cannot do, by a part of its error.
NAMED = {
    "patternProperty": "two patterns of patternProperties may match the same name",
    "min/maxProperties": "minProperties and maxProperties need all properties to be required",
    "'multipleOf'": "a multipleOf has too many digits",
    "lookarounds": "an anchor of a regular expression is neither at its beginning nor at its end",
    "if regex is empty": "a pattern is too complex together with the limits of the length",
}


class CannotMatch(Exception):
    """A grammar cannot be compiled, or an output cannot go on. The message is for the client. It quotes nothing."""


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher of an empty output. Raises CannotMatch."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises CannotMatch if the matcher has found an error."""
    if not matcher.is_error():
        return
    error = matcher.get_error()
    if "NoExtension" in error or "Unsatisfiable" in error:
        raise CannotMatch("no text satisfies it")
    for part, why in NAMED.items():
        if part in error:
            raise CannotMatch(why)
    if any(word in error.lower() for word in TOO_COMPLEX):
        raise CannotMatch("it is too large or too complex")
    raise CannotMatch("it is not valid")


def trace_of(error: BaseException) -> str:
    """The traceback of a bug, for the log. Without the error's text, which may quote a grammar or an output."""
    return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__


class Matching:
    """Follows the output of one sequence.  matcher: of an empty output, for this sequence alone"""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, output: Sequence[int] = ()) -> None:
        """Raises CannotMatch, as all methods do."""
        self._matcher = matcher
        self._end_token = min(tokenizer.eos_tokens)
        self.num_output = 0
        self.forced: list[int] = []  # tokens after the output, which the matcher has consumed
        self._decide()
        self.advance(output)

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes in output tokens."""
        for token in tokens:
            if self.forced:
                if self.forced[0] != token:
                    raise CannotMatch("a token of the output differs from the one that is forced")
                del self.forced[0]
            else:
                self._consume([token])
                self._decide()
            self.num_output += 1

    def mask_into(self, address: int, num_bytes: int) -> bool:
        """Writes the mask of what may follow the forced tokens, one bit for each token. Returns False, and forces the
        token that ends the sequence, if nothing may follow them."""
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
            check(self._matcher)
        if not self._matcher.is_stopped():
            return True
        if self.forced[-1:] != [self._end_token]:
            self.forced.append(self._end_token)
        return False

    def _decide(self) -> None:
        """Takes all forced tokens at a decision point, which is the present position."""
        for _ in range(MOST_REPEATS):
            forced = self._matcher.compute_ff_tokens()
            check(self._matcher)
            if not forced:
                return
            self._consume(forced)
            self.forced += forced
        raise CannotMatch("it is too large or too complex")

    def _consume(self, tokens: list[int]) -> None:
        if not self._matcher.consume_tokens(tokens):
            check(self._matcher)
            raise CannotMatch("a token of the output is not allowed")
