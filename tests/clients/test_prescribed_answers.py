"""Models that say what a file prescribes."""

from tests.clients.conftest import ANSWERS, GREETING
from tests.clients.edge import Edge
from trunkline import Client


async def test_a_model_says_what_is_prescribed_however_it_is_sampled(player: Edge) -> None:
    async with Client(player.cluster.address) as client:
        drawn = await client.complete([("user", GREETING)], n=2, temperature=2.0, max_tokens=64, logprobs=1)
        assert [choice.text for choice in drawn.choices] == [ANSWERS[GREETING]] * 2
        cut = await client.complete([("user", GREETING)], max_tokens=3)
        assert ANSWERS[GREETING].startswith(cut.text)
        assert cut.usage.completion_tokens == 3
