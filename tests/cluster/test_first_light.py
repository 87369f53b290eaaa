"""A real text through client, router and worker."""

from pathlib import Path

from tests.cluster.processes import running_cluster
from trunkline import Client


async def test_stories260k_greedy_from_bos_equals_the_published_text(shared: Path) -> None:
    published = (shared / "README.md").read_text().replace("⏎", "\n")
    with running_cluster(shared / "models" / "stories260k", workers=1) as cluster:
        async with Client(cluster.address) as client:
            done = await client.complete([1], max_tokens=200, temperature=0.0)
            assert done.text in published
            assert done.text.startswith("Once upon a time, there was a little girl named Lily.")
            assert done.text.endswith("Lily didn't want to help her mom, so she")
            assert len(done.choices[0].token_ids) == 200
            assert done.usage.completion_tokens == 200
            for _ in range(20):  # beside busy processes, the worker may put a whole answer into one piece
                streamed = [piece async for piece in client.generate([1], max_tokens=200, temperature=0.0)]
                assert "".join(piece.text for piece in streamed) == done.text
                if len(streamed) > 1:
                    break
            else:
                raise AssertionError("no answer came in pieces")
