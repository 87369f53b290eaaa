"""`trunkline drain`, against a worker's front in this process."""

from tests.cli.test_connection import trunkline
from tests.worker.front.served_front import served_front

KEY = "the key of grants, of 32 bytes .."


async def test_a_drain_is_undone_with_the_key_that_it_needs() -> None:
    async with served_front(KEY.encode()) as worker:
        drain = ("drain", "--address", worker.address)
        assert await trunkline(*drain, TRUNKLINE_GRANT_KEY=KEY) == (0, "finished 0, cut off 0\n", "")
        assert worker.front.draining
        assert (await trunkline(*drain, "--undo"))[0] == 1
        assert worker.front.draining
        assert await trunkline(*drain, "--undo", TRUNKLINE_GRANT_KEY=KEY) == (0, "the worker admits requests\n", "")
        assert not worker.front.draining


async def test_a_drain_that_is_undone_has_no_timeout() -> None:
    status, _, told = await trunkline("drain", "--undo", "--timeout-s", "5")
    assert status == 2
    assert "not allowed with argument --undo" in told
