"""Tokens before the door: what tells their identities, how a token is refused, and the parts of one."""

import base64
import json
from typing import Any

import pytest

from tests.router.identity.issuer import NOW_UNIX_S, RULES, jwks
from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused
from trunkline_router.access.identity.authenticator import Authenticator
from trunkline_router.access.identity.bearer_token import BearerTokens
from trunkline_router.access.identity.jwks import JwksFile, read_jwks
from trunkline_router.identity_settings import IdentitySettings

ALL_KINDS = ("rsa", "p256", "p384", "ed25519")


class Clock:
    now_unix_s = NOW_UNIX_S

    def __call__(self) -> float:
        return self.now_unix_s


def tokens_of(content: bytes, rules: IdentitySettings = RULES, clock: Clock | None = None) -> BearerTokens:
    source = JwksFile("unused")
    source.keys = read_jwks(content)
    # Checks cost nothing here: a collection of what other tests left would use up a host's budget for refused tokens.
    return BearerTokens(source, rules, clock or Clock(), cpu_s=lambda: 0.0)


TOKENS = tokens_of(jwks(*ALL_KINDS))


def refusal(credential: str, tokens: BearerTokens = TOKENS) -> str:
    """The message with which the credential is refused."""
    with pytest.raises(RequestRefused) as caught:
        Authenticator((), tokens).identify(credential)
    assert (caught.value.code, caught.value.reason) == (CODE_UNAUTHENTICATED, UNAUTHENTICATED)
    return caught.value.message


def part(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()
