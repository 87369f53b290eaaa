"""What all channels of clients, routers and workers have in common."""

# Token streams are small, tokenizers and snapshots travel in pieces; a long prompt with logprobs is what needs room.
MAX_MESSAGE_BYTES = 64 << 20
MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

# Who connects pings this often, calls or none; servers must allow it, or they answer with GOAWAY. A peer that is dead,
# or behind a link that is cut, is noticed within the sum of these.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 10_000, 5_000
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
)
