"""One router's life: it is built, serves until a signal, and stops."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from trunkline_router.access.access import Access
from trunkline_router.access.identity.authenticator import Authenticator
from trunkline_router.assembly import Router, SharedPort, build
from trunkline_router.settings import RouterSettings
from trunkline_router.workers.pool import Pools
from trunkline_runtime.garbage import keep_collecting, spare_what_stays
from trunkline_runtime.log import get_logger
from trunkline_runtime.server import Signals
from trunkline_runtime.telemetry.otlp_metrics import metrics_export
from trunkline_runtime.tracing import Tracing

FLUSH_S = 0.5  # time for the last responses to reach their clients once every request has ended
# How long the event loop waits for the interpreter in each of its turns while a thread works, such as one that reads a
# tokenizer: a fifth of Python's own time.
SWITCH_S = 0.001


async def serve(
    settings: RouterSettings,
    access: Access,
    authenticator: Authenticator,
    tracing: Tracing,
    shared_port: SharedPort | None = None,
) -> None:
    """Builds a router, serves until a signal, then stops it. Raises PortInUse, IdentityError."""
    log = get_logger()
    signals = Signals()
    router = build(settings, access, tracing, shared_port)
    export = metrics_export("trunkline-router", settings.name, router.collect)
    tasks: list[asyncio.Task[Any]] = []
    try:
        await authenticator.start()
        await router.shared.start()
        tasks.append(asyncio.create_task(authenticator.run()))
        tasks += [asyncio.create_task(run()) for run in router.background]
        if export is not None:
            tasks.append(asyncio.create_task(export.run()))
        if router.metrics is not None:
            await router.metrics.start()
        stopped = asyncio.create_task(signals.stop.wait())
        if shared_port is not None and shared_port.once_useful:
            useful = asyncio.create_task(has_a_worker(router.pools))
            await asyncio.wait({stopped, useful, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            useful.cancel()
        if not signals.stop.is_set():
            await listen(router, shared_port)
        readiness = asyncio.create_task(follow_readiness(router))
        tasks += [readiness, asyncio.create_task(keep_collecting())]
        done, _ = await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # the tasks run until they are cancelled: one that has ended has a bug, which is raised here
        log.info("router stopping")
        readiness.cancel()  # from now on the router is not ready, whatever its workers do
        await drain(router, signals)
    finally:
        await close(router, tasks)
        if export is not None:
            await export.close()
    log.info("router stopped")


async def has_a_worker(pools: Pools) -> None:
    """Returns once a worker accepts requests."""
    while True:
        changed = pools.change()
        if pools.models():
            return
        await changed.wait()


async def listen(router: Router, shared_port: SharedPort | None) -> None:
    """Opens the port. Raises PortInUse."""
    await router.server.start()
    if router.http is not None:
        await router.http.start()
    spare_what_stays()
    sys.setswitchinterval(SWITCH_S)
    ports = {
        "http_port": None if router.http is None else router.http.port,
        "metrics_port": None if router.metrics is None else router.metrics.port,
    }
    workers = list(router.settings.workers)
    get_logger().info("router listening", port=router.server.port, **ports, workers=workers)
    if shared_port is not None:
        shared_port.on_listening()


async def follow_readiness(router: Router) -> None:
    """Reports the router ready while at least one worker accepts requests; runs until it is cancelled."""
    while True:
        changed = router.pools.change()
        await router.server.set_ready(bool(router.pools.models()))
        await changed.wait()


async def drain(router: Router, signals: Signals) -> None:
    """Refuses new requests and lets running ones finish, for at most the stop timeout or until a second signal."""
    await router.server.set_ready(False)
    idle = asyncio.create_task(router.service.stop_admission())
    at_once = asyncio.create_task(signals.stop_now.wait())
    await asyncio.wait({idle, at_once}, timeout=router.settings.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    grace_s = FLUSH_S if idle.done() else 0
    await asyncio.gather(router.server.stop(grace_s), *([] if router.http is None else [router.http.stop(grace_s)]))


async def close(router: Router, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Ends the tasks and every part."""
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    for http in (router.http, router.metrics):
        if http is not None:
            await http.stop(0)
    await router.server.stop(0)
    await router.shared.close()
    await router.helpers.close()
