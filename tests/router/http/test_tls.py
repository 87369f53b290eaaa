"""HTTP over TLS, and a certificate that is replaced while the server runs."""

import asyncio
import ssl
import subprocess
from pathlib import Path

from tests.router.http.http_rig import Client, echo, post, serving


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A new self-signed certificate for localhost, and its key."""
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "1",
            ),
            *("-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", str(paths[0]), "-keyout", str(paths[1])),
        ],
        check=True,
        capture_output=True,
    )
    return paths


async def test_new_certificate_holds_for_new_connections_and_drops_none(tmp_path: Path) -> None:
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*old)
    trusting = ssl.create_default_context(cafile=str(old[0]))
    trusting.load_verify_locations(str(new[0]))

    async with serving(echo, ssl_context=context) as server:

        async def connect() -> Client:
            return Client(*await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting))

        def subject(client: Client) -> str:
            return str(client.writer.get_extra_info("peercert")["subject"][0][0][1])

        first = await connect()
        assert subject(first) == "old"
        context.load_cert_chain(*new)
        second = await connect()
        assert subject(second) == "new"
        for client in (first, second):
            client.send(post(b"{}"))
            assert (await client.response())[0] == 200
            await client.close()
