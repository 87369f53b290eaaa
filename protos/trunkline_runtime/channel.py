"""How Trunkline's processes connect to one another."""

import grpc

# Token streams are small, tokenizers and snapshots travel in pieces; a long prompt with logprobs is what needs room.
MAX_MESSAGE_BYTES = 64 << 20
# A client pings this often, calls or none; servers must allow it (see server.py) or they answer with GOAWAY.
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel of its own TCP connection, noticing a dead peer within KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS."""
    return grpc.aio.insecure_channel(
        address,
        options=(
            *MESSAGE_OPTIONS,
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.enable_retries", 0),
        ),
    )
