"""Tokens as attackers make them. Each is refused, although a valid one that differs in nothing else is accepted."""

import base64
import hmac
import json
import secrets
from typing import Any

import pytest

from tests.router.identity.issuer import AUDIENCE, ISSUER, NOW_UNIX_S, claims, jwk, jwks, private_key, token
from tests.router.identity.token_rig import TOKENS, part, refusal, tokens_of
from trunkline_router.access.identity.bearer_token import LONGEST_HEADER, LONGEST_TOKEN
from trunkline_router.identity_settings import IdentitySettings

SIGNATURE, UNKNOWN = "the token's signature is not valid", "the token was signed with a key that is not known"
NOT_ALLOWED = "the token's algorithm is not allowed"
HEADER = {"alg": "EdDSA", "kid": "ed25519"}


def signed(header: bytes, payload: bytes, kind: str = "ed25519") -> str:
    """A token of these parts, whatever they contain, with an Ed25519 key."""
    signing = f"{part(header)}.{part(payload)}"
    return f"{signing}.{part(private_key(kind).sign(signing.encode()))}"


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_the_helper_signs_as_the_issuer_does() -> None:
    assert TOKENS.identify(signed(encoded(HEADER), encoded(claims()))).tenant == "acme"


def test_a_symmetric_key_in_the_set_signs_nothing() -> None:
    """An issuer that publishes a key of this type by mistake, also under the id of another one."""
    secret = secrets.token_bytes(32)
    for kid in ("rsa", "oct"):
        member = {"kty": "oct", "k": part(secret), "kid": kid, "alg": "HS256"}
        tokens = tokens_of(encoded({"keys": [member, jwk("rsa")]}))
        assert tokens.identify(token(algorithm="RS256")).tenant == "acme"
        wanted = {"RS256": SIGNATURE if kid == "rsa" else UNKNOWN, "HS256": NOT_ALLOWED, "none": NOT_ALLOWED}
        for algorithm, said in wanted.items():
            signing = f"{part({'alg': algorithm, 'kid': kid})}.{part(claims())}"
            forged = f"{signing}.{part(hmac.digest(secret, signing.encode(), 'sha256'))}"
            assert refusal(forged, tokens).startswith(said)


def test_a_public_key_as_it_is_published_is_no_secret_of_a_symmetric_signature() -> None:
    """Beside PEM and DER: the JWK itself, and the modulus alone."""
    public = jwk("rsa")
    modulus = base64.urlsafe_b64decode(public["n"] + "==")
    for secret in (encoded(public), encoded({"keys": [public]}), jwks("rsa"), modulus, public["n"].encode()):
        signing = f"{part({'alg': 'HS256', 'kid': 'rsa'})}.{part(claims())}"
        forged = f"{signing}.{part(hmac.digest(secret, signing.encode(), 'sha256'))}"
        assert refusal(forged, tokens_of(jwks("rsa"))).startswith(NOT_ALLOWED)


def test_the_key_id_of_one_issuer_does_not_lend_its_trust_to_another_one() -> None:
    """Two issuers that both call their key ed25519, and a token of each at the other's router."""
    ours = TOKENS
    theirs = tokens_of(
        encoded({"keys": [jwk("ed25519-theirs", kid="ed25519")]}),
        IdentitySettings(jwt_issuer="theirs", jwt_audience=("x",)),
    )
    of_theirs = claims(iss="theirs", aud="x")
    good = token(of_theirs, kind="ed25519-theirs", kid="ed25519")
    assert theirs.identify(good).tenant == "acme"
    assert refusal(good, ours) == SIGNATURE
    assert refusal(token(claims(), kind="ed25519-theirs", kid="ed25519"), ours) == SIGNATURE
    assert refusal(token(), theirs) == SIGNATURE
    # One set of keys for several issuers, as some providers have: the claim decides.
    assert refusal(token(claims(iss="theirs"))).startswith("the token's claim iss is not the issuer")
    assert refusal(token(claims(iss=f"{ISSUER}/"))).startswith("the token's claim iss is not the issuer")


@pytest.mark.parametrize(
    "signature",
    [b"", b"\0" * 64, b"\0" * 63, b"\xff" * 64, b"0\x06\x02\x01\0\x02\x01\0", b"\0" * 31 + b"\x01" + b"\0" * 32],
    ids=["none", "zeros", "short", "large", "zeros in DER", "s is zero"],
)
def test_signatures_that_some_verifiers_take_for_any_message_are_refused(signature: bytes) -> None:
    for algorithm, kid in (("ES256", "p256"), ("EdDSA", "ed25519"), ("RS256", "rsa")):
        assert refusal(f"{part({'alg': algorithm, 'kid': kid})}.{part(claims())}.{part(signature)}") == SIGNATURE


DOUBLED = {
    "header": (b'{"alg": "none", "alg": "EdDSA", "kid": "ed25519"}', encoded(claims())),
    "kid": (b'{"alg": "EdDSA", "kid": "x", "kid": "ed25519"}', encoded(claims())),
    "tenant": (encoded(HEADER), encoded(claims())[:-1] + b', "tenant": "other"}'),
    "tenant, escaped": (encoded(HEADER), encoded(claims())[:-1] + b', "\\u0074enant": "other"}'),
    "within a claim": (encoded(HEADER), encoded(claims())[:-1] + b', "realm": {"roles": [], "roles": ["operator"]}}'),
}


@pytest.mark.parametrize("doubled", DOUBLED)
def test_a_name_that_two_parsers_read_differently_is_refused(doubled: str) -> None:
    """The issuer's library may keep the first one, and this one the last."""
    assert refusal(signed(*DOUBLED[doubled])) in ("the token is not valid", "the token's claims are not JSON")


def test_parts_that_are_no_token_of_three_are_refused() -> None:
    good = token()
    head, payload, signature = good.split(".")
    for forged in (
        f"{head}.{payload}", f"{good}.", f"{good}.{signature}", f"{head}.{payload}.{signature}.{payload}.{signature}",
        f"{head}..{signature}", f".{payload}.{signature}", f"{good} ", f"{good}\n", f"{head}=.{payload}.{signature}",
        f"{head}.{payload}.{signature}=", f"{head}.{payload}\u200b.{signature}",
    ):  # fmt: skip
        refusal(forged)
    inner = f"{part({**HEADER, 'cty': 'JWT'})}.{part(good.encode())}"
    assert refusal(f"{inner}.{part(private_key('ed25519').sign(inner.encode()))}") == "the token's claims are not JSON"


def test_sizes_are_refused_one_byte_over_the_limit_and_before_anything_is_decoded() -> None:
    def of_length(length: int) -> str:
        start = token(claims(more=""))
        for more in range(length):
            made = token(claims(more="x" * (length - len(start) + 40 - more)))
            if len(made) <= length:
                return made
        raise AssertionError(length)

    longest = of_length(LONGEST_TOKEN)
    assert LONGEST_TOKEN - 4 <= len(longest) <= LONGEST_TOKEN
    found = tokens_of(jwks("ed25519"))
    assert found.identify(longest).tenant == "acme"
    assert refusal(longest + "A" * (LONGEST_TOKEN + 1 - len(longest)), found) == "the token is not valid"
    wide = token(more="x" * LONGEST_HEADER)
    assert len(wide) < LONGEST_TOKEN
    assert refusal(wide, found) == "the token is not valid"
    assert refusal("A" * 1_000_000 + ".a.a", found) == "the token is not valid"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exp": NOW_UNIX_S - 59}, ""),
        ({"exp": NOW_UNIX_S - 60}, "the token has expired"),
        ({"exp": NOW_UNIX_S - 59.5}, ""),
        ({"nbf": NOW_UNIX_S + 60}, ""),
        ({"nbf": NOW_UNIX_S + 60.5}, "the token is not valid yet: its claim nbf"),
        ({"iat": NOW_UNIX_S + 61}, "the token is not valid yet: its claim iat"),
        ({"exp": str(int(NOW_UNIX_S + 600))}, "the token's claim exp must be a number"),
        ({"exp": [NOW_UNIX_S + 600]}, "the token's claim exp must be a number"),
        ({"exp": 10**400}, "the token's claim exp must be a number"),
        ({"nbf": None, "iat": None}, ""),
        ({"aud": ["a", "b", AUDIENCE]}, ""),
        ({"aud": ["a", "b"]}, "the token's claim aud does not name this server"),
        ({"aud": [[AUDIENCE]]}, "the token's claim aud must be"),
        ({"aud": {AUDIENCE: True}}, "the token's claim aud must be"),
        ({"aud": f"{AUDIENCE},other"}, "the token's claim aud does not name this server"),
        ({"aud": AUDIENCE.upper()}, "the token's claim aud does not name this server"),
    ],
)
def test_times_and_audiences_count_to_the_letter(changes: dict[str, Any], said: str) -> None:
    made = signed(encoded(HEADER), encoded(claims(**changes)))
    found = tokens_of(jwks("ed25519"))
    if said:
        assert refusal(made, found).startswith(said)
    else:
        assert found.identify(made).tenant == "acme"
