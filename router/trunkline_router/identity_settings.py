"""Settings of a router's callers: API keys, tokens, and what is open without credentials."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from trunkline_router.access.identity.fleet_secret import read_fleet_secret
from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.identity.needed_roles import Open
from trunkline_runtime.settings import setting
from trunkline_runtime.tls_settings import is_loopback


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """How callers prove their identities."""

    api_keys: str = setting(
        "",
        metavar="FILE",
        help="JSON file with API keys, written by trunkline keys create --file; a change counts within a second",
    )
    api_keys_in_redis: bool = setting(
        False,
        help="use the API keys that trunkline keys create --redis-url has written; needs --redis-url and the fleet's "
        "secret. While Redis is unreachable, the keys that a router knows stay valid",
    )
    fleet_secret: str = setting(
        "",
        metavar="SECRET",
        help="secret of all routers of the fleet, 32 bytes or more: seals API keys in Redis and keeps tenants from "
        "computing each other's cache salts. Pass it as TRUNKLINE_FLEET_SECRET or as a file: other users of the host "
        "can see arguments",
    )
    fleet_secret_file: str = setting(
        "",
        metavar="FILE",
        help="file with the fleet's secret, in place of --fleet-secret. Each further line has another secret, which "
        "opens what it has sealed while the secret is changed",
    )
    jwt_jwks: str = setting(
        "",
        metavar="FILE|URL",
        help="public keys (JWKS) of the issuer of tokens (JWT): a file, which is watched, or an https URL, which is "
        "asked every five minutes; http is allowed for loopback addresses",
    )
    jwt_issuer: str = setting(
        "", metavar="ISSUER", help="the claim iss that tokens must have; required with --jwt-jwks"
    )
    jwt_audience: tuple[str, ...] = setting(
        (),
        metavar="NAME,...",
        help="names of this service, separated by commas: the claim aud must have one; required with --jwt-jwks",
    )
    jwt_tenant_claim: str = setting(
        "tenant", metavar="CLAIM", help="claim with the tenant; a name with dots may be a path"
    )
    jwt_roles_claim: str = setting(
        "roles",
        metavar="CLAIM",
        help="claim with the roles user, operator and scraper, others are ignored: a list, or a text with spaces "
        "between them; a name with dots may be a path. A token without the claim has the role user",
    )
    jwt_claim_prefix: str = setting(
        "",
        metavar="PREFIX",
        help="what the names of the claims acts_for, lane, models, quotas, may_salt and sees_cache begin with, such as "
        "https://acme.example/",
    )
    allow_anonymous: bool = setting(
        False,
        help="serve callers without credentials. With API keys or tokens, such callers have the role user and no "
        "tenant; without, every caller may do everything, which is otherwise allowed on a loopback address only",
    )
    open: tuple[str, ...] = setting(
        (),
        metavar="NAME,...",
        help="what callers without credentials may call in any case, separated by commas: "
        + ", ".join(name.value for name in Open)
        + "; liveness is always open",
    )

    @property
    def has_sources(self) -> bool:
        """Whether callers can have identities."""
        return bool(self.api_keys or self.api_keys_in_redis or self.jwt_jwks)

    @property
    def has_secret(self) -> bool:
        """Whether the fleet has a secret."""
        return bool(self.fleet_secret or self.fleet_secret_file)

    @property
    def has_jwks_url(self) -> bool:
        """Whether --jwt-jwks is a URL; otherwise it is a file."""
        return "://" in self.jwt_jwks

    def problem(self, redis_url: str) -> str | None:
        """Returns what is wrong with the sources of identities, in one line without secrets; None if they can be
        used."""
        if self.api_keys_in_redis and not redis_url:
            return "--api-keys-in-redis needs --redis-url"
        if self.api_keys_in_redis and not self.has_secret:
            return "--api-keys-in-redis needs the fleet's secret: set TRUNKLINE_FLEET_SECRET or --fleet-secret-file"
        if not self.jwt_jwks:
            return None
        for name, value in (("issuer", self.jwt_issuer), ("audience", self.jwt_audience)):
            if not value:
                return f"--jwt-jwks needs --jwt-{name}: without it, tokens for other services would count here"
        if self.has_jwks_url:
            return _jwks_url_problem(self.jwt_jwks)
        return None

    def secret_problem(self) -> str | None:
        """Reads the fleet's secret. Returns why it cannot be used, in one line; None if it can, or there is none."""
        try:
            read_fleet_secret(self.fleet_secret, self.fleet_secret_file)
        except IdentityError as error:
            return str(error)
        return None

    def exposure_problem(self, host: str) -> str | None:
        """Returns why a router that listens on `host` would be open to strangers, or what is wrong with --open; None if
        nothing is."""
        allowed = [name.value for name in Open]
        for name in self.open:
            if name not in allowed:
                return f"--open={name} is not known; allowed: {', '.join(allowed)}"
        if self.has_sources or self.allow_anonymous or is_loopback(host):
            return None
        return (
            f"--host={host} can be reached from other machines, and callers need no credentials: set --api-keys, "
            "--api-keys-in-redis or --jwt-jwks, or --allow-anonymous to serve every caller"
        )


def _jwks_url_problem(url: str) -> str | None:
    allowed = "allowed: a file, https://host/path, or http://127.0.0.1:port/path"
    try:
        parts = urlsplit(url)
        fits = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return f"--jwt-jwks is not a URL; {allowed}"
    if not fits or parts.scheme not in ("https", "http"):
        return f"--jwt-jwks is not a URL; {allowed}"
    if parts.username or parts.password:
        return f"--jwt-jwks has a user or password; {allowed}"
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        return f"--jwt-jwks is an http URL: its keys could be replaced on the way; {allowed}"
    return None
