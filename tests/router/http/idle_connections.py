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
    while closed := poll.poll(0.5, maxevents=wanted):  # until the server closes no further ones
        for number, _ in closed:
            poll.unregister(number)
            connections.pop(number).close()
    print(len(connections), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
