"""`trunkline drain`: a worker stops admission and finishes its requests, or with --undo admits requests again; for
operators and a pod's preStop hook."""

import argparse
import os
import sys
import time

import grpc

from trunkline.proof import proof_metadata
from trunkline.tls import open_blocking_channel
from trunkline.tls_files import TlsFileError
from trunkline.v1.worker_pb2 import DrainRequest, GetModelRequest, GetModelResponse, UndrainRequest
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_cli.arguments import seconds, server, text
from trunkline_cli.connection import add_tls_arguments, connection_problem, tls_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", type=server, default="127.0.0.1:50061", metavar="HOST:PORT", help="worker (default: %(default)s)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--timeout-s", type=seconds, metavar="SECONDS",
        help="time for running requests to finish; default: the worker's own setting",
    )  # fmt: skip
    how.add_argument("--undo", action="store_true", help="end the worker's drain: it admits requests again")
    parser.add_argument(
        "--grant-key",
        type=text,
        metavar="SECRET",
        default=os.environ.get("TRUNKLINE_GRANT_KEY", ""),
        help="the worker's, if it has one; better set TRUNKLINE_GRANT_KEY: other processes can see arguments",
    )
    add_tls_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    request = DrainRequest()
    if arguments.timeout_s is not None:
        request.timeout.FromNanoseconds(int(arguments.timeout_s * 1e9))
    try:
        opened = open_blocking_channel(arguments.address, tls=tls_of(arguments))
    except TlsFileError as error:
        print(f"trunkline drain: {error}", file=sys.stderr)
        return 2
    with opened as channel:
        try:
            stub, key = WorkerServiceStub(channel), arguments.grant_key.encode()
            model = stub.GetModel(GetModelRequest()) if key else GetModelResponse()
            now_unix_ms = int(time.time() * 1e3)
            method = "Undrain" if arguments.undo else "Drain"
            proof = proof_metadata(key, method, worker_id=model.worker_id, epoch=model.epoch, now_unix_ms=now_unix_ms)
            if arguments.undo:
                stub.Undrain(UndrainRequest(), metadata=proof)
                print("the worker admits requests")
                return 0
            drained = stub.Drain(request, metadata=proof)
        except grpc.RpcError as error:
            problem = f"{arguments.address}: {error.details()}"
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                problem = connection_problem(arguments.address, problem, arguments)
            print(f"trunkline drain: {problem}", file=sys.stderr)
            return 1
    print(f"finished {drained.finished}, cut off {drained.aborted}")
    return 0
