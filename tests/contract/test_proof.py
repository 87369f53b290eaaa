"""A proof is for one method, one life of one worker, its key, and a short time."""

import hmac

import pytest

from trunkline.proof import PROOF_KEY, WINDOW_S, check_proof, proof_metadata
from trunkline.status import UNAUTHENTICATED, RequestRefused

KEY = bytes(range(32))
EPOCH, NOW_MS = 0x0123456789ABCDEF, 1_700_000_000_000
WINDOW_MS = int(WINDOW_S * 1e3)

Given = tuple[tuple[str, str | bytes], ...]


def made(key: bytes = KEY, method: str = "Drain", epoch: int = EPOCH, now_unix_ms: int = NOW_MS) -> Given:
    return proof_metadata(key, method, epoch=epoch, now_unix_ms=now_unix_ms)


def refused(metadata: Given | None, *, key: bytes = KEY) -> str:
    with pytest.raises(RequestRefused) as caught:
        check_proof(key, "Drain", metadata, epoch=EPOCH, now_unix_ms=NOW_MS)
    assert caught.value.reason == UNAUTHENTICATED
    assert "\n" not in caught.value.message
    return caught.value.message


def test_who_has_the_key_is_let_in_within_the_window() -> None:
    for off_ms in (0, -WINDOW_MS, WINDOW_MS):
        check_proof(KEY, "Drain", (("other", "x"), *made(now_unix_ms=NOW_MS + off_ms)), epoch=EPOCH, now_unix_ms=NOW_MS)


def test_without_a_key_nothing_is_made_and_nothing_is_asked_for() -> None:
    assert made(key=b"") == ()
    check_proof(b"", "Drain", None, epoch=EPOCH, now_unix_ms=NOW_MS)


def test_a_proof_for_anything_else_is_none() -> None:
    for other in (made(key=KEY[::-1]), made(method="Session"), made(epoch=EPOCH + 1)):
        assert "--grant-key" in refused(other)
    assert "too long ago" in refused(made(now_unix_ms=NOW_MS - WINDOW_MS - 1))
    assert "in the future" in refused(made(now_unix_ms=NOW_MS + WINDOW_MS + 1))


def test_what_is_no_proof_is_refused() -> None:
    ((_, good),) = made()
    assert isinstance(good, str)
    later = f"{NOW_MS + 1}.{good.partition('.')[2]}"
    for value in (
        "",
        "x",
        good.partition(".")[0],
        f"{good}0",
        good[:-1],
        later,
        f"\u0661{good}",
        "9" * 30 + good,
        f"-{good}",
    ):
        refused(((PROOF_KEY, value),))
    assert "--grant-key" in refused(None)
    assert "--grant-key" in refused((*made(), *made()))


def test_proofs_are_those_of_other_implementations() -> None:
    """Routers and workers of different versions meet: what is proven is part of the contract."""
    parts = [
        b"trunkline.v1.WorkerService proof",
        b"Drain",
        bytes.fromhex("efcdab8967452301"),
        bytes.fromhex("0068e5cf8b010000"),
    ]
    signed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    proof = "469fe903d90577f1c00dee61bb677e30952f064fc0ecf8ef3dc5a13db6c57050"
    assert hmac.digest(KEY, signed, "sha256").hex() == proof
    assert made() == ((PROOF_KEY, f"1700000000000.{proof}"),)
