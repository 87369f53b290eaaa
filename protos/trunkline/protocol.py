"""What routers and workers must agree on beside the messages.

What the versions of the protocol brought stands in GetModelResponse (worker.proto).
"""

PROTOCOL_VERSION = 2
# The oldest protocol of a router that can use a worker of this version. One with a grant key asks for proofs.
MIN_ROUTER_PROTOCOL, MIN_ROUTER_PROTOCOL_WITH_KEY = 0, 2

# So many steps show that a suspect is harmless: the router (suspicion.py) then lets it out of its cell, and a worker
# whose engine dies counts it no more among those who may have been the reason (front.py). Were a worker to want more,
# a suspect that the router has let out would still shield the next one there from its conviction.
CLEARING_STEPS = 4
