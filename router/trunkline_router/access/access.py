"""Decides whether a call is allowed, for which tenant it acts, and on which terms."""

import hmac
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from trunkline.names import TENANT_KEY, lane_name, only_value
from trunkline.status import (
    CODE_PERMISSION_DENIED,
    CODE_UNAUTHENTICATED,
    FORBIDDEN,
    UNAUTHENTICATED,
    RequestRefused,
    forbidden,
    invalid,
    unauthenticated,
)
from trunkline.v1.generation_pb2 import Lane
from trunkline.validation import LEAST_TENANT_WEIGHT, MOST_TENANT_WEIGHT, tenant_problem, validate_scheduling
from trunkline_router.access.identity.identity import ANY_TENANT, Identity, Role
from trunkline_router.access.identity.needed_roles import USERS, Needed, Open
from trunkline_router.address import host_of
from trunkline_router.quotas.quota import Quotas

STANDARD = Lane.LANE_STANDARD  # once: the enum looks up each name that it is asked for
_SALT_DOMAIN = b"trunkline cache salt"
_SALT_BYTES = 16
CREDENTIAL_KEY = "authorization"
SCHEME = "bearer"
MAX_CREDENTIAL = 8 << 10  # characters; a token with many claims has two thousand

# The caller of the call that the current task serves.
_ADMITTED: "ContextVar[Caller | None]" = ContextVar("admitted", default=None)

Metadata = Iterable[tuple[str, str | bytes]] | None
Context = grpc.aio.ServicerContext[Any, Any]

# Of a router without any source of identities: every caller may do everything and names its tenant itself.
UNCHECKED = Identity("anonymous", "", frozenset(Role), frozenset({ANY_TENANT}), may_salt=True)
# Of a caller without credentials, where a router that has identities admits such callers.
ANONYMOUS = Identity("anonymous", "", frozenset({Role.USER}), sees_cache=False)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's terms."""

    weight: float = 1.0
    # The highest lane that its requests run in. The interactive lane goes before all others, so it must be granted.
    cap: "Lane.ValueType" = STANDARD
    quotas: Quotas = field(default_factory=Quotas)
    # Tenants of one group share cached prefixes; None: with no other tenant; "": with requests without a tenant.
    cache_group: str | None = None

    def lane(self, asked: "Lane.ValueType") -> "Lane.ValueType":
        """Returns the lane that a request of the tenant runs in."""
        return max(asked or STANDARD, self.cap)

    def cache_scope(self, name: str) -> bytes:
        """Returns the scope of the tenant's cache entries: requests of one scope share cached prefixes. Without scopes,
        a prompt's latency and cached tokens would tell one tenant what another has sent. Empty: shared by all callers
        without a tenant."""
        if self.cache_group is not None:
            return f"group\0{self.cache_group}".encode() if self.cache_group else b""
        return f"tenant\0{name}".encode() if name else b""


@dataclass(frozen=True, slots=True)
class Tenants:
    """Terms by name."""

    named: Mapping[str, Tenant] = field(default_factory=dict)
    otherwise: Tenant = Tenant()

    @property
    def have_quotas(self) -> bool:
        """Whether any tenant has quotas."""
        return any(tenant.quotas != Quotas() for tenant in (*self.named.values(), self.otherwise))

    def terms(self, name: str) -> Tenant:
        return self.named.get(name, self.otherwise)

    def lists(self, name: str) -> bool:
        """Whether a tenant has terms of its own."""
        return name in self.named


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a request is scheduled: its tenant, weight and lane, and the salt of its cached prefixes."""

    tenant: str
    weight: float
    lane: "Lane.ValueType"  # never unspecified
    cache_salt: bytes = b""

    def corrected(self, factor: float) -> "Scheduling":
        """Returns the same with the weight multiplied by `factor`, within the bounds on weights."""
        weight = min(MOST_TENANT_WEIGHT, max(LEAST_TENANT_WEIGHT, factor * self.weight))
        return self if weight == self.weight else replace(self, weight=weight)

    @property
    def lane_name(self) -> str:
        return lane_name(self.lane)


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of the sender of a call. `terms` are those of the tenant, narrowed by the identity."""

    tenant: str
    identity: Identity
    terms: Tenant
    is_listed: bool  # the tenant has terms of its own
    salt_key: bytes = field(repr=False)

    def may_use(self, model: str) -> bool:
        """Whether the identity may use a served model of this name."""
        return self.identity.models is None or model in self.identity.models

    def check_model(self, model: str, asked: str) -> None:
        """Raises RequestRefused (FORBIDDEN) if the identity may not use the model, for which the client used the name
        `asked`."""
        if not self.may_use(model):
            raise forbidden(f"model {asked!r} is not among those that these credentials may use", field="model")

    def scheduling(self, asked: "Lane.ValueType", salt: str = "") -> Scheduling:
        """Returns the scheduling of a request for a lane; `salt`: the client's cache_salt.

        Raises RequestRefused: INVALID_REQUEST for an unknown lane, FORBIDDEN for a salt that the caller may not set.
        """
        validate_scheduling(asked, self.tenant, self.terms.weight)
        if salt and not self.identity.may_salt:
            raise forbidden("these credentials may not set a cache salt", field="cache_salt")
        return Scheduling(self.tenant, self.terms.weight, self.terms.lane(asked), self.cache_salt(salt))

    def cache_salt(self, salt: str = "") -> bytes:
        """Returns the salt of the caller's cached prefixes, empty for the prefixes that callers without a tenant share.

        It is keyed, so that no tenant can compute the hashes of another tenant's blocks.
        """
        scope = self.terms.cache_scope(self.tenant)
        if not scope and not salt:
            return b""
        parts = (_SALT_DOMAIN, scope, salt.encode())
        scoped = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hmac.digest(self.salt_key, scoped, "sha256")[:_SALT_BYTES]


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


class Access:
    """Turns a call's metadata into its caller.

    identify: tells the identity of a credential that came from a host, or raises RequestRefused (UNAUTHENTICATED,
        OVERLOADED); None: credentials are not checked, and all callers are UNCHECKED
    allows_anonymous: callers without credentials are admitted as ANONYMOUS
    opened: what callers without credentials may call in any case
    salt_key: a secret of the fleet that cache salts derive from
    """

    def __init__(
        self,
        tenants: Tenants | None = None,
        identify: Callable[[str, str], Identity] | None = None,
        *,
        allows_anonymous: bool = False,
        opened: frozenset[Open] = frozenset(),
        salt_key: bytes = b"",
    ) -> None:
        self.tenants = tenants or Tenants()
        self.is_checked = identify is not None  # whether callers need credentials
        self._identify = identify
        self._allows_anonymous = allows_anonymous
        self._opened = opened
        self._salt_key = salt_key

    @property
    def admits_all(self) -> bool:
        """Whether everyone may call although the operator has not asked for that."""
        return not (self.is_checked or self._allows_anonymous)

    def is_open(self, needed: Needed) -> bool:
        """Whether what needs this is open: credentials do not matter, and every caller is a VISITOR."""
        return needed.is_open or needed.open in self._opened

    def check(self, metadata: Metadata, needed: Needed, peer: str = "") -> None:
        """Raises RequestRefused (UNAUTHENTICATED, FORBIDDEN, OVERLOADED) if the call is not allowed."""
        if not self.is_open(needed):
            self.caller(metadata, needed.roles, peer)

    def admit(self, context: Context, roles: frozenset[Role]) -> Caller:
        """Returns the caller of a gRPC call, and remembers it for admitted() in the same task. Raises RequestRefused
        as caller() does."""
        caller = self.caller(context.invocation_metadata(), roles, context.peer())
        _ADMITTED.set(caller)
        return caller

    def admitted(self) -> Caller:
        """Returns the caller of the gRPC call that the current task serves: the gate has admitted it with the roles of
        its method. Raises NotAdmitted if it has not."""
        caller = _ADMITTED.get()
        if caller is None:
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
        is_listed = self.tenants.lists(tenant)
        terms = narrowed(self.tenants.terms(tenant), identity, is_listed=is_listed)
        return Caller(tenant, identity, terms, is_listed, self._salt_key)

    def _identity(self, metadata: Metadata, host: str) -> Identity:
        if self._identify is None:
            return UNCHECKED
        credential = credential_of(metadata)
        if credential:
            return self._identify(credential, host)
        if self._allows_anonymous:
            return ANONYMOUS
        raise NoCredentials


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
