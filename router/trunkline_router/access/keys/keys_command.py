"""`trunkline keys`: creates, lists and revokes API keys, in a file or in Redis, and seals those in Redis anew.

A new key is printed once, alone on standard output. All other messages go to standard error. A failure is one line, and
the exit status is 2.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trunkline.names import lane_name
from trunkline.validation import LANES
from trunkline_router.access.identity.api_keys import KeyRecord, is_key_id
from trunkline_router.access.identity.fleet_secret import read_fleet_secret
from trunkline_router.access.identity.identity import Identity, IdentityError, Role
from trunkline_router.access.identity.terms import FieldError
from trunkline_router.access.keys.key_file import FileRecords
from trunkline_router.access.keys.new_key import new_key, new_record, written_time
from trunkline_router.quotas.quota import MOST_QUOTA, QUOTA_NAMES
from trunkline_router.quotas.store import StoreDown

PROG = "trunkline keys"
EXIT_FAILED, EXIT_INTERRUPTED = 2, 130
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_S = 36500 * 86400
CONNECT_TIMEOUT_S = 5.0
RESEAL_PAUSE_S = 3.0  # in which every router polls
INSTALL = "pip install 'trunkline[router]'"
REDIS_URL, SECRET = "TRUNKLINE_REDIS_URL", "TRUNKLINE_FLEET_SECRET"
# Flags that are the router's, with values as there. They are for keys in Redis.
ROUTER_FLAGS = ("config", "key_prefix", "fleet_secret_file", "redis_tls_ca", "redis_tls_cert", "redis_tls_key")
# A field of a record → its flag, where that has another name.
FLAGS = {"tenant": "--tenant", "acts_for": "--acts-for", "models": "--model", "note": "--note"}
MOST_PADDED = 40  # characters of a cell in a list: a key may have a thousand models
_PLAIN = re.compile(r"[0-9A-Za-z*._:/@+-]+", re.ASCII)  # others are quoted, so that no name looks like two cells

Fields = dict[str, Any]
T = TypeVar("T")


class RedisRecords:
    """Records in the Redis of routers with these settings.  arguments: flags of the router"""

    def __init__(self, arguments: Sequence[str]) -> None:
        try:
            from trunkline.tls_files import TlsFileError
            from trunkline_router.access.identity.redis_keys import SEAL_PURPOSE
            from trunkline_router.access.keys.redis_key_writer import RedisKeyWriter
            from trunkline_router.settings import RouterSettings, sharing_problem
            from trunkline_runtime.log import configure_logging
            from trunkline_runtime.settings import SettingError, parse_settings
        except ImportError as error:
            raise IdentityError(f"keys in Redis need the router's packages ({error.name}): {INSTALL}") from None
        environment = dict(os.environ)
        if any(argument.startswith("--fleet-secret-file=") for argument in arguments):
            environment.pop(SECRET, None)
        try:
            # The command serves no requests, so it needs no workers.
            settings = parse_settings(RouterSettings, ["--workers=none", *arguments], environment, prog=PROG)
        except SettingError as error:
            raise IdentityError(str(error)) from None
        url, tls = settings.redis_url, settings.redis_tls
        if not url:
            raise IdentityError(f"--redis-url has no URL, and neither {REDIS_URL} nor --config has one")
        allow_plaintext = settings.tls.allow_plaintext
        problem = sharing_problem(url, settings.key_prefix) or tls.problem(url, allow_plaintext=allow_plaintext)
        if problem is not None:
            raise IdentityError(problem)
        try:
            tls.check()
        except TlsFileError as error:
            raise IdentityError(str(error)) from None
        secret = read_fleet_secret(settings.identity.fleet_secret, settings.identity.fleet_secret_file)
        if not secret:
            raise IdentityError(f"keys in Redis need the fleet's secret: set {SECRET} or --fleet-secret-file")
        configure_logging("keys")  # about records that are not this fleet's: to standard error
        seal = secret.seal(SEAL_PURPOSE)
        self._connect: Callable[[], Any] = lambda: RedisKeyWriter(
            url, settings.key_prefix, seal, tls=tls, connect_timeout_s=CONNECT_TIMEOUT_S
        )

    def create(self, fields: Fields) -> None:
        async def created(keys: Any) -> None:
            await keys.update()
            await keys.put(fields)

        self._with_keys(created)

    def listed(self) -> list[tuple[KeyRecord, str]]:
        async def read(keys: Any) -> list[tuple[KeyRecord, str]]:
            await keys.update()
            if number := len(keys.sealed_before):
                verb = "has" if number == 1 else "have"
                _say(f"{number} of them {verb} an earlier secret's seal, and will not count once that is dropped")
            return [(record, _seal_name(keys.seal_of(key_id))) for key_id, record in keys.records.items()]

        return self._with_keys(read)

    def revoke(self, key_id: str, now: str) -> None:
        async def revoked(keys: Any) -> None:
            await keys.update()
            if key_id not in keys.records:
                raise IdentityError(f"Redis has no key {key_id} of this fleet")
            await keys.put({"revoked": now, **keys.fields_of(key_id)})

        self._with_keys(revoked)

    def reseal(self) -> int:
        """Seals all records with the current secret. Returns how many it sealed anew."""

        async def resealed(keys: Any) -> int:
            number: int = await keys.reseal(lambda: asyncio.sleep(RESEAL_PAUSE_S))
            return number

        return self._with_keys(resealed)

    def _with_keys(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """What `work` returns with a view of the keys. Raises IdentityError."""

        async def run() -> T:
            keys = self._connect()
            try:
                return await work(keys)
            finally:
                await keys.close()

        try:
            return asyncio.run(run())
        except StoreDown as error:
            raise IdentityError(f"Redis: {error}") from None


def main() -> None:
    arguments = _parser().parse_args()
    try:
        _run(arguments)
    except FieldError as error:
        sys.exit(_failed(f"{FLAGS.get(error.field, error.field)} {error.problem}"))
    except IdentityError as error:
        sys.exit(_failed(str(error)))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _run(arguments: argparse.Namespace) -> None:
    now_unix_s = time.time()
    if arguments.command == "create":
        _create(arguments, now_unix_s)
    elif arguments.command == "list":
        _print("\n".join(table(_store(arguments).listed(), now_unix_s)), "the list")
    elif arguments.command == "reseal":
        _say(_resealed(RedisRecords(_router_flags(arguments)).reseal()))
    elif not is_key_id(arguments.id):  # the message does not repeat it: it may be a whole key
        raise IdentityError("the argument is not the id of a key: the 12 characters after tl-")
    else:
        _store(arguments).revoke(arguments.id, written_time(now_unix_s))
        _say(f"revoked {arguments.id}; a router refuses it within 5 s after it can read this")


def _resealed(number: int) -> str:
    noun = "key" if number == 1 else "keys"
    return (
        f"sealed {number} {noun} with the current secret, and for {RESEAL_PAUSE_S:g} s no router wrote an earlier seal "
        "back. A router that could not reach Redis in that time was not seen: before you drop an earlier secret, check "
        "that all routers were started with this file and that trunkline keys list shows no earlier seal"
    )


def _seal_name(number: int) -> str:
    return f"earlier {number}" if number else "current"


def _create(arguments: argparse.Namespace, now_unix_s: float) -> None:
    key, store = new_key(), _store(arguments)
    expires_unix_s = None if arguments.expires_in is None else now_unix_s + arguments.expires_in
    store.create(new_record(key, _terms(arguments), now_unix_s, expires_unix_s))
    _print(key.credential, f"the key, so revoke {key.key_id} and create another one")
    until = "without an end" if expires_unix_s is None else f"until {written_time(expires_unix_s)}"
    _say(f"created {key.key_id} for tenant {arguments.tenant}, {until}; the key is shown only this once")


def _store(arguments: argparse.Namespace) -> FileRecords | RedisRecords:
    if arguments.file is None:
        return RedisRecords(_router_flags(arguments))
    given = [name for name in (*ROUTER_FLAGS, "allow_plaintext") if getattr(arguments, name)]
    if given:
        raise IdentityError(f"--{given[0].replace('_', '-')} is for keys in Redis, and --file is given")
    return FileRecords(Path(arguments.file))


def _router_flags(arguments: argparse.Namespace) -> list[str]:
    """The arguments that are flags of the router too."""
    names = [name for name in (*ROUTER_FLAGS, "redis_url") if getattr(arguments, name)]
    flags = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    return [*flags, "--allow-plaintext"] if arguments.allow_plaintext else flags


def table(listed: Iterable[tuple[KeyRecord, str]], now_unix_s: float) -> list[str]:
    """One line for each key, oldest first, without secrets and hashes, below a line of titles.

    listed: records, each with the name of the secret that sealed it; a record in a file has none
    """
    rows = [("ID", "TENANT", "ROLES", "STATE", "SEAL", "CREATED", "EXPIRES", "TERMS", "NOTE")]
    for record, seal in sorted(listed, key=lambda one: (one[0].created_unix_s, one[0].key_id)):
        expires_unix_s = record.expires_unix_s
        rows.append((
            record.key_id,
            _shown(record.identity.tenant),
            ",".join(sorted(record.identity.roles)),
            _state(record, now_unix_s),
            seal or "none",
            written_time(record.created_unix_s),
            "never" if expires_unix_s is None else written_time(expires_unix_s),
            " ".join(f"{name}={_shown(value)}" for name, value in _terms_of(record.identity).items()) or "default",
            record.note and json.dumps(record.note, ensure_ascii=False),
        ))  # fmt: skip
    widths = [min(max(map(len, column)), MOST_PADDED) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _terms_of(identity: Identity) -> dict[str, Any]:
    """The TERMS of an identity as in a record, but the tenant and the roles, and without those that have their
    defaults."""
    limits = {name: getattr(identity.quotas, name, None) for name in QUOTA_NAMES}
    terms = {
        "acts_for": sorted(identity.acts_for) or None,
        "lane": None if identity.lane is None else lane_name(identity.lane),
        "models": None if identity.models is None else sorted(identity.models),
        "quotas": {name: limit for name, limit in limits.items() if limit is not None} or None,
        "may_salt": identity.may_salt or None,
        "sees_cache": None if identity.sees_cache else False,
    }
    return {name: value for name, value in terms.items() if value is not None}


def _shown(value: Any) -> str:
    """A term's value, without a space outside of quotation marks."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{_shown(part)}" for name, part in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_shown, value)) or "[]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value)


def _state(record: KeyRecord, now_unix_s: float) -> str:
    if record.revoked_unix_s is not None:
        return "revoked"
    return "expired" if record.expires_unix_s is not None and now_unix_s >= record.expires_unix_s else "active"


def _terms(arguments: argparse.Namespace) -> dict[str, Any]:
    quotas = {name: getattr(arguments, name) for name in QUOTA_NAMES if getattr(arguments, name) is not None}
    return {
        "tenant": arguments.tenant,
        "roles": arguments.role,
        "acts_for": arguments.acts_for,
        "lane": arguments.lane,
        "models": arguments.model,
        "quotas": quotas or None,
        "may_salt": True if arguments.may_salt else None,
        "sees_cache": False if arguments.hide_cache else None,
        "note": arguments.note,
    }


class _Parser(argparse.ArgumentParser):
    """Reports an invalid argument in one line."""

    def error(self, message: str) -> Any:
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description="Manages API keys.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="create a key and print it once", allow_abbrev=False)
    _add_terms(create)
    listing = commands.add_parser("list", help="list keys, without secrets", allow_abbrev=False)
    revoke = commands.add_parser("revoke", help="revoke a key", allow_abbrev=False)
    revoke.add_argument("id", metavar="ID", help="the 12 characters after tl-")
    reseal = commands.add_parser(
        "reseal",
        help="seal the keys in Redis with the current secret of the fleet; not after a leak: it seals forged ones too",
        allow_abbrev=False,
    )
    for command in (create, listing, revoke, reseal):
        place: Any = command  # of which one is required
        if command is not reseal:
            place = command.add_mutually_exclusive_group(required=True)
            place.add_argument("--file", metavar="FILE", type=_path, help="the router's --api-keys")
        place.add_argument(
            "--redis-url", nargs="?", const="", metavar="URL",
            help=f"the router's; without URL: {REDIS_URL} or that of --config, because other users of the host can "
            "see arguments",
        )  # fmt: skip
        _add_redis(command)
    return parser


def _add_terms(create: argparse.ArgumentParser) -> None:
    create.add_argument("--tenant", required=True, help="the tenant of requests with this key")
    create.add_argument(
        "--role", action="append", choices=tuple(Role),
        help="user: inference; operator: FleetService; scraper: metrics; may be given several times (default: user)",
    )  # fmt: skip
    create.add_argument(
        "--acts-for", action="append", metavar="TENANT",
        help="another tenant that a request may name; * stands for any; may be given several times",
    )  # fmt: skip
    create.add_argument("--lane", choices=tuple(LANES), help="the highest lane (default: as the tenant's terms say)")
    create.add_argument(
        "--model", action="append", help="a model that it may use; may be given several times (default: all)"
    )
    for quota in QUOTA_NAMES:
        create.add_argument(
            "--" + quota.replace("_", "-"), type=_limit, metavar="NUMBER",
            help="a limit of the key's own, below that of the tenant (default: as the tenant's terms say)",
        )  # fmt: skip
    create.add_argument("--may-salt", action="store_true", help="requests may set cache_salt")
    create.add_argument("--hide-cache", action="store_true", help="answers do not tell cached tokens and the worker")
    create.add_argument("--expires-in", type=_duration_s, metavar="TIME", help="such as 12h or 90d (default: never)")
    create.add_argument("--note", help="what the key is for; not a secret")


def _add_redis(command: argparse.ArgumentParser) -> None:
    """Flags of the router, whose values it has too."""
    options = command.add_argument_group("for keys in Redis: settings of the router, also as TRUNKLINE_NAME")
    options.add_argument("--config", metavar="FILE", help="the router's file of settings, which has all the following")
    options.add_argument(
        "--key-prefix", metavar="PREFIX", help="must be the router's, or no router finds the key (default: trunkline:)"
    )
    options.add_argument(
        "--fleet-secret-file", metavar="FILE", help=f"the fleet's secret, current one first (default: {SECRET})"
    )
    for name, what in (("ca", "authorities of Redis's certificate"), ("cert", "certificate"), ("key", "its key")):
        options.add_argument(f"--redis-tls-{name}", metavar="FILE", help=f"{what}, in PEM, for rediss://")
    options.add_argument(
        "--allow-plaintext", action="store_true", help="connect to a Redis on another machine without TLS"
    )


def _limit(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,13}", text, re.ASCII) or not 1 <= int(text) <= MOST_QUOTA:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 to {MOST_QUOTA}")
    return int(text)


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,10})([smhd])", text, re.ASCII)
    seconds = int(found[1]) * UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError("must be a number and s, m, h or d, such as 90d; at most 36500d")
    return float(seconds)


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("must be the path of a file")
    return text


def _print(text: str, what: str) -> None:
    """Raises IdentityError if standard output cannot be written, as by a pipe whose reader has ended."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the end of the process would try again
        raise IdentityError(f"standard output: {error.strerror}: it did not get {what}") from None


def _say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr)


def _failed(text: str) -> int:
    _say(" ".join(text.split()))
    return EXIT_FAILED


if __name__ == "__main__":
    main()
