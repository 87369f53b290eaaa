"""`trunkline-router`: routes clients' requests to workers."""

import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop

from trunkline.grant_keys import grant_key_problem
from trunkline.tls_files import TlsFileError
from trunkline_router.access.access import Access
from trunkline_router.access.gate.freed_memory import keep_freed_memory
from trunkline_router.access.identity.authenticator import Authenticator, authenticator_of
from trunkline_router.access.identity.fleet_secret import LEAST_SECRET_BYTES, derived_key, read_fleet_secret
from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.identity.needed_roles import Open
from trunkline_router.access.tenants import Tenants, TenantsError, read_tenants
from trunkline_router.processes import EXIT_CANNOT_START, supervise
from trunkline_router.request.model_aliases import aliases_problem
from trunkline_router.settings import (
    RouterSettings,
    address_problem,
    sharing_problem,
)
from trunkline_runtime.log import configure_logging
from trunkline_runtime.server import PortInUse
from trunkline_runtime.settings import load_settings
from trunkline_runtime.tracing import open_tracing

if TYPE_CHECKING:
    from trunkline_router.assembly import SharedPort

SALT_PURPOSE = "cache salts"


def main() -> None:
    settings = router_settings(sys.argv[1:])
    sys.exit(supervise(settings, sys.argv[1:]) if settings.processes > 1 else run(settings))


def router_settings(arguments: Sequence[str]) -> RouterSettings:
    """Reads the settings. If one is invalid, prints one line to standard error and exits with status 2."""
    settings = load_settings(RouterSettings, arguments, prog="trunkline-router", description=__doc__ or "")
    allow_plaintext = settings.tls.allow_plaintext
    problem = (
        address_problem(settings.workers)
        or aliases_problem(settings.model_aliases)
        or sharing_problem(settings.redis_url, settings.key_prefix)
        or settings.http.problem(settings.processes)
        or settings.identity.problem(settings.redis_url)
        or settings.identity.exposure_problem(settings.host)
        or secret_problem(settings)
        or grant_key_problem(settings.grant_key, settings.grant_key_previous)
        or settings.tls.problem(settings.host)
        or settings.worker_tls.problem(settings.workers, allow_plaintext=allow_plaintext)
        or settings.redis_tls.problem(settings.redis_url, allow_plaintext=allow_plaintext)
    )
    if problem is not None:
        print(f"trunkline-router: {problem}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    return settings


def secret_problem(settings: RouterSettings) -> str | None:
    """Returns why the fleet's secret cannot be used, in one line; None if it can, or if there is none."""
    try:
        read_fleet_secret(settings.identity.fleet_secret, settings.identity.fleet_secret_file)
    except IdentityError as error:
        return str(error)
    return None


def access_of(settings: RouterSettings, tenants: Tenants, authenticator: Authenticator) -> Access:
    """Returns the rules for callers. Cache salts derive from the fleet's current secret. Without one they derive from
    the grant key, which routers share too, or else from a random key: then only the processes of this router share
    tenants' cached prefixes."""
    given = read_fleet_secret(settings.identity.fleet_secret, settings.identity.fleet_secret_file)
    secret = given.current or settings.grant_key.encode()
    return Access(
        tenants,
        authenticator if authenticator.is_configured else None,
        allows_anonymous=settings.identity.allow_anonymous,
        opened=frozenset(Open(name) for name in settings.identity.open),
        salt_key=derived_key(secret or secrets.token_bytes(LEAST_SECRET_BYTES), SALT_PURPOSE),
    )


def run(settings: RouterSettings, shared_port: "SharedPort | None" = None) -> int:
    """Serves until a signal; returns the exit status."""
    configure_logging("router", router=settings.name)
    tracing = open_tracing("trunkline-router", settings.name)
    keep_freed_memory()
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
    settings.redis_tls.redis_tls().check()


if __name__ == "__main__":
    main()
