"""The protocol version, and constants that routers and workers must agree on.

GetModelResponse.protocol_version (worker.proto) describes the versions.
"""

PROTOCOL_VERSION = 5
ENDS_TOLD_SINCE = 4  # the first version in which a worker answers an abort with the choice's timeline
# The oldest router protocol that can use a worker of this version. A worker with a grant key demands proofs.
MIN_ROUTER_PROTOCOL, MIN_ROUTER_PROTOCOL_WITH_KEY = 0, 2

# A suspect that completes this many steps is harmless: the router (suspicion.py) releases it from its cell, and a
# worker whose engine dies no longer counts it among the possible causes (front.py). If workers required more steps than
# the router, a released suspect would keep the next suspect on that worker from being convicted.
CLEARING_STEPS = 4
