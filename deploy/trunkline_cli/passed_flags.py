"""The flags that `trunkline serve` passes on: each goes to the servers that have it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trunkline_cli.server_flags import ROUTER_FLAGS, SWITCHES, WORKER_FLAGS

NO_TLS = "serve connects its processes without TLS"
# Flags of servers that serve cannot pass on, and why.
REFUSED = {
    "--config": "the router and the workers have different settings; pass them as flags",
    "--health-port": "each process needs a port of its own",
    "--served-model-name": "use --name",
    "--worker-id": "serve names its workers itself",
    "--tls-cert": NO_TLS,
    "--tls-key": NO_TLS,
    "--tls-client-ca": NO_TLS,
    "--tls-router-names": NO_TLS,
    "--worker-tls-ca": NO_TLS,
    "--worker-tls-cert": NO_TLS,
    "--worker-tls-key": NO_TLS,
    "--worker-tls-name": NO_TLS,
}


class FlagError(Exception):
    """A flag that cannot be passed on. The message is one line that names it."""


@dataclass(frozen=True, slots=True)
class PassedFlags:
    """Arguments for the router, and for every worker. Flags that both have are in both."""

    router: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "PassedFlags":
        """Raises FlagError."""
        router: list[str] = []
        workers: list[str] = []
        for flag, words in _with_values(arguments):
            if flag in REFUSED:
                raise FlagError(f"{flag} cannot be passed on: {REFUSED[flag]}")
            if flag not in ROUTER_FLAGS | WORKER_FLAGS:
                raise FlagError(f"unrecognized arguments: {' '.join(words)}")
            most_words = 1 if "=" in words[0] or flag in SWITCHES else 2
            if len(words) > most_words:
                raise FlagError(f"unrecognized arguments: {' '.join(words[most_words:])}")
            router += words if flag in ROUTER_FLAGS else ()
            workers += words if flag in WORKER_FLAGS else ()
        return cls(tuple(router), tuple(workers))


def _with_values(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag, with the words of the command line that it consists of."""
    words: list[str] = []
    for word in arguments:
        if word.startswith("--") and words:
            yield words[0].partition("=")[0], words
            words = []
        words.append(word)
    if words:
        yield words[0].partition("=")[0], words
