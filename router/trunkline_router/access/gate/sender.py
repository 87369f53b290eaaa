"""The sender of a call, as far as a router can tell."""

from typing import NamedTuple

from trunkline_router.address import host_of


class Sender(NamedTuple):
    """Names the sender of a call, from the part that is hardest to forge (an address) to the tenant, which is not
    verified."""

    host: str  # "ipv4:10.0.0.1"
    connection: str  # "ipv4:10.0.0.1:50312"
    tenant: str = ""  # "" if the call names none

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """The levels at which a sender's usage is counted: host, connection, and tenant on that connection."""
        return self[:1], self[:2], tuple(self)

    @property
    def account(self) -> str:
        """Names a tenant on a host across all its connections, which share the time of one event loop."""
        return f"{self.host} {self.tenant}"


def sender_of(peer: str, tenant: str = "") -> Sender:
    """The sender behind a gRPC peer address, such as "ipv4:10.0.0.1:50312"."""
    return Sender(host_of(peer), peer, tenant)
