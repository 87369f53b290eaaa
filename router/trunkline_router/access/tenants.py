"""The terms of tenants: weights, lanes, quotas and cache groups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trunkline.names import lane_name
from trunkline.v1.generation_pb2 import Lane
from trunkline.validation import LANES, LEAST_TENANT_WEIGHT, MOST_TENANT_WEIGHT, tenant_problem
from trunkline_router.access.identity.identity import JSON_ERRORS, RepeatedName, loaded
from trunkline_router.quotas.quota import MOST_QUOTA, QUOTA_NAMES, Quotas

OTHER_TENANTS = "*"
CACHE_GROUP = "cache_group"
STANDARD = Lane.LANE_STANDARD  # once: the enum looks up each name that it is asked for
TERMS = ("weight", "lane", *QUOTA_NAMES, CACHE_GROUP)


class TenantsError(Exception):
    """The tenants file is invalid. The message is one line."""


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


def read_tenants(path: str) -> Tenants:
    """Reads a JSON file: {"acme": {"weight": 3, "tokens_per_minute": 90000}, "*": {"lane": "batch"}}.

    "*" has the terms of each other tenant. A tenant's highest lane is the standard one, unless its terms (or those of
    "*", if it has none) say "lane": "interactive". Its cached prefixes are its own, unless it has a "cache_group".

    With an empty path all tenants are equal, none may use the interactive lane, and nothing is limited. Raises
    TenantsError.
    """
    if not path:
        return Tenants()
    where = f"--tenants={path}"
    try:
        entries = loaded(Path(path).read_bytes())
    except OSError as error:
        raise TenantsError(f"{where}: {error.strerror}") from None
    except RepeatedName as repeated:
        raise TenantsError(f"{where}: not JSON: {repeated.name!r} appears twice") from None
    except JSON_ERRORS as error:
        raise TenantsError(f"{where}: not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise TenantsError(f'{where}: must be an object of tenants by name: {{"acme": {{"weight": 3}}}}')
    tenants = {name: _tenant(f"{where}: tenant {name!r}", name, terms) for name, terms in entries.items()}
    otherwise = tenants.pop(OTHER_TENANTS, Tenant())
    return Tenants(tenants, otherwise)


def _tenant(where: str, name: str, terms: Any) -> Tenant:
    if problem := tenant_problem(name):
        raise TenantsError(f"{where}: the name {problem}")
    if not isinstance(terms, dict):
        raise TenantsError(f"{where}: must be an object; allowed: {', '.join(TERMS)}, all optional")
    unknown = next((key for key in terms if key not in TERMS), None)
    if unknown is not None:
        raise TenantsError(f"{where}: {unknown!r} is not known; allowed: {', '.join(TERMS)}, all optional")
    weight, lane = terms.get("weight", 1.0), terms.get("lane", lane_name(Tenant().cap))
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not LEAST_TENANT_WEIGHT <= weight <= MOST_TENANT_WEIGHT:
        raise TenantsError(f"{where}: weight {weight!r} is not in [{LEAST_TENANT_WEIGHT:g}, {MOST_TENANT_WEIGHT:g}]")
    if not isinstance(lane, str) or lane not in LANES:
        raise TenantsError(f"{where}: lane {lane!r} is not one of {', '.join(LANES)}")
    for quota in QUOTA_NAMES:
        limit = terms.get(quota, 1)
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MOST_QUOTA:
            raise TenantsError(f"{where}: {quota} {limit!r} is not a whole number in [1, {MOST_QUOTA}]")
    group = terms.get(CACHE_GROUP)
    if CACHE_GROUP in terms and (problem := tenant_problem(group) if isinstance(group, str) else "must be a name"):
        raise TenantsError(f"{where}: {CACHE_GROUP} {group!r} {problem}")
    quotas = Quotas(**{name: terms[name] for name in QUOTA_NAMES if name in terms})
    return Tenant(float(weight), LANES[lane], quotas, group)
