"""The worker: a gRPC front and an engine process."""

import os

# gRPC writes a line for every handshake that fails, so any host could fill the log. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
