"""Runs commands of the simulator in this process."""

from collections.abc import Callable


def status_of(main: Callable[[list[str]], int], *arguments: object) -> int:
    """The exit status of a command."""
    try:
        return main(list(map(str, arguments)))
    except SystemExit as exit:
        return int(exit.code or 0)
