"""`trunkline keys`: creates, lists and revokes API keys, in a file or in Redis.

A new key is printed once, alone on standard output. All other messages go to standard error.
"""

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trunkline.validation import LANES
from trunkline_router.identity.fleet_secret import FleetSecret, read_fleet_secret
from trunkline_router.identity.identity import IdentityError, Role
from trunkline_router.identity.identity_fields import FieldError
from trunkline_router.identity.key_file import changing, present
from trunkline_router.identity.key_record import ApiKey, KeyRecord, is_key_id, new_record, read_record, written_time
from trunkline_router.quotas.quota import QUOTA_NAMES
from trunkline_router.stores.store import StoreDown

PROG = "trunkline keys"
EXIT_FAILED, EXIT_USAGE = 1, 2
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_S = 36500 * 86400
CONNECT_TIMEOUT_S = 5.0
INSTALL = "pip install 'trunkline[router]'"
REDIS_URL, SECRET = "TRUNKLINE_REDIS_URL", "TRUNKLINE_FLEET_SECRET"

Fields = dict[str, Any]


class FileStore:
    """Records in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, fields: Fields) -> None:
        with changing(self._path) as entries:
            if fields["id"] in entries:
                raise IdentityError("the new key's id is taken: try again")
            entries[fields["id"]] = _without_id(fields)

    def records(self) -> list[KeyRecord]:
        return [read_record({**fields, "id": key_id}) for key_id, fields in present(self._path).items()]

    def revoke(self, key_id: str, now: str) -> None:
        if not self._path.exists():
            raise IdentityError(f"{self._path}: No such file or directory")
        with changing(self._path) as entries:
            if key_id not in entries:
                raise IdentityError(f"{self._path} has no key {key_id}")
            entries[key_id].setdefault("revoked", now)


class RedisRecords:
    """Records in Redis."""

    def __init__(self, url: str, prefix: str, secret: FleetSecret) -> None:
        try:
            from trunkline_router.identity import redis_keys
            from trunkline_router.stores.redis_connection import redis_url_problem
            from trunkline_runtime.log import configure_logging
        except ImportError as error:
            raise IdentityError(f"keys in Redis need the router's packages ({error.name}): {INSTALL}") from None
        if problem := redis_url_problem(url):
            raise IdentityError(problem)
        configure_logging("keys")  # about records that are not this fleet's: to standard error
        self._connect: Callable[[], Any] = partial(
            redis_keys.RedisKeys, url, prefix, secret.seal(redis_keys.SEAL_PURPOSE), connect_timeout_s=CONNECT_TIMEOUT_S
        )

    def create(self, fields: Fields) -> None:
        self._with_keys(lambda keys: fields)

    def records(self) -> list[KeyRecord]:
        return self._with_keys(lambda keys: None)

    def revoke(self, key_id: str, now: str) -> None:
        def revoked(keys: Any) -> Fields:
            if key_id not in keys.records:
                raise IdentityError(f"Redis has no key {key_id} of this fleet")
            return {"revoked": now, **keys.fields_of(key_id)}

        self._with_keys(revoked)

    def _with_keys(self, change: Callable[[Any], Fields | None]) -> list[KeyRecord]:
        """Reads the records, and writes the one that `change` returns. Returns those that were read."""

        async def run() -> list[KeyRecord]:
            keys = self._connect()
            try:
                await keys.update()
                fields = change(keys)
                if fields is not None:
                    await keys.put(fields)
                return list(keys.records.values())
            finally:
                await keys.close()

        try:
            return asyncio.run(run())
        except StoreDown as error:
            raise IdentityError(f"Redis: {error}") from None


def main() -> None:
    arguments = _parser().parse_args()
    try:
        sys.exit(_run(arguments))
    except (IdentityError, FieldError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _run(arguments: argparse.Namespace) -> int:
    store, now_unix_s = _store(arguments), time.time()
    if arguments.command == "create":
        key = ApiKey.new()
        expires_unix_s = None if arguments.expires_in is None else now_unix_s + arguments.expires_in
        store.create(new_record(key, _terms(arguments), now_unix_s, expires_unix_s))
        print(key.credential, flush=True)
        until = "without an end" if expires_unix_s is None else f"until {written_time(expires_unix_s)}"
        _say(f"created {key.key_id} for tenant {arguments.tenant}, {until}; the key is shown only this once")
    elif arguments.command == "list":
        for line in _table(store.records(), now_unix_s):
            print(line)
    else:
        if not is_key_id(arguments.id):  # the message does not repeat it: it may be a whole key
            raise IdentityError("the argument is not the id of a key: the 12 characters after tl-")
        store.revoke(arguments.id, written_time(now_unix_s))
        _say(f"revoked {arguments.id}; every router refuses it within 5 s")
    return 0


def _store(arguments: argparse.Namespace) -> FileStore | RedisRecords:
    if arguments.file is not None:
        return FileStore(Path(arguments.file))
    url = arguments.redis_url or os.environ.get(REDIS_URL, "")
    if not url:
        raise IdentityError(f"--redis-url has no URL, and {REDIS_URL} is not set")
    path = arguments.fleet_secret_file
    secret = read_fleet_secret("" if path else os.environ.get(SECRET, ""), path)
    if not secret:
        raise IdentityError(f"keys in Redis need the fleet's secret: set {SECRET} or --fleet-secret-file")
    return RedisRecords(url, arguments.key_prefix, secret)


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


def _table(records: Sequence[KeyRecord], now_unix_s: float) -> list[str]:
    """One line for each key, oldest first, without secrets and hashes."""
    rows = [("ID", "TENANT", "ROLES", "STATE", "CREATED", "EXPIRES", "NOTE")]
    for record in sorted(records, key=lambda record: (record.created_unix_s, record.key_id)):
        expires_unix_s = record.expires_unix_s
        rows.append((
            record.key_id,
            record.identity.tenant,
            ",".join(sorted(record.identity.roles)),
            _state(record, now_unix_s),
            written_time(record.created_unix_s),
            "never" if expires_unix_s is None else written_time(expires_unix_s),
            record.note,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _state(record: KeyRecord, now_unix_s: float) -> str:
    if record.revoked_unix_s is not None:
        return "revoked"
    return "expired" if record.expires_unix_s is not None and now_unix_s >= record.expires_unix_s else "active"


class _Parser(argparse.ArgumentParser):
    """Reports an invalid argument in one line."""

    def error(self, message: str) -> Any:
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description="Manages API keys.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="create a key and print it once", allow_abbrev=False)
    create.add_argument("--tenant", required=True, help="the tenant of requests with this key")
    create.add_argument(
        "--role", action="append", choices=tuple(Role), help="may be given several times (default: user)"
    )
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
            "--" + quota.replace("_", "-"), type=_limit, metavar="NUMBER", help="(default: as the tenant's terms say)"
        )
    create.add_argument("--may-salt", action="store_true", help="requests may set cache_salt")
    create.add_argument("--hide-cache", action="store_true", help="answers do not tell cached tokens and the worker")
    create.add_argument("--expires-in", type=_duration_s, metavar="TIME", help="such as 12h or 90d (default: never)")
    create.add_argument("--note", help="what the key is for; not a secret")
    listing = commands.add_parser("list", help="list keys, without secrets", allow_abbrev=False)
    revoke = commands.add_parser("revoke", help="revoke a key", allow_abbrev=False)
    revoke.add_argument("id", metavar="ID", help="the 12 characters after tl-")
    for command in (create, listing, revoke):
        place = command.add_mutually_exclusive_group(required=True)
        place.add_argument("--file", metavar="FILE", help="the router's --api-keys")
        place.add_argument(
            "--redis-url", nargs="?", const="", metavar="URL",
            help=f"the router's; without URL: {REDIS_URL}, because other users of the host can see arguments",
        )  # fmt: skip
        command.add_argument(
            "--key-prefix", default=os.environ.get("TRUNKLINE_KEY_PREFIX", "trunkline:"), help="the router's"
        )
        command.add_argument(
            "--fleet-secret-file", metavar="FILE",
            default=os.environ.get("TRUNKLINE_FLEET_SECRET_FILE", ""),
            help=f"file with the router's --fleet-secret, for keys in Redis (default: {SECRET})",
        )  # fmt: skip
    return parser


def _limit(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,13}", text, re.ASCII):
        raise argparse.ArgumentTypeError("must be a whole number")
    return int(text)


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,10})([smhd])", text, re.ASCII)
    seconds = int(found[1]) * UNIT_S[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError("must be a number and s, m, h or d, such as 90d; at most 36500d")
    return float(seconds)


def _without_id(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name != "id"}


def _say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
