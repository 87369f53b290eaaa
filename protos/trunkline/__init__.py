"""Trunkline's wire contract and Python client.

The clients and the errors are imported on first use, so that `trunkline.block_hash` can be used without grpc.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trunkline.client.client import Client as Client
    from trunkline.client.sync_client import SyncClient as SyncClient
    from trunkline.errors import TrunklineError as TrunklineError
    from trunkline.tls import ClientTls as ClientTls

__all__ = ["Client", "ClientTls", "SyncClient", "TrunklineError"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from trunkline.client.client import Client

        return Client
    if name == "SyncClient":
        from trunkline.client.sync_client import SyncClient

        return SyncClient
    if name == "ClientTls":
        from trunkline.tls import ClientTls

        return ClientTls
    if name == "TrunklineError":
        from trunkline.errors import TrunklineError

        return TrunklineError
    raise AttributeError(f"module 'trunkline' has no attribute {name!r}")
