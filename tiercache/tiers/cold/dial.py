"""Opening a connection, and breaking one from outside.

A worker thread cannot be cancelled, but its socket can be shut down: whatever the thread waits for, a connect, a
read or a write, ends at once. `Abort` is the handle for that. It holds the socket only while one exchange uses it,
so that a late cancellation never breaks a pooled connection that now serves someone else. The one thing that it
cannot end is a host name look-up inside the C library; such a thread is abandoned.

Plain sockets stay in blocking mode with SO_RCVTIMEO: Python's own timeouts poll before every receive and rule out
MSG_WAITALL. TLS sockets use Python's timeouts, because OpenSSL takes an expired SO_RCVTIMEO for "try again".
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

from tiercache.errors import Unavailable
from tiercache.tiers.cold.endpoint import Proxy, Route

MAX_ADDRESSES = 3  # tried per connection, `connect_seconds` each
_PROXY_ANSWER_BYTES = 16 << 10


@dataclass(frozen=True)
class Timeouts:
    """`read_seconds` is how long a connection may be silent, not how long an answer may take."""

    connect_seconds: float = 5.0
    read_seconds: float = 15.0


class Abort:
    """Breaks one exchange from another thread. `arm`, `disarm` and `finish` belong to the worker, `fire` to the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._fired = False
        self._running = False

    def begin(self) -> None:
        """The worker runs."""
        with self._lock:
            self._running = True

    def finish(self) -> bool:
        """The worker is done. True when someone fired and may be waiting."""
        with self._lock:
            self._running = False
            return self._fired

    def arm(self, sock: socket.socket) -> None:
        """`fire` breaks this socket from now on. Raises Unavailable when it was fired already."""
        with self._lock:
            if self._fired:
                raise Unavailable("the read was given up")
            self._socket = sock

    def disarm(self) -> bool:
        """The socket is out of reach again: call before it is closed or shared. False when it has been broken."""
        with self._lock:
            self._socket = None
            return not self._fired

    def fire(self) -> bool:
        """Idempotent. True when the worker was running."""
        with self._lock:
            self._fired = True
            if self._socket is not None:
                with suppress(OSError):  # not connected yet or broken already: the thread finds out by itself
                    self._socket.shutdown(socket.SHUT_RDWR)
            return self._running


def dial(route: Route, timeouts: Timeouts, abort: Abort) -> socket.socket:
    """A connection to the store, through the proxy and TLS if the route says so, with `abort` armed for it.

    Raises Unavailable, with a hint where the cause is known.
    """
    proxy = route.proxy
    if proxy is None:
        sock = _connect(route.host, route.port, "", "check the endpoint URL", timeouts, abort)
    else:
        sock = _connect(proxy.host, proxy.port, "proxy ", "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY", timeouts, abort)
    try:
        if route.tls is None:
            _set_blocking_timeouts(sock, timeouts.read_seconds)
            return sock
        if proxy is not None:
            _open_tunnel(sock, route, proxy)
        return _wrap(sock, route, route.tls, timeouts, abort)
    except BaseException:
        abort.disarm()
        sock.close()
        raise


def _connect(host: str, port: int, what: str, check: str, timeouts: Timeouts, abort: Abort) -> socket.socket:
    """`what` begins the name in messages, `check` their hint."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:MAX_ADDRESSES]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Unavailable(f"{what}host name {host!r} cannot be resolved: {reason}", hint=f"{check} and DNS") from error
    reason = ""
    for family, kind, protocol, _, address in addresses:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # no such address family, or no descriptor left
            reason = error.strerror or str(error)
            continue
        try:
            sock.settimeout(timeouts.connect_seconds)
            abort.arm(sock)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except TimeoutError:
            reason = f"no answer within {timeouts.connect_seconds:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
        except BaseException:
            sock.close()
            raise
        abort.disarm()
        sock.close()
    raise Unavailable(f"{what}{host}:{port} cannot be reached: {reason}", hint=f"{check} and that the {what or 'store '}is up")


def _set_blocking_timeouts(sock: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    value = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _open_tunnel(sock: socket.socket, route: Route, proxy: Proxy) -> None:
    credentials = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
    request = f"CONNECT {route.address} HTTP/1.1\r\nHost: {route.address}\r\n{credentials}\r\n"
    place = f"proxy {proxy.address}"
    answer = b""
    try:
        sock.sendall(request.encode())
        while b"\r\n\r\n" not in answer and len(answer) < _PROXY_ANSWER_BYTES:
            received = sock.recv(1)  # not a byte of what follows the answer may be taken
            if not received:
                break
            answer += received
    except OSError as error:
        raise Unavailable(f"{place} broke the connection: {error}", hint="check HTTPS_PROXY") from error
    status = answer.split(b"\r\n", 1)[0].split(b" ", 2)[1:2]
    if status != [b"200"]:
        shown = answer.split(b"\r\n", 1)[0].decode("latin-1")
        raise Unavailable(f"{place} refuses a tunnel to {route.address}: {shown!r}", hint="check HTTPS_PROXY and NO_PROXY")


def _wrap(sock: socket.socket, route: Route, tls: ssl.SSLContext, timeouts: Timeouts, abort: Abort) -> ssl.SSLSocket:
    """Takes `sock` over, and closes it when the handshake fails."""
    try:
        secured = tls.wrap_socket(sock, server_hostname=route.host, do_handshake_on_connect=False)
    except OSError as error:
        raise _handshake_failure(route, error) from error
    try:
        abort.arm(secured)
        secured.settimeout(timeouts.connect_seconds)
        secured.do_handshake()
        secured.settimeout(timeouts.read_seconds)
    except BaseException as error:
        abort.disarm()
        secured.close()
        if isinstance(error, OSError):  # ssl.SSLError is one
            raise _handshake_failure(route, error) from error
        raise
    return secured


def _handshake_failure(route: Route, error: OSError) -> Unavailable:
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(route, error.verify_message)
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return no_tls(route, str(reason or error))


def untrusted(route: Route, reason: str) -> Unavailable:
    return Unavailable(
        f"the certificate of {route.server} is not trusted: {reason}",
        hint="put its authority's certificate into a file and name it in AWS_CA_BUNDLE",
    )


def no_tls(route: Route, reason: str) -> Unavailable:
    return Unavailable(
        f"{route.server} does not speak TLS as expected: {reason}",
        hint="if it is a plain HTTP endpoint, write http:// in --endpoint-url",
    )
