"""A grant is valid only as signed by the router, for this epoch of the worker, and for a limited time."""

import hmac
from typing import Any

import pytest

from trunkline.grant import LEAST_KEY_BYTES, GrantKeys, grant_key_problem, key_id, open_grant, sign_grant
from trunkline.status import FORBIDDEN, INVALID_REQUEST, RequestRefused
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.worker_pb2 import Grant, Resume, Submit

KEY = bytes(range(32))
EPOCH, EXPIRES_MS = 0x0123456789ABCDEF, 1_700_000_030_000


def submit() -> Submit:
    return Submit(
        request_id="r-1",
        choice=1,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=7, seed=42),
        resume=Resume(output_token_ids=[4, 5], text_bytes_sent=6),
        cache_salt=b"salt",
        lane=Lane.LANE_BATCH,
        tenant="acme",
        tenant_weight=2.0,
    )


def granted() -> Grant:
    return sign_grant(KEY, submit(), epoch=EPOCH, expires_unix_ms=EXPIRES_MS)


def opened(grant: Grant, **given: Any) -> Submit:
    options: dict[str, Any] = {"key": KEY, "epoch": EPOCH, "now_unix_ms": EXPIRES_MS - 1, **given}
    return open_grant(GrantKeys(options.pop("key")), grant, **options)


def refused(grant: Grant, **given: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        opened(grant, **given)
    return caught.value


def test_a_grant_says_what_was_signed() -> None:
    assert opened(granted()) == submit()


def test_signatures_are_those_of_other_implementations() -> None:
    """Routers and workers of different versions work together, so the signed bytes are part of the contract."""
    grant = Grant(submit=b"\x12\x03abc", epoch=EPOCH, expires_unix_ms=EXPIRES_MS)
    parts = [b"trunkline.v1.Grant", grant.submit, bytes.fromhex("efcdab8967452301"), bytes.fromhex("30dde5cf8b010000")]
    signed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    grant.signature = hmac.digest(KEY, signed, "sha256")
    assert opened(grant).request_id == "abc"
    assert grant.signature.hex() == "092d59c14e2c231a47975ec85b8471f79117a05eac19412c3e661ba6928bc271"
    assert key_id(KEY).hex() == "44779a31570581ce"
    assert key_id(b"") == b""


@pytest.mark.parametrize("field", ["request_id", "choice", "prompt_token_ids", "sampling", "resume", "cache_salt",
                                   "lane", "tenant", "tenant_weight"])  # fmt: skip
def test_nothing_of_a_submit_can_be_changed_or_left_out(field: str) -> None:
    grant = granted()
    changed = submit()
    changed.ClearField(field)  # type: ignore[arg-type]
    grant.submit = changed.SerializeToString()
    assert refused(grant).reason == FORBIDDEN


@pytest.mark.parametrize(
    "change",
    [{"epoch": EPOCH + 1}, {"expires_unix_ms": EXPIRES_MS + 1}, {"signature": b""}, {"signature": b"\0" * 32},
     {"submit": b""}],
    ids=str,
)  # fmt: skip
def test_nothing_beside_it_can_be_changed_either(change: dict[str, Any]) -> None:
    grant = granted()
    for name, value in change.items():
        setattr(grant, name, value)
    assert "not signed" in refused(grant, epoch=grant.epoch).message


def test_every_bit_of_a_signature_counts() -> None:
    for bit in range(256):
        grant = granted()
        grant.signature = (int.from_bytes(grant.signature, "big") ^ 1 << bit).to_bytes(32, "big")
        assert refused(grant).reason == FORBIDDEN


def test_a_grant_is_for_one_life_of_one_worker_under_one_key_and_for_a_while() -> None:
    assert "earlier epoch" in refused(granted(), epoch=EPOCH + 1).message
    assert "expired" in refused(granted(), now_unix_ms=EXPIRES_MS).message
    assert "not signed" in refused(granted(), key=KEY[::-1]).message


def test_what_is_signed_and_no_submit_is_the_routers_mistake() -> None:
    grant = Grant(submit=b"\xff", epoch=EPOCH, expires_unix_ms=EXPIRES_MS)
    parts = (b"trunkline.v1.Grant", b"\xff", EPOCH.to_bytes(8, "little"), EXPIRES_MS.to_bytes(8, "little"))
    grant.signature = hmac.digest(KEY, b"".join(len(p).to_bytes(8, "little") + p for p in parts), "sha256")
    assert refused(grant).reason == INVALID_REQUEST


def test_a_key_that_can_be_guessed_is_refused_without_telling_it() -> None:
    assert grant_key_problem("") is None
    assert grant_key_problem("k" * LEAST_KEY_BYTES) is None
    problem = grant_key_problem("hunter2")
    assert problem is not None
    assert "hunter2" not in problem
    assert "32" in problem


def test_a_previous_key_is_accepted_and_a_grant_names_its_key_without_disclosing_it() -> None:
    new = KEY[::-1]
    assert granted().key_id == key_id(KEY)
    for keys in (GrantKeys(KEY), GrantKeys(new, KEY), GrantKeys(KEY, new)):
        assert open_grant(keys, granted(), epoch=EPOCH, now_unix_ms=0)
        unnamed = granted()
        unnamed.ClearField("key_id")  # of a router that knows one key only
        assert open_grant(keys, unnamed, epoch=EPOCH, now_unix_ms=0)
    with pytest.raises(RequestRefused, match="not signed"):
        open_grant(GrantKeys(new), granted(), epoch=EPOCH, now_unix_ms=0)
    misnamed = granted()
    misnamed.key_id = key_id(new)
    with pytest.raises(RequestRefused, match="not signed"):
        open_grant(GrantKeys(new, KEY), misnamed, epoch=EPOCH, now_unix_ms=0)


def test_a_previous_key_that_cannot_be_used_is_told_by_its_name() -> None:
    good = "k" * LEAST_KEY_BYTES
    assert grant_key_problem(good, good) is None
    assert str(grant_key_problem(good, "short")).startswith("--grant-key-previous has 5 bytes")
    assert grant_key_problem("", good) == "--grant-key-previous needs --grant-key"
