"""The file with the terms of tenants."""

from pathlib import Path
from typing import Any

from trunkline.names import lane_name
from trunkline.validation import LANES, LEAST_TENANT_WEIGHT, MOST_TENANT_WEIGHT, tenant_problem
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.access.identity.terms import JSON_ERRORS, RepeatedName, is_limit, loaded
from trunkline_router.quotas.quota import MOST_QUOTA, QUOTA_NAMES, Quotas

OTHER_TENANTS = "*"
CACHE_GROUP = "cache_group"
TERMS = ("weight", "lane", *QUOTA_NAMES, CACHE_GROUP)


class TenantsError(Exception):
    """The tenants file is invalid. The message is one line."""


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
        if not is_limit(limit):
            raise TenantsError(f"{where}: {quota} {limit!r} is not a whole number in [1, {MOST_QUOTA}]")
    group = terms.get(CACHE_GROUP)
    if CACHE_GROUP in terms and (problem := tenant_problem(group) if isinstance(group, str) else "must be a name"):
        raise TenantsError(f"{where}: {CACHE_GROUP} {group!r} {problem}")
    quotas = Quotas(**{name: terms[name] for name in QUOTA_NAMES if name in terms})
    return Tenant(float(weight), LANES[lane], quotas, group)
