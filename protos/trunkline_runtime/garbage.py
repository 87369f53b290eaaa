"""When Python's collector looks for garbage cycles.

A full collection looks at every object that has lived for a while, and nothing else happens meanwhile: with 600
requests open these are 90,000 objects of a router, and 40 to 80 ms. By Python's own thresholds one comes with every
burst of requests and every few seconds after it. Cycles are few: what a request leaves is mostly freed without the
collector.
"""

import gc

# Net new objects until the young ones are looked at, how often until the middle-aged are, and how often until all are.
# All of them are due after some 200,000 net new objects: 600 requests open at once are half of that.
YOUNG, MIDDLE_AGED, ALL = 700, 10, 30


def spare_what_stays() -> None:
    """To be called when a process is ready to serve. What there is by then is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE_AGED, ALL)
