"""The files of the live page: HTML, CSS and scripts without data, the same for everyone."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from trunkline.status import CODE_NOT_FOUND, RequestRefused
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.record.error_statuses import PAGE_FILE_NOT_FOUND, Header

FOLDER = Path(__file__).parents[2] / "page"
INDEX = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".woff2": b"font/woff2",
}
NAME = re.compile(r"[a-z0-9_-]+\.[a-z0-9]+")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text cannot become markup or script, whatever a script of the page does with it.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
# An installation that is updated must not go on with old scripts: browsers ask each time, and are told "not modified".
SECURITY: tuple[Header, ...] = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    body: bytes
    type: bytes
    etag: bytes


def read_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Returns the files that are served, by name; none if the folder does not exist."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: _read(path) for path in found if NAME.fullmatch(path.name) and path.suffix in TYPES}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, TYPES[path.suffix], b'"%b"' % sha256(body).hexdigest()[:32].encode())


class PageFiles:
    """Serves the files, which are read once."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = read_files(folder)

    async def send(self, call: HttpCall) -> None:
        """GET / and GET /page/{file}"""
        name = call.scope.get("path_params", {}).get("file", INDEX)
        file = self._files.get(name)
        if file is None:
            raise RequestRefused(CODE_NOT_FOUND, PAGE_FILE_NOT_FOUND, f"the live page has no file {name[:128]!r}")
        is_known = file.etag in _etags(call.scope["headers"])
        await call.respond(
            b"" if is_known else file.body,
            status=304 if is_known else 200,
            headers=[(b"etag", file.etag), *SECURITY],
            content_type=file.type,
        )


def _etags(headers: Iterable[Header]) -> set[bytes]:
    """The entity tags of If-None-Match, without the mark of weak ones."""
    given = b",".join(value for name, value in headers if name == b"if-none-match")
    return {tag.strip().removeprefix(b"W/") for tag in given.split(b",")}
