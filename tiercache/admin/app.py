"""The admin server: everything over HTTP on a unix socket, and `/metrics` alone on a loopback port when configured.

Connections are run by hypercorn's `TCPServer`, but accepted here and not by `hypercorn.trio.serve`:
that one shields its sends from cancellation, so a client that stops reading an answer would keep
the daemon from ending for ever. Here running requests get GRACE_SECONDS, then their sockets are closed.
And whatever goes wrong in one connection ends that connection only. Hypercorn's own nursery would pass
it on (a request that breaks off can end in trio.BusyResourceError), and anybody on the machine may
connect to the loopback port: that must not take the mount down.
"""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import trio
from starlette.applications import Starlette

from tiercache.admin.connections import Connections
from tiercache.admin.control import Control
from tiercache.admin.listening import loopback_socket, unix_socket
from tiercache.admin.routes import admin_app, metrics_app


class Listening(msgspec.Struct, frozen=True):
    """Where the server can be reached, once it can: `http` has the real port where 0 was asked for."""

    socket_path: str
    http: tuple[str, int] | None


async def serve_admin(
    control: Control,
    *,
    socket_path: str,
    http: tuple[str, int] | None = None,
    group: str | None = None,
    task_status: trio.TaskStatus[Listening] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; then the socket file is gone. Started when both addresses accept connections.

    Raises SetupError when a live daemon has the socket, or an address cannot be had; UsageError for
    an `http` host that is not loopback, or an unknown group.
    """
    with loopback_socket(http) as tcp, unix_socket(Path(socket_path), group) as unix:
        async with trio.open_nursery() as nursery:
            await nursery.start(_serve, admin_app(control), unix)
            address = None
            if tcp is not None:
                await nursery.start(_serve, metrics_app(control), tcp)
                host, port = tcp.getsockname()[:2]
                address = (host, port)
            task_status.started(Listening(socket_path, address))
            await trio.sleep_forever()


async def _serve(app: Starlette, listening: socket.socket, task_status: trio.TaskStatus[None]) -> None:
    connections = Connections(app)
    async with trio.open_nursery() as nursery:
        running: trio.Nursery = await nursery.start(_shielded_nursery)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        running.start_soon(connections.expire)
        task_status.started()
        try:
            await trio.serve_listeners(connections.run, [listener], handler_nursery=running)
        finally:
            await connections.drain()
            running.cancel_scope.cancel()


async def _shielded_nursery(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Connections live here, so that a cancelled server can still finish its answers."""
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()
