"""The compiled grammars of a matching process, by digest: those used last are kept."""

from collections import OrderedDict

from llguidance import LLMatcher, LLTokenizer

from trunkline_worker.grammar.matching import compiled

MOST = 256
MOST_BYTES = 512 << 20


class CompiledGrammars:
    """Compiles each grammar once, and forks it for each sequence."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._num_bytes = 0

    def fork(self, digest: bytes, grammar: str, memory_bytes: int) -> LLMatcher:
        """A matcher of its own for one sequence. Raises CannotMatch.

        grammar: in llguidance's form
        memory_bytes: what the compiled grammar takes
        """
        if digest in self._found:
            self._found.move_to_end(digest)
            return self._found[digest][0].deep_copy()
        matcher = compiled(self._tokenizer, grammar)
        self._found[digest] = matcher, memory_bytes
        self._num_bytes += memory_bytes
        while len(self._found) > MOST or self._num_bytes > MOST_BYTES:
            self._num_bytes -= self._found.popitem(last=False)[1][1]
        return matcher.deep_copy()
