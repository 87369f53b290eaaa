"""Decides whether a call is allowed, and for which tenant it acts."""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

import grpc

from trunkline.names import TENANT_KEY, only_value
from trunkline.status import (
    CODE_PERMISSION_DENIED,
    CODE_UNAUTHENTICATED,
    FORBIDDEN,
    UNAUTHENTICATED,
    RequestRefused,
    invalid,
)
from trunkline.validation import tenant_problem
from trunkline_router.access.caller import Caller
from trunkline_router.access.identity.identity import ANY_TENANT, Identity, Role, unauthenticated
from trunkline_router.access.identity.needed_roles import USERS, Needed, Open
from trunkline_router.access.tenants import Tenant, Tenants
from trunkline_router.address import host_of

CREDENTIAL_KEY = "authorization"
SCHEME = "bearer"
MAX_CREDENTIAL = 8 << 10  # characters; a token with many claims has two thousand

Metadata = Iterable[tuple[str, str | bytes]] | None
Context = grpc.aio.ServicerContext[Any, Any]

# Of a router without any source of identities: every caller may do everything and names its tenant itself.
UNCHECKED = Identity("anonymous", "", frozenset(Role), frozenset({ANY_TENANT}), may_salt=True)
# Of a caller without credentials, where a router that has identities admits such callers.
ANONYMOUS = Identity("anonymous", "", frozenset({Role.USER}), sees_cache=False)


# Of a call that is open to all.
VISITOR = Caller("", Identity("visitor", "", frozenset(), sees_cache=False), Tenant(), is_listed=False, salt_key=b"")


class NoCredentials(RequestRefused):
    """A call that needs credentials presents none.  where: they belong, as clients of the protocol call it"""

    def __init__(self, where: str = "the metadata 'authorization: Bearer KEY'") -> None:
        super().__init__(CODE_UNAUTHENTICATED, UNAUTHENTICATED, f"this call needs credentials: send {where}")


class NotAllowed(RequestRefused):
    """The identity of a call may not make it.  tenant: the identity's"""

    def __init__(self, message: str, identity: Identity, *, field: str = "") -> None:
        super().__init__(CODE_PERMISSION_DENIED, FORBIDDEN, message, field=field)
        self.tenant = identity.tenant


class Identifier(Protocol):
    """Finds the identity of a credential."""

    def identify(self, credential: str, host: str = "") -> Identity:
        """Raises RequestRefused (UNAUTHENTICATED, OVERLOADED)."""
        ...


class Access:
    """Turns a call's metadata into its caller.

    identifier: None if credentials are not checked: then all callers are UNCHECKED
    allows_anonymous: callers without credentials are admitted as ANONYMOUS
    opened: what callers without credentials may call in any case
    salt_key: a secret of the fleet that cache salts derive from
    """

    def __init__(
        self,
        tenants: Tenants | None = None,
        identifier: Identifier | None = None,
        *,
        allows_anonymous: bool = False,
        opened: frozenset[Open] = frozenset(),
        salt_key: bytes = b"",
    ) -> None:
        self._tenants = tenants or Tenants()
        self._identifier = identifier
        self._allows_anonymous = allows_anonymous
        self._opened = opened
        self._salt_key = salt_key

    def is_open(self, needed: Needed) -> bool:
        """Whether what needs this is open: credentials do not matter, and every caller is a VISITOR."""
        return needed.is_open or needed.open in self._opened

    @property
    def tenants(self) -> Tenants:
        """The terms of tenants."""
        return self._tenants

    def check(self, metadata: Metadata, needed: Needed, peer: str = "") -> None:
        """Raises RequestRefused (UNAUTHENTICATED, FORBIDDEN, OVERLOADED) if the call is not allowed."""
        if not self.is_open(needed):
            self.caller(metadata, needed.roles, peer)

    def admit(self, context: Context, roles: frozenset[Role]) -> Caller:
        """Returns the caller of a gRPC call, and remembers it for admitted() in the same task. Raises RequestRefused
        as caller() does."""
        caller = self.caller(context.invocation_metadata(), roles, context.peer())
        _ADMITTED.set((self, caller))
        return caller

    def admitted(self) -> Caller:
        """Returns the caller of the gRPC call that the current task serves: the gate has admitted it with the roles of
        its method. Raises NotAdmitted if it has not."""
        access, caller = _ADMITTED.get() or (None, None)
        if access is not self or caller is None:
            raise NotAdmitted
        return caller

    def caller(self, metadata: Metadata, roles: frozenset[Role] = USERS, peer: str = "") -> Caller:
        """Returns the caller of a call that needs one of these roles; none: any identity may make it.

        peer: where the call comes from, as gRPC writes it

        Raises RequestRefused: UNAUTHENTICATED without valid credentials, FORBIDDEN if the identity lacks the role or
        names a tenant that it may not act for, INVALID_REQUEST for a malformed tenant, OVERLOADED if too many invalid
        tokens came from the peer's host.
        """
        identity = self._identity(metadata, host_of(peer))
        if roles and roles.isdisjoint(identity.roles):
            raise NotAllowed(f"these credentials do not have {_words(roles)}, which this call needs", identity)
        tenant = identity.tenant
        named = tenant_of(metadata)
        if named and named != tenant:
            if not identity.may_act_for(named):
                raise NotAllowed(f"these credentials may not act for tenant {named!r}", identity, field=TENANT_KEY)
            tenant = named
        is_listed = self._tenants.lists(tenant)
        terms = narrowed(self._tenants.terms(tenant), identity, is_listed=is_listed)
        return Caller(tenant, identity, terms, is_listed, self._salt_key)

    @property
    def is_checked(self) -> bool:
        """Whether callers need credentials."""
        return self._identifier is not None

    def _identity(self, metadata: Metadata, host: str) -> Identity:
        if self._identifier is None:
            return UNCHECKED
        credential = credential_of(metadata)
        if credential:
            return self._identifier.identify(credential, host)
        if self._allows_anonymous:
            return ANONYMOUS
        raise NoCredentials


# The caller of the call that the current task serves, with the rules that it was admitted by.
_ADMITTED: ContextVar[tuple[Access, Caller] | None] = ContextVar("admitted", default=None)


class NotAdmitted(Exception):
    """A bug: an RPC is served that has not passed the gate. It ends with INTERNAL."""


def _words(roles: frozenset[Role]) -> str:
    return "the role " + " or ".join(repr(role.value) for role in sorted(roles))


def refused_tenant(refused: RequestRefused) -> str:
    """The tenant of the credentials that a call was refused with; "" if it is not known."""
    return refused.tenant if isinstance(refused, NotAllowed) else ""


def narrowed(terms: Tenant, identity: Identity, *, is_listed: bool) -> Tenant:
    """Returns the terms within what the identity may do. The lower of two lanes and of two quotas counts. The lane of a
    tenant that the tenants file does not list is the identity's alone: an issuer can grant the interactive lane."""
    cap, quotas = terms.cap, terms.quotas
    if identity.lane is not None:
        cap = max(cap, identity.lane) if is_listed else identity.lane
    if identity.quotas is not None:
        quotas = quotas.within(identity.quotas)
    return terms if (cap, quotas) == (terms.cap, terms.quotas) else replace(terms, cap=cap, quotas=quotas)


def credential_of(metadata: Metadata) -> str:
    """Returns the credential that a call presents, "" if it presents none. Raises RequestRefused (UNAUTHENTICATED) if
    it cannot be read."""
    try:
        given = only_value(metadata, CREDENTIAL_KEY)
    except RequestRefused as refused:
        raise unauthenticated(refused.message) from None
    if not given:
        return ""
    scheme, _, credential = given.partition(" ")
    if scheme.lower() != SCHEME or not credential or len(credential) > MAX_CREDENTIAL:
        raise unauthenticated("the authorization is not of the form 'Bearer KEY'")
    return credential


def tenant_of(metadata: Metadata) -> str:
    """Returns the tenant that a call names, "" if it names none. Raises RequestRefused (INVALID_REQUEST)."""
    tenant = only_value(metadata, TENANT_KEY)
    if problem := tenant_problem(tenant):
        raise invalid(TENANT_KEY, problem)
    return tenant
