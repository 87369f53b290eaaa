"""Keeps what clients cause out of the log of gRPC's library: any host could fill the log, or have it quote keys."""

import logging

import grpc

GRPC_LOG = "grpc._cython.cygrpc"
# Logged with a traceback for a path or metadata that are not UTF-8, which may be a credential. The library then takes
# the bytes as Latin-1, and the call goes on.
QUOTES_BYTES = "Invalid encoding on %s"
# What the library raises for calls of methods that do not exist, after which it ends the call: nothing can be sent any
# more because the stream has ended, or the path is not UTF-8. Whatever the methods that exist raise is not logged by
# the library, but by ErrorInterceptor.
OF_CLIENTS = (grpc.aio.InternalError, UnicodeDecodeError)


def keep_clients_out_of_log() -> None:
    """Drops the log lines of gRPC's library that quote clients or tell that they have gone."""
    logging.getLogger(GRPC_LOG).addFilter(_is_not_of_clients)  # adding it again has no effect


def _is_not_of_clients(record: logging.LogRecord) -> bool:
    raised = None if record.exc_info is None else record.exc_info[1]
    return record.msg != QUOTES_BYTES and not isinstance(raised, OF_CLIENTS)
