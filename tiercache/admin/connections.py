"""The open connections of one listener: how many there may be, and which of them gives way to a new one.

A connection either waits for its client (nothing asked yet, a request half sent, an answer not taken) or the daemon works
on a request of it. The first kind is worth nothing: it is closed after `WAIT_SECONDS`, and sooner, the one that has waited
longest first, when somebody needs its place. So nobody can shut others out by holding connections open. Clients that
keep one for later find it closed and open another. Only where all places have a request in work is a new connection refused.

The bound for one user is what the kernel says of a unix socket's peer; it says nothing of a TCP peer.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterable
from typing import Any, cast

import trio
from hypercorn.config import Config as ServerConfig
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIFramework, ConnectionState, LifespanState
from hypercorn.utils import wrap_app
from starlette.applications import Starlette

log = logging.getLogger("tiercache.admin")

MAX_CONNECTIONS = 64
MAX_PER_USER = 32
GRACE_SECONDS = 2.0
IDLE_SECONDS = 5.0
WAIT_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _Connection:
    """One client. It stands between the server and the application, and sees whose turn it is."""

    def __init__(self, app: AppWrapper, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.uid = _peer_uid(stream)
        self.waits_since: float | None = trio.current_time()
        self._app: Any = app

    async def __call__(self, scope: Any, receive: Any, send: Any, *spawning: Any) -> None:
        async def received() -> Any:
            event = await receive()
            if not event.get("more_body", False):
                self.waits_since = None
            return event

        async def sent(event: Any) -> None:
            self.waits_since = trio.current_time()
            await send(event)

        if not _has_body(scope):
            self.waits_since = None
        await self._app(scope, received, sent, *spawning)

    def close(self) -> None:
        """Whatever its tasks wait for ends: sends of the server cannot be cancelled in another way."""
        self.stream.socket.close()


class Connections:
    """Runs each connection until it ends."""

    def __init__(self, app: Starlette) -> None:
        self._app = wrap_app(cast(ASGIFramework, app), 0, "asgi")
        self._config = _server_config()
        self._context = WorkerContext(None)
        self._open: set[_Connection] = set()
        self._left = trio.Condition()

    async def run(self, stream: trio.SocketStream) -> None:
        connection = _Connection(self._app, stream)
        if not self._has_room(connection.uid):
            await stream.aclose()
            return
        self._open.add(connection)
        try:
            state = ConnectionState(LifespanState())
            app = cast(AppWrapper, connection)
            await TCPServer(app, self._config, self._context, state, stream).run()  # type: ignore[arg-type]  # plain streams too
        except ExceptionGroup as group:
            log.warning("an admin connection failed", exc_info=group)
        finally:
            connection.close()
            self._open.discard(connection)
            with trio.CancelScope(shield=True):
                async with self._left:
                    self._left.notify_all()

    def _has_room(self, uid: int | None) -> bool:
        """There is a place for one more, if need be because another one had to go."""
        same = [connection for connection in self._open if uid is not None and connection.uid == uid]
        if len(same) >= MAX_PER_USER:
            return self._end_longest_waiting(same)
        return len(self._open) < MAX_CONNECTIONS or self._end_longest_waiting(self._open)

    def _end_longest_waiting(self, among: Iterable[_Connection]) -> bool:
        waiting = [(connection.waits_since, connection) for connection in among if connection.waits_since is not None]
        if not waiting:
            return False
        _, longest = min(waiting, key=lambda pair: pair[0])
        longest.close()
        self._open.discard(longest)
        return True

    async def expire(self) -> None:
        """Close what waits too long for its client, for ever."""
        while True:
            await trio.sleep(WAIT_SECONDS / 2)
            latest = trio.current_time() - WAIT_SECONDS
            for connection in self._open:
                if connection.waits_since is not None and connection.waits_since < latest:
                    connection.close()

    async def drain(self) -> None:
        """Let running requests finish (idle connections close at once), then close what is left."""
        with trio.move_on_after(GRACE_SECONDS, shield=True):
            await self._context.terminated.set()
            async with self._left:
                while self._open:
                    await self._left.wait()
        for connection in self._open:
            connection.close()


def _has_body(scope: Any) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in scope.get("headers", ())
    )


def _peer_uid(stream: trio.SocketStream) -> int | None:
    if stream.socket.family != socket.AF_UNIX:
        return None
    _, uid, _ = _CREDENTIALS.unpack(stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _server_config() -> ServerConfig:
    config = ServerConfig()
    config.accesslog = None
    config.errorlog = log
    config.loglevel = "WARNING"
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_SECONDS
    return config
