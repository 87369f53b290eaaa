"""Processes of several machines have several names."""

import socket

import pytest

from trunkline_runtime.settings import instance_name


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "router-1.example.org", "10.0.0.1"])
def test_a_process_is_named_by_where_it_listens(host: str) -> None:
    assert instance_name(host, 50051) == f"{host}:50051"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_a_process_that_listens_on_all_addresses_is_named_by_its_machine(host: str) -> None:
    assert instance_name(host, 50051) == f"{socket.gethostname()}:50051"
