"""The protocol version, and constants that routers and workers must agree on.

GetModelResponse.protocol_version (worker.proto) describes the versions.
"""

PROTOCOL_VERSION = 6
OLDEST_PROTOCOL = 5  # that routers and workers of this version work with: the previous one
MAX_SUBMITS_BYTES = 1 << 20  # of several submits in one message of a session; one submit may be larger

# A suspect that completes this many steps is harmless: the router (suspicion.py) releases it from its cell, and a
# worker whose engine dies no longer counts it among the possible causes (front.py). If workers required more steps than
# the router, a released suspect would keep the next suspect on that worker from being convicted.
CLEARING_STEPS = 4
