"""A proof is valid for one method, one worker, one epoch of it, one key, and a short time."""

import hmac

import pytest

from trunkline.grant import GrantKeys, key_id
from trunkline.names import PROOF_KEY, PROOF_KEY_ID_KEY
from trunkline.proof import WINDOW_S, check_proof, proof_metadata
from trunkline.status import UNAUTHENTICATED, RequestRefused

KEY = bytes(range(32))
EPOCH, NOW_MS = 0x0123456789ABCDEF, 1_700_000_000_000
WINDOW_MS = int(WINDOW_S * 1e3)

Given = tuple[tuple[str, str | bytes], ...]


def made(
    key: bytes = KEY, method: str = "Drain", worker_id: str = "w0", epoch: int = EPOCH, now_unix_ms: int = NOW_MS
) -> Given:
    return proof_metadata(key, method, worker_id=worker_id, epoch=epoch, now_unix_ms=now_unix_ms)


def check(key: bytes, metadata: Given | None) -> None:
    check_proof(GrantKeys(key), "Drain", metadata, worker_id="w0", epoch=EPOCH, now_unix_ms=NOW_MS)


def refused(metadata: Given | None, *, key: bytes = KEY) -> str:
    with pytest.raises(RequestRefused) as caught:
        check(key, metadata)
    assert caught.value.reason == UNAUTHENTICATED
    assert "\n" not in caught.value.message
    return caught.value.message


def test_who_has_the_key_is_let_in_within_the_window() -> None:
    for off_ms in (0, -WINDOW_MS, WINDOW_MS):
        check(KEY, (("other", "x"), *made(now_unix_ms=NOW_MS + off_ms)))


def test_without_a_key_nothing_is_made_and_nothing_is_asked_for() -> None:
    assert made(key=b"") == ()
    check(b"", None)


def test_a_proof_for_anything_else_is_none() -> None:
    for other in (made(key=KEY[::-1]), made(method="Session"), made(worker_id="w1"), made(epoch=EPOCH + 1)):
        assert "--grant-key" in refused(other)
    assert "too long ago" in refused(made(now_unix_ms=NOW_MS - WINDOW_MS - 1))
    assert "in the future" in refused(made(now_unix_ms=NOW_MS + WINDOW_MS + 1))


def test_what_is_no_proof_is_refused() -> None:
    (_, good), _ = made()
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
    """Routers and workers of different versions work together, so the proven bytes are part of the contract."""
    parts = [
        b"trunkline.v1.WorkerService proof",
        b"Drain",
        b"w0",
        bytes.fromhex("efcdab8967452301"),
        bytes.fromhex("0068e5cf8b010000"),
    ]
    signed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    proof = "00d9f6e1c7b74e5d74570d4de663761644c17790bcc2147f2df1eec9caa9e8dd"
    assert hmac.digest(KEY, signed, "sha256").hex() == proof
    assert made() == ((PROOF_KEY, f"1700000000000.{proof}"), (PROOF_KEY_ID_KEY, key_id(KEY).hex()))
