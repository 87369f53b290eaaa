"""Who sends a call, as far as a router can tell."""

from typing import NamedTuple


class Sender(NamedTuple):
    """From what is hard to invent to what is easy: a host is an address, a tenant's name is taken at its word."""

    host: str  # "ipv4:10.0.0.1"
    connection: str  # "ipv4:10.0.0.1:50312"
    tenant: str = ""  # "": it names none

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """What a sender's share counts for: its host, its connection, and its tenant on that connection."""
        return self[:1], self[:2], tuple(self)

    @property
    def account(self) -> str:
        """Names the tenant of a host, whatever connections it uses: what they send together takes time of one event
        loop."""
        return f"{self.host} {self.tenant}"


def sender_of(peer: str, tenant: str = "") -> Sender:
    """peer: as gRPC names it"""
    return Sender(peer.rpartition(":")[0], peer, tenant)
