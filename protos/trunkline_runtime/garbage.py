"""When Python's collector looks for garbage cycles.

A full collection looks at every object that has lived for a while, and nothing else happens meanwhile: with 600
requests open these are 90,000 objects of a router, and 40 to 80 ms. By Python's own thresholds one comes with every
burst of requests and every six seconds after it. It finds next to nothing: what a request leaves is freed without the
collector (tests/router/dispatch/test_request_garbage.py). What is not is found after a minute.
"""

import asyncio
import gc

# Net new objects until the young ones are looked at, how often until the middle-aged are, and how often until all are:
# about once a minute where 600 requests are open at any time.
YOUNG, MIDDLE_AGED, ALL = 700, 10, 200
EVERY_S = 60.0


def spare_what_stays() -> None:
    """To be called when a process is ready to serve. What there is by then is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE_AGED, ALL)


async def keep_collecting() -> None:
    """Looks at all objects every minute, also where few new ones come. Never returns."""
    while True:
        await asyncio.sleep(EVERY_S)
        gc.collect()
