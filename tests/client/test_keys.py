"""The key: on every call, over TLS or loopback only, current, and never shown."""

import asyncio
import io
import logging
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.certificates import Certificates, make_certificates
from tests.client.guarded_front import guarded_front
from tests.client.scripted_service import Kind, ScriptedService, complete, model_names, serving
from trunkline import Client, ClientTls, SyncClient
from trunkline.errors import DeadlineExceeded, NoWorker, Unauthenticated
from trunkline.status import RequestRefused

both = pytest.mark.parametrize("kind", list(Kind))
CANARY = "tl-canary-5f0c1d"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@both
async def test_every_call_carries_the_key(kind: Kind) -> None:
    service = ScriptedService(refusals=[RequestRefused(8, "OVERLOADED", "full", retry_delay_ms=5)])
    async with serving(service):
        await complete(kind, service.address, api_key=CANARY, tenant="acme")
        await model_names(kind, service.address, api_key=CANARY)
        await model_names(kind, service.address)
    sent = [asked.metadata.get("authorization") for asked in service.asked]
    assert sent == [f"Bearer {CANARY}"] * 3 + [None]
    assert service.asked[0].metadata["x-trunkline-tenant"] == "acme"


@both
async def test_a_function_is_asked_for_the_key_before_every_try(kind: Kind) -> None:
    service = ScriptedService(refusals=[RequestRefused(8, "OVERLOADED", "full", retry_delay_ms=5)])
    tokens = iter(["one", "two", "three"])
    async with serving(service):
        await complete(kind, service.address, api_key=lambda: next(tokens))
    assert [asked.metadata["authorization"] for asked in service.asked] == ["Bearer one", "Bearer two"]


async def test_the_function_may_be_asynchronous_in_the_asynchronous_client() -> None:
    async def token() -> str:
        await asyncio.sleep(0)
        return CANARY

    service = ScriptedService()
    async with serving(service):
        await complete(Kind.ASYNC, service.address, api_key=token)
        assert service.asked[0].metadata["authorization"] == f"Bearer {CANARY}"
        with pytest.raises(ValueError, match="asynchronous function"):
            await complete(Kind.SYNC, service.address, api_key=token)
    assert len(service.asked) == 1


async def test_a_function_that_hangs_is_bounded_by_the_deadline() -> None:
    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    async with Client(api_key=hangs) as client:
        with pytest.raises(DeadlineExceeded, match="before the request was sent"):
            await client.complete("x", timeout_s=0.05)


@both
async def test_the_functions_errors_arrive_unchanged(kind: Kind) -> None:
    def broken() -> str:
        raise TimeoutError("the identity provider is slow")

    with pytest.raises(TimeoutError, match="identity provider"):
        await complete(kind, "127.0.0.1:1", api_key=broken)


@pytest.mark.parametrize("make", [Client, SyncClient])
async def test_a_key_leaves_this_machine_only_with_tls_or_by_permission(
    make: Callable[..., Any], certificates: Certificates
) -> None:
    tls = ClientTls(ca_file=str(certificates.ca_file))
    for key in (CANARY, lambda: CANARY):
        with pytest.raises(ValueError, match=r"sent to router\.example:50051 in plaintext") as caught:
            make("router.example:50051", api_key=key)
        assert CANARY not in str(caught.value)
        made = [
            make("router.example:50051", api_key=key, tls=tls),
            make("router.example:50051", api_key=key, allow_insecure_key=True),
            make("localhost:50051", api_key=key),
        ]
        for client in [*made, make("router.example:50051")]:
            closing = client.close()
            if isinstance(closing, Awaitable):
                await closing


@pytest.mark.parametrize("key", ["", f"{CANARY} x", f"{CANARY}\n", f"{CANARY}é", CANARY * 1000, CANARY.encode()])
async def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(key: Any) -> None:
    with pytest.raises(ValueError, match=r"^api_key must be ") as caught:
        Client(api_key=key)
    assert CANARY not in str(caught.value)
    with pytest.raises(ValueError, match=r"^api_key must be ") as caught:
        SyncClient(api_key=key)
    assert CANARY not in str(caught.value)
    async with Client(api_key=lambda: key if isinstance(key, str) else f"{CANARY} x") as client:
        with pytest.raises(ValueError, match=r"^api_key must be ") as caught:
            await client.complete("x")
    assert CANARY not in str(caught.value)


def locals_of_packages(error: BaseException) -> list[dict[str, str] | None]:
    """The local variables that a reporter of errors shows, of the frames that are not this test's."""
    frames = traceback.TracebackException.from_exception(error, capture_locals=True).stack
    return [frame.locals for frame in frames if "/tests/" not in frame.filename and "/asyncio/" not in frame.filename]


@both
async def test_the_key_is_in_no_text_that_may_be_logged(
    kind: Kind, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    service = ScriptedService(refusals=[RequestRefused(16, "UNAUTHENTICATED", "the key is not valid")] * 2)
    shown = io.StringIO()
    async with serving(service):
        for call in (complete, model_names):
            with pytest.raises(Unauthenticated) as caught:
                await call(kind, service.address, api_key=CANARY)
            print(repr(caught.value), vars(caught.value), file=shown)
            print(*traceback.format_exception(caught.value), file=shown)
            print(locals_of_packages(caught.value), file=shown)
    with pytest.raises(NoWorker) as missing:
        await complete(kind, "127.0.0.1:1", api_key=CANARY, retries=0)
    print(repr(missing.value), *traceback.format_exception(missing.value), file=shown)
    client, blocking = Client(api_key=CANARY), SyncClient(api_key=CANARY)
    print(repr(client), repr(blocking), repr(vars(client)), repr(vars(blocking)), file=shown)
    await client.close()
    blocking.close()
    printed = capfd.readouterr()
    assert "UNAUTHENTICATED" in shown.getvalue()
    assert "'authorization', <hidden>" in shown.getvalue()
    assert CANARY not in shown.getvalue() + caplog.text + printed.out + printed.err


@both
@pytest.mark.parametrize("server_name", ["", "localhost"])
async def test_with_tls_the_key_reaches_the_server_and_a_wrong_one_is_refused(
    kind: Kind, server_name: str, certificates: Certificates
) -> None:
    tls = ClientTls(ca_file=str(certificates.ca_file), server_name=server_name)
    service = ScriptedService()
    async with serving(service), guarded_front(service.address, certificates, lambda key: key == CANARY) as port:
        address = f"127.0.0.1:{port}"
        assert (await complete(kind, address, api_key=CANARY, tls=tls)).text == "ab"
        assert await model_names(kind, address, api_key=CANARY, tls=tls) == ["m"]
        with pytest.raises(Unauthenticated, match="the key is not valid"):
            await complete(kind, address, api_key="other", tls=tls)
        with pytest.raises(Unauthenticated):
            await model_names(kind, address, tls=tls)


@both
async def test_a_server_with_another_name_or_authority_gets_no_call(
    kind: Kind, certificates: Certificates, tmp_path: Path
) -> None:
    keys: list[str] = []

    def accepts(key: str) -> bool:
        keys.append(key)
        return True

    other = ClientTls(ca_file=str(make_certificates(tmp_path).ca_file))
    renamed = ClientTls(ca_file=str(certificates.ca_file), server_name="router.example")
    service = ScriptedService()
    async with serving(service), guarded_front(service.address, certificates, accepts) as port:
        for tls in (other, renamed, None):
            with pytest.raises(NoWorker):
                await complete(kind, f"127.0.0.1:{port}", api_key=CANARY, tls=tls, retries=0)
    assert keys == []


@both
async def test_ready_sends_the_key_and_a_wrong_one_ends_the_wait(kind: Kind, certificates: Certificates) -> None:
    tls = ClientTls(ca_file=str(certificates.ca_file))

    async def ready(address: str, key: str) -> None:
        if kind is Kind.ASYNC:
            async with Client(address, api_key=key, tls=tls, connections=2) as client:
                await client.ready(20)
        else:
            with SyncClient(address, api_key=key, tls=tls, connections=2) as blocking:
                await asyncio.to_thread(blocking.ready, 20)

    service = ScriptedService()
    async with serving(service), guarded_front(service.address, certificates, lambda key: key == CANARY) as port:
        await ready(f"127.0.0.1:{port}", CANARY)
        with pytest.raises(Unauthenticated):
            await ready(f"127.0.0.1:{port}", "other")
