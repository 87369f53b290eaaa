"""An API key counts while its record says so, and a refusal tells strangers nothing."""

import ast
import hashlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.identity.key_rig import NOW_UNIX_S, answer, content, put, record, write
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import Lane
from trunkline_router.access.identity import api_keys
from trunkline_router.access.identity.api_keys import ApiKey, read_record
from trunkline_router.access.identity.authenticator import Authenticator, KeyFileSource
from trunkline_router.access.identity.identity import Identity, Role
from trunkline_router.access.identity.terms import TERMS, FieldError
from trunkline_router.access.keys.new_key import ALPHABET, new_key, new_record
from trunkline_router.quotas.quota import Quotas

WRONG = "the API key is not valid"
SCANNED = re.compile(r"\btl-[0-9A-Za-z]{12}-[0-9A-Za-z]{43}\b")


class Clock:
    now_unix_s = NOW_UNIX_S

    def __call__(self) -> float:
        return self.now_unix_s


async def authenticator_with(path: Path, *records: dict[str, Any], clock: Clock | None = None) -> Authenticator:
    write(path, *records)
    made = Authenticator([KeyFileSource(str(path))], now_unix_s=clock or Clock())
    await made.start()
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def test_a_key_is_its_tenant_with_the_terms_of_its_record(path: Path) -> None:
    plain, full = new_key(), new_key()
    terms: dict[str, Any] = {
        "tenant": "b", "roles": ["operator"], "acts_for": ["c"], "lane": "batch", "models": ["m"],
        "quotas": {"tokens_per_minute": 9}, "may_salt": True, "sees_cache": False, "note": "n",
    }  # fmt: skip
    found = await authenticator_with(path, record(plain), record(full, expires_unix_s=NOW_UNIX_S + 1, **terms))
    assert found.identify(plain.credential) == Identity(f"key:{plain.key_id}", "acme", frozenset({Role.USER}))
    assert found.identify(full.credential) == Identity(
        f"key:{full.key_id}", "b", frozenset({Role.OPERATOR}), frozenset({"c"}), Lane.LANE_BATCH, frozenset({"m"}),
        Quotas(None, 9, None), may_salt=True, sees_cache=False, expires_unix_s=NOW_UNIX_S + 1,
    )  # fmt: skip


def test_an_identity_acts_for_its_own_tenant_and_those_that_it_names() -> None:
    own = Identity("key:x", "acme", frozenset(), frozenset({"b"}))
    assert [own.may_act_for(tenant) for tenant in ("acme", "b", "c", "")] == [True, True, False, False]
    assert Identity("key:x", "acme", frozenset(), frozenset({"*"})).may_act_for("c")


async def test_a_refusal_does_not_tell_whether_an_id_exists(path: Path) -> None:
    known, revoked, expired, unknown = (new_key() for _ in range(4))
    found = await authenticator_with(
        path, record(known), record(revoked) | {"revoked": "2026-01-01T00:00:00Z"},
        record(expired, expires_unix_s=NOW_UNIX_S - 1),
    )  # fmt: skip
    wrong = new_key().secret
    answers = {answer(found, f"tl-{key.key_id}-{wrong}") for key in (known, revoked, expired, unknown)}
    assert answers == {WRONG}
    assert answer(found, revoked.credential) == "the API key has been revoked"
    assert answer(found, expired.credential) == "the API key has expired"


async def test_a_key_expires_at_its_time(path: Path) -> None:
    clock, key = Clock(), new_key()
    found = await authenticator_with(path, record(key, expires_unix_s=NOW_UNIX_S), clock=clock)
    clock.now_unix_s = NOW_UNIX_S - 0.001
    assert answer(found, key.credential) == "acme"
    clock.now_unix_s = NOW_UNIX_S
    assert answer(found, key.credential) == "the API key has expired"


@given(st.integers(0, 58), st.sampled_from([*ALPHABET, "", " ", "-", "é", "\n"]))
def test_a_key_with_one_changed_character_is_refused(at: int, character: str) -> None:
    key = ApiKey("a" * 12, "b" * 43)
    made = key.credential[:at] + character + key.credential[at + 1 :]
    source = KeyFileSource("unused")
    source.take(content(record(key)))
    assert answer(Authenticator([source]), key.credential) == "acme"
    if made != key.credential:
        assert answer(Authenticator([source]), made) in (WRONG, "the credential is not valid")


@given(st.text())
def test_garbage_is_refused(credential: str) -> None:
    assert answer(Authenticator([KeyFileSource("unused")]), credential) == "the credential is not valid"


def test_without_sources_every_credential_is_refused() -> None:
    found = Authenticator()
    assert not found.is_configured
    assert answer(found, new_key().credential) == "the credential is not valid"
    assert answer(found, "a.b.c") == "the credential is not valid"


def test_keys_are_random_and_have_the_form_that_scanners_look_for() -> None:
    keys = [new_key() for _ in range(2000)]
    assert all(SCANNED.fullmatch(key.credential) and ApiKey.parse(key.credential) == key for key in keys)
    assert len({key.secret for key in keys} | {key.key_id for key in keys}) == 4000
    assert set("".join(key.secret for key in keys)) == set(ALPHABET)
    assert 62**43 >= 2**256
    assert f"`{SCANNED.pattern}`" in (api_keys.__doc__ or "")


def test_a_record_has_the_hash_of_the_secret_alone() -> None:
    key = new_key()
    made = record(key)
    assert made["hash"] == f"sha256:{hashlib.sha256(key.secret.encode()).hexdigest()}"
    assert key.secret not in str(made) + repr(key) + repr(read_record(made))


def test_hashes_are_compared_in_constant_time() -> None:
    """`digest` is compared by hmac.compare_digest alone; a dataclass compares itself by ==, so records are not."""
    tree = ast.parse(inspect.getsource(api_keys))
    compared = [
        node for node in ast.walk(tree) if isinstance(node, ast.Compare) and "digest" in ast.unparse(node)
    ]  # fmt: skip
    assert compared == []
    assert "hmac.compare_digest(self.digest, key.digest)" in inspect.getsource(api_keys.KeyRecord.is_of)
    authenticator = inspect.getsource(Authenticator)
    assert ".is_of(key)" in authenticator
    assert "digest ==" not in authenticator


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": "short"}, "id"), ({"id": 5}, "id"), ({"hash": None}, "hash"), ({"hash": "sha256:00"}, "hash"),
        ({"hash": "md5:" + "0" * 64}, "hash"), ({"tenant": None}, "tenant"), ({"tenant": "*"}, "tenant"),
        ({"roles": "user"}, "roles"), ({"roles": ["root"]}, "roles"), ({"acts_for": "*"}, "acts_for"),
        ({"lane": "express"}, "lane"), ({"models": [""]}, "models"), ({"quotas": []}, "quotas"),
        ({"may_salt": 1}, "may_salt"), ({"created": None}, "created"), ({"created": 5}, "created"),
        ({"expires": "2026-01-31T12:00:00"}, "expires"), ({"expires": "soon"}, "expires"),
        ({"revoked": True}, "revoked"),
        ({"note": "two\nlines"}, "note"), ({"note": "x" * 201}, "note"), ({"expire": "never"}, "the record"),
    ],
)  # fmt: skip
def test_an_invalid_record_is_refused_by_the_name_of_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        read_record(record(new_key()) | change)
    assert caught.value.field == field


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.datetimes().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*TERMS, "id", "hash", "created", "expires", "revoked", "note"]), json_values))
def test_whatever_a_record_contains_it_is_read_or_refused(change: dict[str, Any]) -> None:
    fields = record(ApiKey("a" * 12, "b" * 43)) | change
    try:
        found = read_record(fields)
    except FieldError:
        return
    assert found.identity.tenant == fields["tenant"]


def test_a_record_that_would_be_too_large_is_not_made() -> None:
    with pytest.raises(FieldError, match="more than"):
        new_record(new_key(), {"tenant": "t", "acts_for": [f"{number:0128}" for number in range(200)]}, 0.0, None)


async def test_no_log_line_and_no_refusal_has_a_secret(path: Path) -> None:
    key, other = new_key(), new_key()
    said = []
    with capture_logs() as logs:
        found = await authenticator_with(path, record(key))
        source = found._key_sources[0]
        assert isinstance(source, KeyFileSource)
        for broken in (
            f'{{"keys": {{"{key.credential}": {{}}}}}}', f'{{"keys": {{"{key.key_id}": {{"{key.secret}": 1}}}}}}',
            f'{{"keys": {{"{key.key_id}": {{"hash": "{key.secret}"}}}}}}', key.credential,
            f'{{"keys": {{}}, "{key.secret}": 1}}', f'{{"keys": {{"{key.secret}": 1, "{key.secret}": 1}}}}',
        ):  # fmt: skip
            put(path, broken)
            await source.poll()
        for credential in (f"tl-{key.key_id}-{other.secret}", other.credential, key.credential + "x", key.secret):
            with pytest.raises(RequestRefused) as caught:
                found.identify(credential)
            said.append(caught.value.message)
    assert len([entry for entry in logs if entry["log_level"] == "error"]) == 6
    assert not [secret for secret in (key.secret, other.secret) if secret in str(logs) + str(said)]
    assert found.identify(key.credential).tenant == "acme"
