"""The grammars of a router's session, which its submits name by their digests."""

from trunkline.names import grammar_digest
from trunkline.status import invalid
from trunkline.v1.worker_pb2 import Grammar, Submit
from trunkline.validation import GRAMMAR_KINDS, validate_grammar


def identify(grammar: Grammar) -> None:
    """Computes the digest of a complete grammar. Raises RequestRefused (INVALID_REQUEST) if the grammar is invalid."""
    validate_grammar(grammar)
    grammar.digest = grammar_digest(grammar)


class SessionGrammars:
    """Complete grammars by digest.  most_bytes: of their texts, all together"""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._grammars: dict[bytes, Grammar] = {}
        self._num_bytes = 0

    def keep(self, grammar: Grammar) -> None:
        """Keeps nothing if the kind is unknown, which a newer router may know. Raises RequestRefused (INVALID_REQUEST)
        if the grammar is invalid otherwise, or the session has too many."""
        if grammar.kind not in GRAMMAR_KINDS.values():
            return
        identify(grammar)
        self.drop(grammar.digest)
        self._num_bytes += len(grammar.text.encode())
        if self._num_bytes > self._most_bytes:
            raise invalid("grammar", f"the session's grammars have more than {self._most_bytes} bytes")
        self._grammars[grammar.digest] = grammar

    def drop(self, digest: bytes) -> None:
        """Forgets a grammar, if it is known."""
        dropped = self._grammars.pop(digest, None)
        if dropped is not None:
            self._num_bytes -= len(dropped.text.encode())

    def complete(self, submit: Submit) -> None:
        """Replaces the digest in a submit by the grammar. Raises RequestRefused (INVALID_REQUEST) if it is unknown."""
        if submit.work.HasField("grammar"):
            known = self._grammars.get(submit.work.grammar.digest)
            if known is None:
                raise invalid("grammar", "the digest names no grammar of this session that this worker knows")
            submit.work.grammar.CopyFrom(known)
