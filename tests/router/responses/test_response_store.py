"""The store of responses: what it keeps, for how long and for which tenant."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.router.responses.responses_client import Clock, new_store
from trunkline.v1.inference_pb2 import ChatMessage, ChatPart
from trunkline_router.edge.responses.response_store import ENTRY_BYTES, MESSAGE_BYTES, TENANT_PART, StoredResponse

TENANTS = ("acme", "globex", "")
MAX_RESPONSES, TTL_S = 3, 10.0
MAX_BYTES = 5 * ENTRY_BYTES * TENANT_PART  # of small responses, a tenant may have four: the number binds
EMPTY = StoredResponse(b"", ())


@dataclass(frozen=True)
class Kept:
    tenant: str
    name: str
    response: StoredResponse
    put_s: float


class StoreAgainstModel(RuleBasedStateMachine):
    """The model is a list, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = new_store(self.clock, max_responses=MAX_RESPONSES, max_bytes=MAX_BYTES, ttl_s=TTL_S)
        self.kept: list[Kept] = []
        self.names: list[str] = []

    def found(self, tenant: str, name: str) -> StoredResponse | None:
        now_s = self.clock.now_s
        return next(
            (
                kept.response
                for kept in self.kept
                if (kept.tenant, kept.name) == (tenant, name) and now_s < kept.put_s + TTL_S
            ),
            None,
        )

    def size(self, tenant: str | None = None) -> int:
        return sum(kept.response.size_bytes for kept in self.kept if tenant in (None, kept.tenant))

    def size_in_memory(self) -> int:
        """As each of the store's tables has it."""
        sizes = {(tenant, name): size for tenant, held in self.store._sizes.items() for name, size in held.items()}
        assert sizes == {key: entry.response.size_bytes for key, entry in self.store._entries.items()}
        assert all(self.store._sizes.values()), "nothing is left of a tenant without responses"
        return sum(sizes.values())

    @rule(tenant=st.sampled_from(TENANTS), size=st.integers(0, 6 * ENTRY_BYTES))
    def put(self, tenant: str, size: int) -> None:
        name = f"resp_{len(self.names)}"
        self.names.append(name)
        response = StoredResponse(b"x" * size, ())
        fits = response.size_bytes <= MAX_BYTES // TENANT_PART
        assert self.store.put(tenant, name, response) == fits
        self.kept = [kept for kept in self.kept if self.clock.now_s < kept.put_s + TTL_S]
        if not fits:
            return
        self.kept.append(Kept(tenant, name, response, self.clock.now_s))
        while (
            sum(kept.tenant == tenant for kept in self.kept) > MAX_RESPONSES
            or self.size(tenant) > MAX_BYTES // TENANT_PART
        ):
            self.kept.remove(next(kept for kept in self.kept if kept.tenant == tenant))
        while self.size() > MAX_BYTES:
            self.kept.pop(0)

    @rule(tenant=st.sampled_from(TENANTS), number=st.integers(0, 40))
    def delete(self, tenant: str, number: int) -> None:
        name = f"resp_{number}"
        was_there = self.found(tenant, name) is not None
        assert self.store.delete(tenant, name) == was_there
        self.kept = [kept for kept in self.kept if (kept.tenant, kept.name) != (tenant, name)]

    @rule(seconds=st.sampled_from((0.5, 3.0, TTL_S)))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def expire(self) -> None:
        self.store.expire()
        assert len(self.store._entries) == sum(self.clock.now_s < kept.put_s + TTL_S for kept in self.kept)

    @invariant()
    def agrees(self) -> None:
        assert self.store.num_bytes == self.size_in_memory() <= MAX_BYTES
        for tenant in TENANTS:
            for name in self.names:
                assert self.store.get(tenant, name) is self.found(tenant, name)


def test_the_store_keeps_what_a_simple_model_keeps() -> None:
    run_state_machine_as_test(StoreAgainstModel)


@given(texts=st.lists(st.text(max_size=40), max_size=4), body=st.binary(max_size=100))
def test_a_response_counts_with_all_texts_of_its_conversation(texts: list[str], body: bytes) -> None:
    response = StoredResponse(body, tuple(ChatMessage(role="user", content=text) for text in texts))
    assert response.size_bytes >= len(body) + sum(len(text.encode()) for text in texts) + ENTRY_BYTES


def test_a_message_of_parts_counts_with_each_of_them() -> None:
    message = ChatMessage(role="user", parts=[ChatPart(text="x")] * 100)
    assert StoredResponse(b"", (message,)).size_bytes > 100 * MESSAGE_BYTES


def test_the_memory_of_all_tenants_together_is_bounded_and_the_oldest_goes_first() -> None:
    store = new_store(max_bytes=MAX_BYTES)
    size = StoredResponse(b"x" * (MAX_BYTES // TENANT_PART - 2 * ENTRY_BYTES), ())
    for number in range(TENANT_PART + 2):
        assert store.put(f"tenant-{number}", "resp", size)
    kept = [number for number in range(TENANT_PART + 2) if store.get(f"tenant-{number}", "resp") is size]
    assert kept == list(range(TENANT_PART + 2 - len(kept), TENANT_PART + 2))
    assert MAX_BYTES - size.size_bytes < store.num_bytes <= MAX_BYTES


def test_one_tenant_cannot_push_out_the_others_responses() -> None:
    store = new_store(max_bytes=MAX_BYTES)
    assert store.put("acme", "resp", EMPTY)
    for number in range(1000):
        assert store.put("globex", f"resp_{number}", EMPTY)
    assert store.get("acme", "resp") is EMPTY
    assert store.num_bytes <= MAX_BYTES // TENANT_PART + EMPTY.size_bytes


def test_an_expired_response_is_not_found_and_frees_its_memory() -> None:
    clock = Clock()
    store = new_store(clock, ttl_s=5.0)
    store.put("acme", "resp", EMPTY)
    clock.now_s += 4.9
    assert store.get("acme", "resp") is EMPTY
    clock.now_s += 0.1
    assert store.get("acme", "resp") is None
    assert not store.delete("acme", "resp"), "it is gone already"
    store.put("acme", "resp_2", EMPTY)
    clock.now_s += 5.0
    store.expire()
    assert (len(store._entries), store.num_bytes) == (0, 0)
