"""The worker: a gRPC front and an engine process."""

import os

# gRPC writes a line for every handshake that fails and, as an error, for every header that it cannot parse. So any host
# could fill the log. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
