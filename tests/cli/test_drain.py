"""`trunkline drain`, against a worker's front in this process."""

import asyncio

import pytest

from tests.worker.front.served_front import served_front
from trunkline_cli import drain
from trunkline_cli.arguments import Parser

KEY = "the key of grants, of 32 bytes .."


async def drain_command(*arguments: str) -> int:
    """The exit status."""
    parser = Parser()
    drain.add_arguments(parser)
    return await asyncio.to_thread(drain.run, parser.parse_args(arguments))


async def test_a_drain_is_undone_with_the_key_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    async with served_front(KEY.encode()) as worker:
        address, key = f"--address={worker.address}", f"--grant-key={KEY}"
        assert await drain_command(address, key) == 0
        assert capsys.readouterr().out.endswith("finished 0, cut off 0\n")
        assert worker.front.draining
        assert await drain_command(address, "--undo") == 1
        assert worker.front.draining
        assert await drain_command(address, key, "--undo") == 0
        assert capsys.readouterr().out.endswith("the worker admits requests\n")
        assert not worker.front.draining


async def test_a_drain_that_is_undone_has_no_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await drain_command("--undo", "--timeout-s=5")
    assert "not allowed with argument --undo" in capsys.readouterr().err
