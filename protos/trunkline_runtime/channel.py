"""How Trunkline's processes connect to one another."""

import json
from collections.abc import Mapping

import grpc

from trunkline.channel import KEEPALIVE_OPTIONS, MESSAGE_OPTIONS


def open_channel(address: str, *, service: str = "", most_bytes: Mapping[str, int] | None = None) -> grpc.aio.Channel:
    """A channel of its own TCP connection, noticing a dead peer (KEEPALIVE_OPTIONS).

    most_bytes: of one response, by method of `service`; a larger one ends its call with RESOURCE_EXHAUSTED unread.
    Other methods take what MESSAGE_OPTIONS allow.
    """
    methods = [
        {"name": [{"service": service, "method": method}], "maxResponseMessageBytes": most}
        for method, most in (most_bytes or {}).items()
    ]
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
            ("grpc.service_config", json.dumps({"methodConfig": methods})),
            ("grpc.service_config_disable_resolution", 1),
        ),
    )
