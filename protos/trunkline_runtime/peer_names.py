"""The names in a caller's certificate, which the server has verified (mTLS)."""

from typing import Any

import grpc

ALTERNATIVE_NAMES, COMMON_NAME = "x509_subject_alternative_name", "x509_common_name"


def names_of(context: "grpc.aio.ServicerContext[Any, Any]") -> frozenset[str]:
    """The subject alternative names of the caller's certificate: DNS names, URIs, e-mail and IP addresses. Its common
    name if it has none of them, as RFC 6125 orders. Empty for callers without a certificate."""
    given = context.auth_context()
    names = given.get(ALTERNATIVE_NAMES) or given.get(COMMON_NAME) or ()
    return frozenset(name.decode("utf-8", "replace") for name in names)
