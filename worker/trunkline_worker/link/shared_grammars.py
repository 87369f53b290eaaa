"""Grammars in a message to the engine: submits with the same one, such as the choices of a request, share its text."""

from collections.abc import Iterable

from trunkline.v1.worker_pb2 import Submit


def share_grammars(submits: Iterable[Submit]) -> None:
    """Leaves out the text of a grammar that an earlier submit has."""
    sent = set[bytes]()
    for submit in submits:
        if submit.work.HasField("grammar"):
            grammar = submit.work.grammar
            if grammar.digest in sent:
                grammar.ClearField("text")
            sent.add(grammar.digest)


def complete_grammars(submits: Iterable[Submit]) -> None:
    """Puts back what share_grammars() has left out."""
    texts = dict[bytes, str]()
    for submit in submits:
        if submit.work.HasField("grammar"):
            grammar = submit.work.grammar
            if grammar.text:
                texts[grammar.digest] = grammar.text
            else:
                grammar.text = texts[grammar.digest]
