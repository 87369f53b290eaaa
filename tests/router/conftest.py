"""What tests of the router share."""

from collections.abc import AsyncIterator

import pytest

from trunkline_router.render_pool import RenderPool


@pytest.fixture
async def renderers() -> AsyncIterator[RenderPool]:
    """Starts no process unless a conversation is rendered."""
    pool = RenderPool()
    yield pool
    await pool.close()
