"""gRPC channels between Trunkline's processes."""

import json
from collections.abc import Mapping

import grpc

from trunkline.channel import KEEPALIVE_OPTIONS, MESSAGE_OPTIONS
from trunkline.tls import ClientTls
from trunkline.tls import open_channel as tls_channel


def open_channel(
    address: str, *, service: str = "", most_bytes: Mapping[str, int] | None = None, tls: ClientTls | None = None
) -> grpc.aio.Channel:
    """A channel with its own TCP connection, which detects a dead peer (KEEPALIVE_OPTIONS). Raises TlsFileError.

    most_bytes: size limit of one response, by method of `service`; a larger response ends its call with
    RESOURCE_EXHAUSTED, unread. The limit of all other methods is the one in MESSAGE_OPTIONS.
    tls: None: plaintext
    """
    methods = [
        {"name": [{"service": service, "method": method}], "maxResponseMessageBytes": most}
        for method, most in (most_bytes or {}).items()
    ]
    return tls_channel(
        address,
        (
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
        tls,
    )
