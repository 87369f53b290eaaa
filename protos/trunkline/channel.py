"""Options of the gRPC channels of clients, routers and workers."""

# Only a long prompt with log-probabilities needs a large message: tokenizers and snapshots are sent in pieces.
MAX_MESSAGE_BYTES = 64 << 20
MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

# The connecting side pings at this interval, even without calls; a server that does not allow it answers with GOAWAY. A
# dead peer or a broken network link is detected within the sum of these.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 10_000, 5_000
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
)
