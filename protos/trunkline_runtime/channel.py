"""How Trunkline's processes connect to one another."""

import grpc

from trunkline.channel import KEEPALIVE_OPTIONS, MESSAGE_OPTIONS


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel of its own TCP connection, noticing a dead peer (KEEPALIVE_OPTIONS)."""
    return grpc.aio.insecure_channel(
        address,
        options=(
            *MESSAGE_OPTIONS,
            *KEEPALIVE_OPTIONS,
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.enable_retries", 0),
        ),
    )
