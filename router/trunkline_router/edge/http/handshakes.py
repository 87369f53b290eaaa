"""TLS handshakes in progress. Clients that never complete one cannot take all of a process's descriptors, and cannot
push out connections that are established: a connection counts as one only once its handshake is complete.

asyncio's own servers report a TLS connection only once its handshake is complete. So the connections of a port with TLS
are accepted here.
"""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from trunkline_router.address import network_of

ACCEPTED_AT_ONCE = 64  # connections, in one turn of the event loop
NO_FILES_PAUSE_S = 1.0  # between two tries to accept while the process has no file descriptor left


class Handshakes:
    """Accepts connections and completes a handshake on each, which are bounded in total.

    A new handshake is never refused: at the limit an older one makes room. A client that means to connect needs a few
    round trips, so handshakes that have been silent for longer go first, even if each comes from another host.

    connect: makes the protocol of a connection whose handshake is complete
    limit_s: for each handshake
    shutdown_s: in which a client must read what is left of the output and close
    """

    def __init__(
        self,
        connect: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        most: int,
        *,
        limit_s: float,
        shutdown_s: float,
    ) -> None:
        self._connect = connect
        self._context = context
        self._most = most
        self._limit_s, self._shutdown_s = limit_s, shutdown_s
        self._oldest_first: dict[socket.socket, str] = {}  # the client's network
        self._num_of_host: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    def __len__(self) -> int:
        return len(self._oldest_first)

    def start(self, listener: socket.socket) -> None:
        """Accepts the connections of a listening socket."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def stop(self) -> None:
        """Accepts no more connections, and gives up all handshakes."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for each in list(self._oldest_first):
            self._give_up(each)
        await asyncio.gather(*self._tasks)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            if self._listener is None:
                return
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                loop.remove_reader(self._listener)
                loop.call_later(NO_FILES_PAUSE_S, self._accept_again)
                return
            accepted.setblocking(False)
            self.add(accepted, address[0])
            task = loop.create_task(self._shake_hands(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self.start(self._listener)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):  # an error of TLS, a lost connection, or too long a time
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._connect,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._limit_s,
                    ssl_shutdown_timeout=self._shutdown_s,
                )
        finally:
            self.remove(accepted)

    def add(self, accepted: socket.socket, address: str) -> None:
        """Counts a new handshake. At the limit, gives up the oldest one among those of the hosts that have the most."""
        host = network_of(address)
        if len(self) >= self._most:
            largest = max(self._num_of_host.values())
            self._give_up(next(each for each, of in self._oldest_first.items() if self._num_of_host[of] == largest))
        self._oldest_first[accepted] = host
        self._num_of_host[host] += 1

    def remove(self, accepted: socket.socket) -> None:
        """Stops counting a handshake. Does nothing if it is not counted."""
        host = self._oldest_first.pop(accepted, None)
        if host is not None:
            self._num_of_host[host] -= 1
            if not self._num_of_host[host]:
                del self._num_of_host[host]

    def _give_up(self, accepted: socket.socket) -> None:
        """The event loop then finds that the client has closed."""
        self.remove(accepted)
        with contextlib.suppress(OSError):  # it has reset the connection
            accepted.shutdown(socket.SHUT_RDWR)
