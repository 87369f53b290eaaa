"""Runs one router process with valid settings: opens its files, and serves until a signal."""

import secrets
import sys
from typing import TYPE_CHECKING

import uvloop

from trunkline.tls_files import TlsFileError
from trunkline_router.access.access import Access, Tenants
from trunkline_router.access.identity.authenticator import Authenticator, authenticator_of
from trunkline_router.access.identity.fleet_secret import LEAST_SECRET_BYTES, derived_key, read_fleet_secret
from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.identity.needed_roles import Open
from trunkline_router.access.tenants_file import TenantsError, read_tenants
from trunkline_router.settings import EXIT_CANNOT_START, RouterSettings
from trunkline_runtime.log import configure_logging
from trunkline_runtime.server import PortInUse
from trunkline_runtime.tracing import open_tracing

if TYPE_CHECKING:
    from trunkline_router.assembly import SharedPort

SALT_PURPOSE = "cache salts"


def access_of(settings: RouterSettings, tenants: Tenants, authenticator: Authenticator) -> Access:
    """Returns the rules for callers. Cache salts derive from the fleet's current secret. Without one they derive from
    the grant key, which routers share too, or else from a random key: then only the processes of this router share
    tenants' cached prefixes."""
    given = read_fleet_secret(settings.identity.fleet_secret, settings.identity.fleet_secret_file)
    secret = given.current or settings.grant_key.encode()
    return Access(
        tenants,
        authenticator.identify if authenticator.is_configured else None,
        allows_anonymous=settings.identity.allow_anonymous,
        opened=frozenset(Open(name) for name in settings.identity.open),
        salt_key=derived_key(secret or secrets.token_bytes(LEAST_SECRET_BYTES), SALT_PURPOSE),
    )


def run(settings: RouterSettings, shared_port: "SharedPort | None" = None) -> int:
    """Serves until a signal; returns the exit status."""
    configure_logging("router", router=settings.name)
    tracing = open_tracing("trunkline-router", settings.name)
    status = 0
    try:
        tenants = read_tenants(settings.tenants)
        if settings.processes > 1 and not settings.redis_url and tenants.have_quotas:
            raise TenantsError("--tenants has quotas, which several processes can only keep together with --redis-url")
        authenticator = authenticator_of(settings)
        check_files(settings)
        # Most modules of the router. They are imported once all settings are known to be valid, so that an invalid one
        # is reported soon; and a process that only supervises others never imports them.
        from trunkline_router.router import serve

        uvloop.run(serve(settings, access_of(settings, tenants, authenticator), authenticator, tracing, shared_port))
    except (PortInUse, TenantsError, IdentityError, TlsFileError) as error:
        print(f"trunkline-router: {error}", file=sys.stderr)
        status = EXIT_CANNOT_START
    if tracing.queue is not None:
        tracing.queue.close()
    return status


def check_files(settings: RouterSettings) -> None:
    """Raises TlsFileError if a certificate for connections to workers or Redis cannot be used now."""
    tls = settings.worker_tls.client_tls()
    if tls is not None:
        tls.credentials()
    settings.redis_tls.check()
