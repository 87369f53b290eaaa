"""`trunkline-router`: routes clients' requests to workers."""

import sys
from collections.abc import Sequence

from trunkline.grant import grant_key_problem
from trunkline_router.settings import (
    EXIT_CANNOT_START,
    RouterSettings,
    address_problem,
    aliases_problem,
    efforts_problem,
    sharing_problem,
)
from trunkline_runtime.settings import load_settings


def main() -> None:
    settings = router_settings(sys.argv[1:])
    # What runs a router is imported now: before, --help and an invalid setting are answered at once.
    if settings.processes > 1:
        from trunkline_router.processes import supervise

        sys.exit(supervise(settings, sys.argv[1:]))
    from trunkline_router.serving import run

    sys.exit(run(settings))


def router_settings(arguments: Sequence[str]) -> RouterSettings:
    """Reads the settings. If one is invalid, prints one line to standard error and exits with status 2."""
    settings = load_settings(RouterSettings, arguments, prog="trunkline-router", description=__doc__ or "")
    allow_plaintext = settings.tls.allow_plaintext
    problem = (
        address_problem(settings.workers)
        or aliases_problem(settings.model_aliases)
        or efforts_problem(settings.reasoning_efforts)
        or sharing_problem(settings.redis_url, settings.key_prefix)
        or settings.http.problem(settings.processes)
        or settings.identity.problem(settings.redis_url)
        or settings.identity.exposure_problem(settings.host)
        or settings.identity.secret_problem()
        or grant_key_problem(settings.grant_key, settings.grant_key_previous)
        or settings.tls.problem(settings.host)
        or settings.worker_tls.problem(settings.workers, allow_plaintext=allow_plaintext)
        or settings.redis_tls.problem(settings.redis_url, allow_plaintext=allow_plaintext)
    )
    if problem is not None:
        print(f"trunkline-router: {problem}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    return settings


if __name__ == "__main__":
    main()
