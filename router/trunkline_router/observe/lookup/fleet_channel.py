"""Sends and hears messages over Redis's publish and subscribe, apart from the connection that requests use.

One connection listens; it is idle between questions. Every few minutes a new one takes its place, before it is closed.
Another one sends; it is opened when there is something to send, and closed soon afterwards. A message may be heard
twice. Whatever Redis does, nothing waits for it but their tasks.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from redis.asyncio import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from trunkline_router.quotas.stores.redis_pool import CONNECT_TIMEOUT_S, disconnect, reason, redis_pool
from trunkline_router.quotas.stores.redis_url import PUBLIC_AUTHORITIES, RedisTls, place_of
from trunkline_router.record.token_bucket import TokenBucket
from trunkline_runtime.log import get_logger

PING_S = 15.0  # without a message; then the server must answer within as long
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.5, 30.0
STABLE_S = 10.0  # after a connection that lasted for this long, the pause is the first and shortest one again
# After which the connection for listening is replaced, as the one for sending is below. A random part of it is left
# out, so that the routers of a fleet do not do that together.
LISTENER_AGE_S = 240.0
SEND_TIMEOUT_S = 0.5
SENDER_IDLE_S = 30.0  # after which the connection for sending is closed
SENDER_AGE_S = 60.0  # after which it is opened again: Redis's name may lead to another server by now
MOST_QUEUED, MOST_QUEUED_BYTES = 64, 8 << 20  # to send; further messages are dropped
# What is read of the messages that are heard, true or false. A router that hears more leaves the rest to Redis.
READ_BYTES_PER_S, READ_BURST_BYTES, MESSAGE_COST_BYTES = 16 << 20, 32 << 20, 32 << 10

LAST = b"last"  # that the server says on a connection

Hears = Callable[[bytes], None]  # takes a message


class FleetChannel:
    """hears: what takes the messages of each channel"""

    def __init__(
        self,
        url: str,
        hears: Mapping[bytes, Hears],
        *,
        tls: RedisTls = PUBLIC_AUTHORITIES,
        rng: Random,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place_of(url)
        self._pool = redis_pool(url, tls, CONNECT_TIMEOUT_S)
        self._hears = hears
        self._rng = rng
        self._steady_s = steady_s
        self._readable = TokenBucket(READ_BYTES_PER_S, READ_BURST_BYTES)
        self.is_listening = False
        self._is_over = False
        self._problem = ""
        self._log = get_logger()
        self._queue: list[tuple[bytes, bytes]] = []
        self._queued_bytes = 0
        self._has_more = asyncio.Event()
        self._listener: Connection | None = None
        self._sender: Connection | None = None
        self._sender_since_s = 0.0
        self.num_connections = 0  # opened so far
        self.num_heard = 0  # messages

    def send(self, channel: bytes, message: bytes) -> bool:
        """Sends a message as soon as possible, or never. Returns False if there is no room for it."""
        if len(self._queue) >= MOST_QUEUED or self._queued_bytes + len(message) > MOST_QUEUED_BYTES:
            return False
        self._queue.append((channel, message))
        self._queued_bytes += len(message)
        self._has_more.set()
        return True

    async def run(self) -> None:
        """Listens and sends until it is cancelled."""
        tasks = [asyncio.create_task(keep()) for keep in (self._keep_listening, self._keep_sending)]
        try:
            await asyncio.wait(tasks)
        finally:
            self._is_over = True  # checked because a library may swallow a cancellation
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Listening

    async def _keep_listening(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._is_over:
            began_s = self._steady_s()
            try:
                await self._listen()
            except Exception as error:  # whatever Redis sends, the router goes on
                self._lose(error)
            finally:
                self.is_listening = False
            backoff_s = BACKOFF_FIRST_S if self._steady_s() - began_s > STABLE_S else backoff_s
            await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)

    async def _listen(self) -> None:
        try:
            self._listener = await self._subscribed()
            self.is_listening = True
            self._work()
            renewed_at_s = self._steady_s() + self._listener_age_s()
            while not self._is_over:
                await self._hear(await self._next(self._listener))
                if self._steady_s() >= renewed_at_s:
                    is_renewed = await self._renew(self._listener)
                    renewed_at_s = self._steady_s() + (self._listener_age_s() if is_renewed else BACKOFF_MOST_S)
        finally:
            listener, self._listener = self._listener, None
            if listener is not None:
                await disconnect(listener)

    def _listener_age_s(self) -> float:
        return LISTENER_AGE_S * self._rng.uniform(0.5, 1.0)

    async def _renew(self, old: Connection) -> bool:
        """Listens on a new connection, which leads to where Redis's name leads now. What was published before that is
        heard on the old one, which goes on if there is no new one. Returns whether there is."""
        try:
            self._listener = await self._subscribed()
        except Exception as error:  # as in _keep_listening
            self._lose(error)
            return False
        self._work()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await old.send_command("PING", LAST)
                while (message := await old.read_response()) != [b"pong", LAST]:
                    await self._hear(message)
        except (TimeoutError, RedisError, OSError):
            self._log.debug("the former connection for other routers' questions was lost", place=self._place)
        finally:
            await disconnect(old)
        return True

    async def _subscribed(self) -> Connection:
        connection = await self._connected()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.send_command("SUBSCRIBE", *self._hears)
                for _ in self._hears:
                    await connection.read_response()
        except BaseException:
            await disconnect(connection)
            raise
        return connection

    async def _next(self, connection: Connection) -> Any:
        """The next message. Raises TimeoutError if the server does not even answer a ping."""
        if (message := await connection.read_response(timeout=PING_S)) is not None:
            return message
        await connection.send_command("PING")
        if (message := await connection.read_response(timeout=PING_S)) is None:
            raise TimeoutError
        return message

    async def _hear(self, message: Any) -> None:
        if not isinstance(message, list) or len(message) != 3 or message[0] != b"message":
            return
        _, channel, data = message
        hear = self._hears.get(channel)
        if hear is not None and isinstance(data, bytes):
            hear(data)
            self.num_heard += 1
            self._readable.charge(len(data) + MESSAGE_COST_BYTES, self._steady_s())
            if wait_s := self._readable.wait_s(self._steady_s()):
                await asyncio.sleep(wait_s)

    # Sending

    async def _keep_sending(self) -> None:
        try:
            while not self._is_over:
                try:
                    async with asyncio.timeout(SENDER_IDLE_S):
                        await self._has_more.wait()
                except TimeoutError:
                    await self._close_sender()
                    await self._has_more.wait()
                self._has_more.clear()
                messages, self._queue, self._queued_bytes = self._queue, [], 0
                await self._send_all(messages)
        finally:
            await self._close_sender()

    async def _send_all(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        """Sends messages once or twice: a repeated one is ignored. Drops them if that fails."""
        was_open = self._sender is not None
        try:
            try:
                await self._send(messages)
            except (RedisConnectionError, ConnectionError):
                await self._close_sender()
                if not was_open:
                    raise
                await self._send(messages)  # on a new connection: Redis was restarted
        except Exception as error:  # as in _keep_listening
            await self._close_sender()
            self._lose(error)
        else:
            self._work()

    async def _send(self, messages: Sequence[tuple[bytes, bytes]]) -> None:
        if self._steady_s() - self._sender_since_s > SENDER_AGE_S:
            await self._close_sender()
        if self._sender is None:
            self._sender = await self._connected()
            self._sender_since_s = self._steady_s()
        commands = [("PUBLISH", channel, message) for channel, message in messages]
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._sender.send_packed_command(self._sender.pack_commands(commands), check_health=False)
            for _ in commands:
                await self._sender.read_response()

    async def _close_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await disconnect(sender)

    async def _connected(self) -> Connection:
        connection: Connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await disconnect(connection)
            raise
        self.num_connections += 1
        return connection

    def _work(self) -> None:
        if self._problem and self.is_listening:
            self._log.info("other routers can be asked for their requests again")
            self._problem = ""

    def _lose(self, error: Exception) -> None:
        if not self._problem:  # one line per change, not per try
            if not isinstance(error, RedisError | OSError):
                self._log.error("unexpected error", exc_info=error)
            self._log.warning(
                "other routers cannot be asked for their requests", problem=f"{self._place}: {reason(error)}"
            )
        self._problem = reason(error)
