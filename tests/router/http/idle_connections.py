"""A client process for tests: opens connections, reports the number still open, and keeps them until its input ends."""

import select
import socket
import sys


def main() -> None:
    port, wanted = map(int, sys.argv[1:])
    poll = select.epoll()
    connections: dict[int, socket.socket] = {}
    for _ in range(wanted):
        connection = socket.create_connection(("127.0.0.1", port))
        connections[connection.fileno()] = connection
        poll.register(connection.fileno(), select.EPOLLIN)
    closed = poll.poll(0.5, maxevents=wanted)
    print(wanted - len(closed), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
