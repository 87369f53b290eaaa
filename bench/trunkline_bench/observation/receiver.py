"""An OTLP receiver that drops what it gets, as a process.

usage: python -m trunkline_bench.observation.receiver     (prints its port)
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """Runs a receiver; yields its URL."""
    process = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.communicate()


def main() -> None:
    export: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(lambda message, context: b"")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.wait_for_termination()


if __name__ == "__main__":
    main()
