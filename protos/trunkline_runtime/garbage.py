"""Schedules Python's garbage collector.

A full collection visits every long-lived object and blocks the process: for a router with 600 open requests it visits
90,000 objects, in 40 to 80 ms. With Python's own thresholds, one runs with every burst of requests and every six
seconds after it. It finds almost nothing, because the objects of a request are freed without the collector
(tests/router/dispatch/test_request_garbage.py). Here a full collection runs about once a minute.
"""

import asyncio
import gc

# Net new objects between collections of the young generation, collections of it between those of the middle one, and
# collections of that between full ones: about one full collection a minute with 600 open requests. A request in
# progress has about 95 objects. With Python's 700, eight that begin together caused a collection that found nothing,
# and each object was visited several times: a tenth of a short request's time. 5,000 objects take 2 ms.
YOUNG, MIDDLE_AGED, ALL = 5_000, 10, 28
EVERY_S = 60.0


def spare_what_stays() -> None:
    """Call this when a process is ready to serve. All objects that exist by then are exempt from later collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE_AGED, ALL)


async def keep_collecting() -> None:
    """Runs a full collection every minute, even if there are few new objects. Never returns."""
    while True:
        await asyncio.sleep(EVERY_S)
        gc.collect()
