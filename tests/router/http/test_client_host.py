"""Which clients are counted as one host."""

import asyncio

import pytest

from tests.router.http.http_rig import serving
from trunkline_router.address import network_of
from trunkline_router.edge.http.connection import Connection


class Closed(asyncio.Transport):
    """The transport of a client that has gone, with its address: tests may lack one of their own in that network."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})

    def is_closing(self) -> bool:
        return True

    def abort(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8:0:0:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("::ffff:10.0.0.1", "::1", False),
    ],
)
def test_addresses_of_one_ipv6_network_are_one_host(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) == same


async def test_connections_count_by_network() -> None:
    async with serving() as server:
        connection = Connection(server._shared)
        connection.connection_made(Closed("2001:db8::1"))
        assert connection._place is not None
        assert connection._place.sender.host == network_of("2001:db8::")
        connection.connection_lost(None)
