"""Tenants side by side on one cluster of real processes: names that collide mix nothing up."""

import asyncio
from random import Random
from typing import Any

from tests.cluster.processes import Cluster
from trunkline import Client

TENANTS = ("", "acme", "other", "acme2")
OPENINGS = ("Once upon a time", "The little fox", "A big red ball", "Lily and Tom", "One day in the park")


async def test_answers_are_exact_where_tenants_use_the_same_request_ids_and_sessions(cluster: Cluster) -> None:
    """48 requests at once, of four tenants, under one request id and one session per five."""
    draw = Random(7)
    asked = [(f"{draw.choice(OPENINGS)}, {number} times", number % 30, TENANTS[number % 4]) for number in range(48)]
    clients = {tenant: Client(cluster.address, tenant=tenant) for tenant in TENANTS}

    async def answer(prompt: str, seed: int, tenant: str, **names: Any) -> tuple[list[int], str, int]:
        done = await clients[tenant].complete(prompt, max_tokens=6, temperature=1.0, seed=seed, **names)
        (choice,) = done.choices
        return list(choice.token_ids), choice.text, done.prompt.prompt_tokens

    try:
        together = await asyncio.gather(
            *(
                answer(*one, request_id=f"request-{number // 16}", session=f"session-{number % 5}")
                for number, one in enumerate(asked)
            )
        )
        alone = [await answer(*one) for one in asked]
    finally:
        for client in clients.values():
            await client.close()
    assert together == alone
    assert len({tuple(ids) for ids, _, _ in alone}) > 24, "they differ, so that an exchange would show"
