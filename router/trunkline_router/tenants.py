"""What a router knows of its tenants: how much each counts, and how urgent its requests may be.

A tenant is named by the call's metadata, x-trunkline-tenant. Until authentication comes, whoever reaches the router is
trusted to name itself: keep it on a private network.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trunkline.status import RequestRefused, invalid
from trunkline.v1.generation_pb2 import Lane
from trunkline.validation import LEAST_TENANT_WEIGHT, MOST_TENANT_WEIGHT, validate_scheduling

TENANT_KEY = "x-trunkline-tenant"
EVERYBODY_ELSE = "*"
LANES = {"interactive": Lane.LANE_INTERACTIVE, "standard": Lane.LANE_STANDARD, "batch": Lane.LANE_BATCH}


class TenantsError(Exception):
    """The tenants file makes no sense. One line for a person."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's terms."""

    weight: float = 1.0
    cap: Lane = Lane.LANE_INTERACTIVE  # the highest lane that its requests run in

    def lane(self, asked: Lane) -> Lane:
        """The lane that a request of it runs in."""
        return max(asked or Lane.LANE_STANDARD, self.cap)


@dataclass(frozen=True, slots=True)
class Tenants:
    """Terms by name."""

    named: Mapping[str, Tenant] = field(default_factory=dict)
    otherwise: Tenant = Tenant()

    def terms(self, name: str) -> Tenant:
        return self.named.get(name, self.otherwise)


def tenant_of(metadata: Any) -> str:
    """The tenant that a call names; "" where it names none. Raises RequestRefused."""
    for key, value in metadata or ():
        if key == TENANT_KEY:
            try:
                validate_scheduling(Lane.LANE_STANDARD, value, 0.0)
            except RequestRefused as refused:
                raise invalid(TENANT_KEY, refused.message.removeprefix("tenant: ")) from None
            return str(value)
    return ""


def read_tenants(path: str) -> Tenants:
    """From a JSON file: {"acme": {"weight": 3, "lane": "standard"}, "*": {"lane": "batch"}}; "*" is everybody else.
    Raises TenantsError."""
    if not path:
        return Tenants()
    try:
        entries = json.loads(Path(path).read_text())
    except OSError as error:
        raise TenantsError(f"--tenants={path}: {error.strerror}") from None
    except ValueError as error:
        raise TenantsError(f"--tenants={path}: not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise TenantsError(f"--tenants={path}: must be an object of tenants by name")
    tenants = {name: _tenant(path, name, terms) for name, terms in entries.items()}
    return Tenants(tenants, tenants.get(EVERYBODY_ELSE, Tenant()))


def _tenant(path: str, name: str, terms: Any) -> Tenant:
    where = f"--tenants={path}: tenant {name!r}"
    if not isinstance(terms, dict) or not terms.keys() <= {"weight", "lane"}:
        raise TenantsError(f"{where} must be an object with weight and lane, both optional")
    weight, lane = terms.get("weight", 1.0), terms.get("lane", "interactive")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not LEAST_TENANT_WEIGHT <= weight <= MOST_TENANT_WEIGHT:
        raise TenantsError(f"{where}: weight {weight!r} is not in [{LEAST_TENANT_WEIGHT:g}, {MOST_TENANT_WEIGHT:g}]")
    if lane not in LANES:
        raise TenantsError(f"{where}: lane {lane!r} is not one of {', '.join(LANES)}")
    return Tenant(float(weight), LANES[lane])
