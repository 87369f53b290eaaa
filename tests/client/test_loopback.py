"""A key in plaintext goes to this machine only."""

import pytest

from trunkline.loopback import is_local

LOCAL = [
    "127.0.0.1:50051",
    "127.8.9.1:1",
    "localhost:50051",
    "LOCALHOST",
    "[::1]:50051",
    "::1",
    "[::ffff:127.0.0.1]:1",
    "dns:localhost:50051",
    "dns:///127.0.0.1:50051",
    "ipv4:127.0.0.1:1,127.0.0.2:1",
    "ipv6:[::1]:1",
    "unix:/run/router.sock",
    "unix:///run/router.sock",
    "unix-abstract:router",
]
REMOTE = [
    "",
    "router:50051",
    "10.0.0.7:50051",
    "0.0.0.0:50051",
    "localhost.example:50051",
    "127.0.0.1.example:50051",
    "127.1:50051",
    "[::]:1",
    "[::ffff:10.0.0.7]:1",
    "dns:router.example:50051",
    "dns://10.0.0.53/localhost:50051",
    "dns://localhost",
    "ipv4:127.0.0.1:1,10.0.0.7:1",
    "ipv6:[fe80::1]:1",
    "xds:localhost",
    "passthrough:127.0.0.1:50051",
]


@pytest.mark.parametrize("target", LOCAL)
def test_a_loopback_address_or_socket_is_local(target: str) -> None:
    assert is_local(target)


@pytest.mark.parametrize("target", REMOTE)
def test_everything_else_counts_as_remote(target: str) -> None:
    assert not is_local(target)
