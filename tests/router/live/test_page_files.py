"""The files of the live page, over real HTTP."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from tests.router.cluster import PATIENCE_S, cluster
from tests.router.fake_worker import FakeWorker
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.live.page_files import PageFiles, read_files

HTML = b"<!doctype html><title>placeholder</title>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, body in {
        "index.html": HTML,
        "main.js": b"export const one = 1;\n",
        "look.css": b"body { margin: 0 }\n",
        "types.d.ts": b"export type One = 1;\n",
        "Secret.js": b"no",
        ".hidden.js": b"no",
        "notes.txt": b"no",
    }.items():
        (tmp_path / name).write_bytes(body)
    return tmp_path


@pytest.fixture
async def http(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with cluster(FakeWorker("a"), edge=Edge, page_folder=folder) as router:
        url = f"http://127.0.0.1:{router.http_port}"
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            yield client


async def test_the_page_is_served_with_a_policy_that_lets_nothing_else_in(http: httpx2.AsyncClient) -> None:
    page = await http.get("/")
    assert (page.status_code, page.content) == (200, HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'"
    assert not {"unsafe", "data:", "*"} & set(" ".join(policy.values()).replace("-", " ").split())
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in page.headers


async def test_each_file_has_its_type_and_all_else_is_not_there(http: httpx2.AsyncClient) -> None:
    for name, kind in (("main.js", "text/javascript"), ("look.css", "text/css"), ("index.html", "text/html")):
        file = await http.get(f"/page/{name}")
        assert (file.status_code, file.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert file.headers["content-security-policy"]
    for name in (
        "types.d.ts",
        "Secret.js",
        ".hidden.js",
        "notes.txt",
        "..%2Findex.html",
        "%2e%2e%2fmain.js",
        "none.js",
    ):
        file = await http.get(f"/page/{name}")
        assert (file.status_code, file.content == b"no") == (404, False), name


async def test_a_browser_that_has_a_file_is_told_so(http: httpx2.AsyncClient) -> None:
    first = await http.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache", "an update must not leave old scripts in use"
    for tag in (first.headers["etag"], f'"x", W/{first.headers["etag"]}'):
        again = await http.get("/page/main.js", headers={"if-none-match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    other = await http.get("/page/look.css", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200
    head = await http.head("/page/main.js")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(first.content)))


def test_a_router_without_the_files_serves_none(tmp_path: Path) -> None:
    assert read_files(tmp_path / "absent") == {}
    assert PageFiles(tmp_path) is not None
