"""POST /v1/messages/count_tokens."""

import pytest

from tests.router.anthropic.messages_client import HI, Json, client, error_of
from tests.router.fake_worker import FakeWorker
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.quota import Quotas

CONVERSATIONS: list[Json] = [
    {},
    {"system": "Be kind.", "messages": [HI, {"role": "assistant", "content": "oh"}, HI]},
    {"system": [{"type": "text", "text": "Be kind."}], "messages": [{"role": "user", "content": "höher 🦊"}]},
    {"messages": [HI, {"role": "assistant", "content": "It is"}]},
    {"tools": [], "thinking": {"type": "disabled"}, "tool_choice": {"type": "none"}, "model": "tiny"},
]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=str)
async def test_the_count_is_the_input_of_the_same_conversation(conversation: Json) -> None:
    worker = FakeWorker("w")
    async with client(worker) as messages:
        counted = await messages.count(**conversation)
        assert not worker.submits, "nothing is generated"
        assert counted == (await messages.message(**conversation))["usage"]["input_tokens"]
    assert counted == len(worker.submits[0].prompt_token_ids) > 0


async def test_a_count_is_charged_as_one_request() -> None:
    tenants = Tenants(otherwise=Tenant(quotas=Quotas(requests_per_minute=2)))
    async with client(FakeWorker("w"), tenants=tenants) as messages:
        await messages.count()
        await messages.message()
        response = await messages.http.post("/v1/messages/count_tokens", json={"messages": [HI]})
        assert (response.status_code, error_of(response)["type"]) == (429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
