"""From a call's metadata to its caller: credentials, roles, tenants, terms and cache salts."""

import pytest

from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused
from trunkline.v1.generation_pb2 import Lane
from trunkline_router.access.access import Access, Caller, Tenant, Tenants
from trunkline_router.access.identity.identity import Identity, Role
from trunkline_router.access.identity.needed_roles import OPERATORS, USERS, Needed, Open
from trunkline_router.quotas.quota import Quotas

USER, OPERATOR = frozenset({Role.USER}), frozenset({Role.OPERATOR})


class Known:
    """Identities by credential."""

    def __init__(self, **identities: Identity) -> None:
        self._identities = identities

    def identify(self, credential: str, host: str = "") -> Identity:
        if credential not in self._identities:
            raise RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, "the credential is not valid")
        return self._identities[credential]


ACCESS = Access(
    Tenants({"acme": Tenant(2.0, Lane.LANE_STANDARD, Quotas(requests_per_minute=10, tokens_per_minute=100))}),
    Known(
        acme=Identity("key:a", "acme", USER, lane=Lane.LANE_INTERACTIVE, quotas=Quotas(requests_per_minute=5)),
        other=Identity("key:o", "other", USER, lane=Lane.LANE_INTERACTIVE, models=frozenset({"small"})),
        gateway=Identity("key:g", "gate", USER, acts_for=frozenset({"acme"}), may_salt=True),
        any=Identity("key:x", "", USER, acts_for=frozenset({"*"})),
        admin=Identity("key:d", "acme", OPERATOR),
    ).identify,
    salt_key=b"a secret of the fleet",
)


def call(key: str = "", tenant: str = "", roles: frozenset[Role] = USERS, access: Access = ACCESS) -> Caller:
    metadata = [("authorization", f"Bearer {key}")] if key else []
    return access.caller([*metadata, ("x-trunkline-tenant", tenant)] if tenant else metadata, roles)


def refusal(key: str = "", tenant: str = "", roles: frozenset[Role] = USERS, access: Access = ACCESS) -> str:
    with pytest.raises(RequestRefused) as caught:
        call(key, tenant, roles, access)
    return caught.value.reason


def test_the_tenant_comes_from_the_identity() -> None:
    assert call("acme").tenant == "acme"
    assert call("acme", "acme").tenant == "acme", "naming it is allowed"
    assert refusal("acme", "other") == "FORBIDDEN"
    assert call("gateway").tenant == "gate"
    assert call("gateway", "acme").tenant == "acme"
    assert refusal("gateway", "other") == "FORBIDDEN"
    assert call("any", "anything").tenant == "anything"


def test_without_valid_credentials_no_call_is_allowed() -> None:
    assert refusal() == "UNAUTHENTICATED"
    assert refusal("wrong") == "UNAUTHENTICATED"
    for scheme in ("Basic acme", "acme", "Bearer", "Bearer "):
        with pytest.raises(RequestRefused) as caught:
            ACCESS.caller([("authorization", scheme)])
        assert caught.value.reason == "UNAUTHENTICATED", scheme
    twice = [("authorization", "Bearer acme"), ("authorization", "Bearer admin")]
    with pytest.raises(RequestRefused) as caught:
        ACCESS.caller(twice)
    assert caught.value.reason == "UNAUTHENTICATED"


def test_anonymous_callers_are_admitted_where_that_is_configured_but_wrong_credentials_are_not() -> None:
    access = Access(identify=Known().identify, allows_anonymous=True)
    caller = call(access=access)
    assert (caller.tenant, caller.identity.roles, caller.identity.sees_cache) == ("", USER, False)
    assert refusal("wrong", access=access) == "UNAUTHENTICATED"
    assert refusal(tenant="acme", access=access) == "FORBIDDEN"
    assert refusal(roles=OPERATORS, access=access) == "FORBIDDEN"


def test_without_identities_each_caller_names_its_tenant_and_may_do_everything() -> None:
    access = Access()
    assert call("any-key-is-ignored", "acme", OPERATORS, access).tenant == "acme"


def test_a_role_is_needed() -> None:
    assert refusal("acme", roles=OPERATORS) == "FORBIDDEN"
    assert refusal("admin", roles=USERS) == "FORBIDDEN"
    assert call("admin", roles=OPERATORS).tenant == "acme"
    assert call("admin", roles=frozenset()).tenant == "acme"


def test_what_is_opened_needs_no_credentials() -> None:
    access = Access(identify=Known().identify, opened=frozenset({Open.READINESS}))
    access.check([], Needed(open=Open.READINESS))
    for needed in (Needed(open=Open.REFLECTION), Needed(USERS)):
        with pytest.raises(RequestRefused):
            access.check([], needed)


def test_the_lower_of_two_lanes_and_of_two_quotas_counts() -> None:
    acme = call("acme").terms
    assert (acme.cap, acme.quotas) == (Lane.LANE_STANDARD, Quotas(requests_per_minute=5, tokens_per_minute=100))
    assert call("other").terms.cap == Lane.LANE_INTERACTIVE, "no tenants file lists it: the issuer decides"


def test_a_model_that_the_identity_may_not_use_is_refused() -> None:
    call("other").check_model("small", "small")
    with pytest.raises(RequestRefused) as caught:
        call("other").check_model("large", "alias")
    assert (caught.value.reason, caught.value.field) == ("FORBIDDEN", "model")
    assert "large" not in caught.value.message, "the client is told the name that it used"
    call("acme").check_model("large", "large")


def test_cache_salts_differ_by_tenant_by_the_clients_salt_and_by_fleet() -> None:
    salts = [
        call("acme").cache_salt(),
        call("other").cache_salt(),
        call("gateway").cache_salt(),
        call("gateway").cache_salt("project"),
        call("gateway").cache_salt("another project"),
        call("any", "acme", access=Access(salt_key=b"another fleet")).cache_salt(),
    ]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 16 for salt in salts)
    assert call("gateway", "acme").cache_salt() == call("acme").cache_salt(), "acting for a tenant shares its prefixes"
    assert not any(b"acme" in salt for salt in salts), "a salt does not tell the tenant"


def test_only_identities_with_permission_set_a_cache_salt() -> None:
    assert call("gateway").scheduling(Lane.LANE_STANDARD, "mine").cache_salt == call("gateway").cache_salt("mine")
    with pytest.raises(RequestRefused) as caught:
        call("acme").scheduling(Lane.LANE_STANDARD, "mine")
    assert (caught.value.reason, caught.value.field) == ("FORBIDDEN", "cache_salt")
