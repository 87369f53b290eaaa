"""Which version of the contract this is. What the versions brought stands in GetModelResponse (worker.proto)."""

PROTOCOL_VERSION = 2
# The oldest protocol of a router that can use a worker of this version. One with a grant key asks for proofs.
MIN_ROUTER_PROTOCOL, MIN_ROUTER_PROTOCOL_WITH_KEY = 0, 2
