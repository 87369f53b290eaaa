"""A command of the simulator, called in this process."""

from collections.abc import Callable


def status_of(main: Callable[[list[str]], int], *arguments: object) -> int:
    """Its exit status."""
    try:
        return main(list(map(str, arguments)))
    except SystemExit as exit:
        return int(exit.code or 0)
