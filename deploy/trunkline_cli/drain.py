"""`trunkline drain`: a worker admits nothing more and finishes what runs; for a person, or a pod's preStop hook."""

import argparse
import sys

import grpc

from trunkline.v1.worker_pb2 import DrainRequest
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="127.0.0.1:50061", help="worker, host:port (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, help="time for running requests; default: the worker's own setting")


def run(arguments: argparse.Namespace) -> int:
    request = DrainRequest()
    if arguments.timeout_s is not None:
        request.timeout.FromNanoseconds(int(arguments.timeout_s * 1e9))
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            drained = WorkerServiceStub(channel).Drain(request)
        except grpc.RpcError as error:
            print(f"trunkline drain: {arguments.address}: {error.details()}", file=sys.stderr)
            return 1
    print(f"finished {drained.finished}, cut off {drained.aborted}")
    return 0
