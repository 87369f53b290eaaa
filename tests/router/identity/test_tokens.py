"""A token counts if a known key signed it and its claims fit; any other is refused, and cheaply."""

import hmac
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import example, given
from hypothesis import strategies as st
from jwt.api_jws import PyJWS
from structlog.testing import capture_logs

from tests.router.identity.issuer import KINDS, NOW_UNIX_S, RULES, claims, jwk, jwks, private_key, token
from tests.router.identity.token_rig import TOKENS, Clock, part, refusal, tokens_of
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import Lane
from trunkline_router.access.identity import bearer_token
from trunkline_router.access.identity.bearer_token import LONGEST_TOKEN, BearerTokens, identity_of
from trunkline_router.access.identity.identity import Identity, IdentityError, Role
from trunkline_router.access.identity.jwks import MOST_KEYS, JwksFile, read_jwks
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.quotas.quota import Quotas


def identity(content: dict[str, Any], rules: IdentitySettings = RULES) -> Identity:
    return tokens_of(jwks("ed25519"), rules).identify(token(content))


@pytest.mark.parametrize("algorithm", KINDS)
def test_a_token_signed_with_a_known_key_is_its_subject(algorithm: str) -> None:
    found = TOKENS.identify(token(algorithm=algorithm))
    assert found == Identity("jwt:ada", "acme", frozenset({Role.USER}), expires_unix_s=NOW_UNIX_S + 660)


def test_claims_say_what_the_bearer_may_do() -> None:
    terms: dict[str, Any] = {
        "roles": ["operator", "scraper", "someone-else's"], "acts_for": ["b", "*"], "lane": "interactive",
        "models": ["m"], "quotas": {"requests_per_minute": 5, "tokens_in_flight": 7}, "may_salt": True,
        "sees_cache": False,
    }  # fmt: skip
    assert identity(claims(**terms)) == Identity(
        "jwt:ada", "acme", frozenset({Role.OPERATOR, Role.SCRAPER}), frozenset({"b", "*"}), Lane.LANE_INTERACTIVE,
        frozenset({"m"}), Quotas(5, None, 7), may_salt=True, sees_cache=False, expires_unix_s=NOW_UNIX_S + 660,
    )  # fmt: skip


def test_claims_may_have_other_names_and_places() -> None:
    rules = replace(
        RULES, jwt_tenant_claim="https://x.example/org", jwt_roles_claim="realm.roles",
        jwt_claim_prefix="https://x.example/",
    )  # fmt: skip
    content = claims(tenant=None) | {
        "https://x.example/org": "acme", "realm": {"roles": "offline operator"}, "https://x.example/lane": "batch",
        "lane": "interactive",
    }  # fmt: skip
    found = identity(content, rules)
    assert (found.tenant, found.roles, found.lane) == ("acme", frozenset({Role.OPERATOR}), Lane.LANE_BATCH)


def test_a_token_whose_roles_are_all_unknown_has_none() -> None:
    assert identity(claims(roles=["admin"])).roles == frozenset()


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("exp", None), ("exp", "soon"), ("exp", True), ("exp", -1), ("exp", 1e300), ("exp", NOW_UNIX_S * 1000),
        ("nbf", "x"), ("nbf", []), ("iat", {}), ("iss", None), ("iss", "https://other.example"), ("iss", ["x"]),
        ("aud", None), ("aud", "other"), ("aud", []), ("aud", [5]), ("aud", {}), ("sub", None), ("sub", ""), ("sub", 7),
        ("sub", "a\nb"), ("sub", "x" * 257), ("tenant", None), ("tenant", ""), ("tenant", "*"), ("tenant", 5),
        ("tenant", "é"), ("tenant", "x" * 129), ("tenant", ["acme"]), ("roles", 5), ("roles", [5]), ("roles", {}),
        ("acts_for", "b"), ("acts_for", ["é"]), ("acts_for", [""]), ("lane", "express"), ("lane", 1), ("lane", []),
        ("models", "m"), ("models", [1]), ("quotas", 5), ("quotas", {}), ("quotas", {"requests": 5}),
        ("quotas", {"requests_per_minute": 0}), ("quotas", {"requests_per_minute": True}),
        ("quotas", {"requests_per_minute": 1.5}), ("may_salt", "true"), ("may_salt", 1), ("sees_cache", 0),
    ],
)  # fmt: skip
def test_a_claim_that_is_missing_or_has_a_wrong_type_is_named(claim: str, value: Any) -> None:
    # The library refuses to sign an iss that is not a text, so the parts are put together here.
    signing = f"{part({'alg': 'EdDSA', 'kid': 'ed25519'})}.{part(claims(**{claim: value}))}"
    signed = f"{signing}.{part(private_key('ed25519').sign(signing.encode()))}"
    assert refusal(signed).startswith(f"the token's claim {claim} ")


def test_an_audience_may_be_one_of_several() -> None:
    assert identity(claims(aud=["other", "trunkline"])).tenant == "acme"


def test_a_token_counts_from_its_start_to_its_end_with_the_clock_skew() -> None:
    clock = Clock()
    content = claims(nbf=NOW_UNIX_S, exp=NOW_UNIX_S + 100)
    for at_s, message in [(-61, "the token is not valid yet"), (-60, ""), (159, ""), (160, "the token has expired")]:
        tokens = tokens_of(jwks("ed25519"), clock=clock)
        clock.now_unix_s = NOW_UNIX_S + at_s
        if message:
            assert refusal(token(content), tokens).startswith(message)
        else:
            assert tokens.identify(token(content)).tenant == "acme"


def test_a_cached_token_ends_when_it_expires() -> None:
    clock = Clock()
    tokens = tokens_of(jwks("ed25519"), clock=clock)
    signed = token(claims(exp=NOW_UNIX_S + 10))
    assert tokens.identify(signed) is tokens.identify(signed)
    clock.now_unix_s = NOW_UNIX_S + 70
    assert refusal(signed, tokens) == "the token has expired"
    assert len(tokens._known) == 1


def test_a_token_that_was_too_early_counts_later() -> None:
    clock = Clock()
    tokens = tokens_of(jwks("ed25519"), clock=clock)
    signed = token(claims(nbf=NOW_UNIX_S + 65))
    assert refusal(signed, tokens) == refusal(signed, tokens)
    clock.now_unix_s += 11
    assert tokens.identify(signed).tenant == "acme"


def test_a_token_of_a_key_that_is_withdrawn_ends_at_once() -> None:
    tokens = tokens_of(jwks("ed25519", "p256"))
    signed = token()
    tokens.identify(signed)
    tokens.source.keys = read_jwks(jwks("p256"))
    assert refusal(signed, tokens) == "the token was signed with a key that is not known"
    tokens.source.keys = read_jwks(jwks("ed25519"))
    assert tokens.identify(signed).tenant == "acme"


@pytest.mark.parametrize("hash_name", ["sha256", "sha384", "sha512"])
@pytest.mark.parametrize("form", [serialization.Encoding.PEM, serialization.Encoding.DER])
def test_a_public_key_is_no_secret_of_a_symmetric_signature(hash_name: str, form: serialization.Encoding) -> None:
    public = private_key("rsa").public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo)
    signing = f"{part({'alg': 'HS' + hash_name[3:], 'kid': 'rsa'})}.{part(claims())}"
    forged = f"{signing}.{part(hmac.digest(public, signing.encode(), hash_name))}"
    assert refusal(forged).startswith("the token's algorithm is not allowed")


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "NONE", "nOnE", "", "HS256", "ES256K", "ES512", None, 5, ["EdDSA"]]
)
def test_other_algorithms_are_refused_before_anything_is_verified(algorithm: Any) -> None:
    for signature in ("", part(b"x" * 64)):
        forged = f"{part({'alg': algorithm, 'kid': 'ed25519'})}.{part(claims())}.{signature}"
        assert refusal(forged).startswith("the token's algorithm is not allowed")


@pytest.mark.parametrize(
    ("algorithm", "kid"), [("RS256", "p256"), ("ES256", "rsa"), ("ES256", "p384"), ("EdDSA", "p256")]
)
def test_an_algorithm_counts_only_with_a_key_of_its_type(algorithm: str, kid: str) -> None:
    assert refusal(token(algorithm=algorithm, kid=kid)) == "the token was signed with a key that is not known"


def test_a_key_that_names_its_algorithm_verifies_no_other() -> None:
    tokens = tokens_of(json.dumps({"keys": [jwk("rsa", alg="RS256")]}).encode())
    assert tokens.identify(token(algorithm="RS256")).tenant == "acme"
    assert refusal(token(algorithm="PS256"), tokens) == "the token was signed with a key that is not known"


def test_a_signature_by_another_key_is_refused() -> None:
    assert refusal(token(kind="ed25519-other", kid="ed25519")) == "the token's signature is not valid"


@pytest.mark.parametrize("header", [{"crit": ["exp"]}, {"crit": []}, {"b64": False, "crit": ["b64"]}, {"kid": 5}])
def test_headers_that_change_the_meaning_of_a_token_are_refused(header: dict[str, Any]) -> None:
    signing = f"{part({'alg': 'EdDSA', 'kid': 'ed25519', **header})}.{part(claims())}"
    assert refusal(f"{signing}.{part(private_key('ed25519').sign(signing.encode()))}") == "the token is not valid"


def test_a_key_in_the_token_itself_does_not_count() -> None:
    own = jwk("ed25519-other", kid="ed25519")
    forged = token(kind="ed25519-other", kid="ed25519", jwk=own, jku="http://127.0.0.1:1/", x5u="http://127.0.0.1:1/")
    assert refusal(forged) == "the token's signature is not valid"


def test_a_token_without_a_key_id_is_for_an_only_key() -> None:
    unnamed = token(kid=None)
    assert tokens_of(jwks("ed25519")).identify(unnamed).tenant == "acme"
    assert refusal(unnamed) == "the token was signed with a key that is not known"


@pytest.mark.parametrize(
    "payload", [b"[]", b"5", b"null", b"\xff", b"", b"{", b'{"exp":NaN}', b'{"exp":1,"exp":9e9}', b"[" * 4000]
)
def test_a_signed_token_whose_claims_are_no_object_is_refused(payload: bytes) -> None:
    signing = f"{part({'alg': 'EdDSA', 'kid': 'ed25519'})}.{part(payload)}"
    assert "the token's claims are not" in refusal(f"{signing}.{part(private_key('ed25519').sign(signing.encode()))}")


def test_a_token_that_is_too_long_is_refused_unread() -> None:
    signed = token(claims(more="x" * LONGEST_TOKEN))
    assert refusal(signed) == "the token is not valid"


HEADERS = st.dictionaries(st.sampled_from(["alg", "kid", "typ", "x"]), st.sampled_from(["EdDSA", "ed25519", 5, None]))
GOOD_HEADER = part({"alg": "EdDSA", "kid": "ed25519"})
PIECES = st.text(max_size=40) | st.sampled_from([GOOD_HEADER, part(claims()), "", "=", "A" * 2000]) | HEADERS.map(part)


@given(st.one_of(st.text(), st.lists(PIECES, min_size=1, max_size=4).map(".".join)))
@example("..")
@example("\ud800.a.b")
@example(part(b"[" * 700) + ".a.b")
def test_garbage_is_refused(credential: str) -> None:
    assert refusal(credential)


@given(st.integers(0, 400), st.sampled_from("AZaz09-_.=\n é"))
def test_a_token_with_one_changed_character_is_refused(at: int, character: str) -> None:
    signed = token(algorithm="ES256", kind="p256")
    at %= len(signed)
    if signed[at] != character:
        assert refusal(signed[:at] + character + signed[at + 1 :])


def test_what_is_remembered_is_bounded_and_holds_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bearer_token, "MOST_KNOWN", 12)
    tokens = tokens_of(jwks("ed25519"))
    first = token()
    kept = tokens.identify(first)
    for number in range(20):
        tokens.identify(token(claims(sub=f"s{number}")))
        tokens.identify(first)  # what is used stays
        refusal(token(claims(sub=f"s{number}", aud="other")), tokens)
        refusal(token(kid=f"unknown-{number}"), tokens)
    assert tokens.identify(first) is kept
    assert len(tokens._known) == 12
    assert all(len(digest) == 32 for digest in tokens._known)
    assert first not in repr(vars(tokens))


def test_random_tokens_cost_no_signature_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    monkeypatch.setattr(PyJWS, "decode", lambda *_, **__: verified.append(1))
    tokens = tokens_of(jwks("ed25519"))
    for number in range(100):
        refusal(f"{part({'alg': 'EdDSA', 'kid': str(number)})}.{part(claims())}.{'A' * 86}", tokens)
        refusal(f"{part({'alg': 'RS256', 'kid': 'ed25519'})}.{part(claims())}.{number}", tokens)
        refusal(f"{number}.{'A' * number}.{'A' * 86}", tokens)
    assert (verified, len(tokens._known)) == ([], 0)


def test_refusals_and_logs_repeat_nothing_of_a_token() -> None:
    secret = "canary-in-a-claim"
    with capture_logs() as logs:
        said = [
            refusal(token(claims(**{name: [{secret: 1}]})))
            for name in ("tenant", "roles", "lane", "models", "acts_for")
        ]
        said.append(refusal(token(claims(aud=secret))))
        said.append(refusal(token(kid=secret)))
    assert secret not in str(logs) + str(said)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (b"[]", "JSON Web Key Set"),
        (b'{"keys": {}}', "JSON Web Key Set"),
        (b'{"keys": []}', "no public key"),
        (b'{"keys": [5, null, {}, {"kty": 5}, {"kty": "RSA", "crv": []}, {"kty": "RSA"}, {"kty": "oct", "k": "AAAA"}]}',
         "no public key"),
        (json.dumps({"keys": [jwk("rsa-short")]}).encode(), "no public key"),
        (json.dumps({"keys": [jwk("rsa", use="enc")]}).encode(), "no public key"),
        (json.dumps({"keys": [jwk("rsa") | {"key_ops": ["sign"]}]}).encode(), "no public key"),
        (json.dumps({"keys": [jwk("rsa", alg="HS256")]}).encode(), "no public key"),
        (json.dumps({"keys": [jwk("p256", kid=5)]}).encode(), "no public key"),
        (json.dumps({"keys": [jwk("ed25519")] * (MOST_KEYS + 1)}).encode(), "more than"),
        (b"[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_a_key_set_without_a_usable_key_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(IdentityError, match=problem) as caught:
        read_jwks(content)
    assert "\n" not in str(caught.value)


def test_a_key_set_with_private_keys_is_read_as_public_ones() -> None:
    made = jwt.algorithms.RSAAlgorithm.to_jwk(private_key("rsa"), as_dict=True)
    tokens = tokens_of(json.dumps({"keys": [{**made, "kid": "rsa", "key_ops": ["sign", "verify"]}]}).encode())
    assert tokens.identify(token(algorithm="RS256")).tenant == "acme"
    found = tokens.source.keys.find("rsa", "RS256")
    assert found is not None
    assert not hasattr(found.key, "private_numbers")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(sorted([*claims(), "roles", "acts_for", "lane", "models", "quotas"])), json_values)
)
def test_whatever_claims_say_they_are_an_identity_or_refused(changes: dict[str, Any]) -> None:
    content: dict[str, Any] = {**claims(), **changes}
    try:
        found = identity_of(content, RULES, NOW_UNIX_S)
    except RequestRefused:
        return
    assert found.tenant == content["tenant"]
    assert found.expires_unix_s is not None
    assert math.isfinite(found.expires_unix_s)


async def test_a_key_set_in_a_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks("p256"))
    source = JwksFile(str(path))
    await source.start()
    tokens = BearerTokens(source, RULES, Clock())
    assert "not known" in refusal(token(), tokens)
    path.write_bytes(jwks("p256", "ed25519"))
    await source.poll()
    assert tokens.identify(token()).tenant == "acme"
    path.write_bytes(b"broken")
    with capture_logs() as logs:
        await source.poll()
    assert tokens.identify(token()).tenant == "acme"
    assert [entry["log_level"] for entry in logs] == ["error"]
