"""The HTTP path in Python: HTTP/1.1 requests without a body over kept-alive connections, from worker threads.

Listings and HEADs go over it, and GETs where the extension `_fetch` is missing. docs/architecture.md has what it costs
beside other clients: as much as the standard library's. It is used because it lets another thread break a request off at any
point, hands the bytes over as they come, and takes answers apart strictly (`parse_head`, also for `native.py`). Rejected:
awscrt (0.42-0.6 ms a small GET, a dependency of 30 MB), obstore (normalises keys). On plain sockets MSG_WAITALL takes a
piece per system call: 256 KiB pieces cost 0.19-0.26 CPU s/GiB in one stream, 64 KiB 0.25, 1 MiB 0.18.

A connection is used by one thread at a time. One that the server closed while it was idle is noticed by its failing
before the first byte of an answer; the request is then sent once more on a new connection (all requests are
idempotent). That is not a retry of the policy's kind: those are made by a wrapper of the tier.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from tiercache.errors import BadResponse, Unavailable
from tiercache.tiers.cold.dial import Abort, Timeouts, dial
from tiercache.tiers.cold.endpoint import Route

HEAD_BYTES = 32 << 10  # at most of status line and headers; S3 sends about 500
MAX_IDLE_SECONDS = 30.0  # older than that a kept connection may have been forgotten by something in between
_TLS_ALERT = b"\x15\x03"


class _Stale(Exception):
    """A kept connection failed before the first byte of an answer."""


class Head(NamedTuple):
    """Header names are lower case."""

    status: int
    headers: Mapping[str, str]


class Connection:
    """One socket, and what was received from it ahead of being asked for."""

    def __init__(self, sock: socket.socket, route: Route, timeouts: Timeouts) -> None:
        self.socket = sock
        self._server = route.server
        self._is_tls = route.tls is not None
        self._timeouts = timeouts
        self._memory = bytearray(HEAD_BYTES)
        self._view = memoryview(self._memory)
        self._start = 0
        self._end = 0
        self._flags = 0
        self._used = False

    @property
    def is_clean(self) -> bool:
        """Nothing was received that belongs to no message."""
        return self._start == self._end

    def ask(self, request: bytes, *, bodyless: bool) -> Response:
        """Sends the request and reads up to the end of the headers. Raises _Stale only on a connection used before."""
        was_used, self._used = self._used, True
        self._start = self._end = self._flags = 0
        try:
            self.socket.sendall(request)
            received = self.socket.recv_into(self._memory)
        except OSError as error:
            if was_used and not isinstance(error, (BlockingIOError, TimeoutError)):
                raise _Stale from error
            raise self._broken(error) from error
        if received == 0:
            if was_used:
                raise _Stale
            hint = "" if self._is_tls else "if that port speaks TLS, write https:// in --endpoint-url"
            raise Unavailable(f"{self._server} closed the connection without an answer", hint=hint)
        self._end = received
        return self._read_response(bodyless)

    def _broken(self, error: OSError) -> Unavailable:
        if isinstance(error, (BlockingIOError, TimeoutError)):
            return Unavailable(f"{self._server} was silent for {self._timeouts.read_seconds:g} s")
        return Unavailable(f"the connection to {self._server} broke: {error.strerror or error}")

    def _read_response(self, bodyless: bool) -> Response:
        while True:
            head = self._take_through(b"\r\n\r\n", HEAD_BYTES)
            try:
                status, is_persistent, headers = _parse_head(head.decode("latin-1"))
            except ValueError as error:
                raise self._not_http(head) from error
            if status >= 200:
                return Response(status, headers, self._body(status, headers, bodyless), self, is_persistent)

    def _not_http(self, head: bytes) -> BadResponse:
        hint = (
            "that port speaks TLS: write https:// in --endpoint-url" if head.startswith(_TLS_ALERT) else "check the endpoint URL"
        )
        return BadResponse(f"{self._server} does not answer in HTTP: {head[:40]!r}", hint=hint)

    def _body(self, status: int, headers: Mapping[str, str], bodyless: bool) -> Body:
        if bodyless or status in (204, 304):
            return _Counted(self, 0)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return _Chunked(self)
        if "content-length" in headers:
            return _Counted(self, int(headers["content-length"]))
        return _UntilClose(self)

    def receive(self, into: memoryview) -> int:
        """1 to len(into) bytes; 0 when the server has closed. Raises Unavailable."""
        held = min(self._end - self._start, len(into))
        if held:
            into[:held] = self._view[self._start : self._start + held]
            self._start += held
            return held
        try:
            received = self.socket.recv_into(into, len(into), self._flags)
        except OSError as error:
            raise self._broken(error) from error
        if not self._is_tls:
            self._flags = socket.MSG_WAITALL  # the first receive of a body takes what is there, so that its bytes are early
        return received

    def line(self) -> bytes:
        """The next line without its CRLF."""
        return self._take_through(b"\r\n", HEAD_BYTES)[:-2]

    def _take_through(self, mark: bytes, limit_bytes: int) -> bytes:
        while (found := self._memory.find(mark, self._start, self._end)) < 0:
            if self._start:
                waiting = self._end - self._start
                self._memory[:waiting] = self._memory[self._start : self._end]
                self._start, self._end = 0, waiting
            if self._end >= limit_bytes:
                raise BadResponse(f"{self._server} sent more than {limit_bytes} bytes of headers")
            try:
                received = self.socket.recv_into(self._view[self._end :])
            except OSError as error:
                raise self._broken(error) from error
            if received == 0:
                if self._memory.startswith(_TLS_ALERT):
                    raise self._not_http(bytes(self._view[: self._end]))
                raise self.ended_early()
            self._end += received
        start, self._start = self._start, found + len(mark)
        return bytes(self._view[start : self._start])

    def ended_early(self) -> Unavailable:
        return Unavailable(f"{self._server} ended its answer early")

    def malformed(self, what: str) -> BadResponse:
        return BadResponse(f"{self._server} sent a malformed {what}")


def _parse_head(text: str) -> tuple[int, bool, dict[str, str]]:
    """Status, whether the connection persists, headers by lower-case name. Raises ValueError."""
    first, *lines = text[:-4].split("\r\n")
    version, _, rest = first.partition(" ")
    if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdigit():
        raise ValueError(first)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise ValueError(line)
        name, value = name.lower(), value.strip()
        if name == "content-length" and (not value.isdecimal() or headers.get(name, value) != value):
            raise ValueError(line)
        headers[name] = value
    return int(rest[:3]), version == "HTTP/1.1" and headers.get("connection", "").lower() != "close", headers


def parse_head(text: str) -> Head:
    """Status line and headers, ended by an empty line. Raises ValueError."""
    if not text.endswith("\r\n\r\n"):
        raise ValueError("no end")
    status, _, headers = _parse_head(text)
    return Head(status, headers)


class Body(Protocol):
    """`readinto` gives 1 to len(view) bytes, 0 at the end; raises Unavailable when the end comes early."""

    is_finished: bool

    def readinto(self, view: memoryview) -> int: ...


class _Counted:
    def __init__(self, connection: Connection, length_bytes: int) -> None:
        self._connection = connection
        self._left = length_bytes
        self.is_finished = length_bytes == 0

    def readinto(self, view: memoryview) -> int:
        if self._left == 0:
            return 0
        received = self._connection.receive(view[: self._left])
        if received == 0:
            raise self._connection.ended_early()
        self._left -= received
        self.is_finished = self._left == 0
        return received


class _Chunked:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left = 0
        self.is_finished = False

    def readinto(self, view: memoryview) -> int:
        if self._left == 0 and not self.is_finished:
            self._next_chunk()
        if self.is_finished:
            return 0
        received = self._connection.receive(view[: self._left])
        if received == 0:
            raise self._connection.ended_early()
        self._left -= received
        if self._left == 0 and self._connection.line():
            raise self._connection.malformed("chunk")
        return received

    def _next_chunk(self) -> None:
        digits = self._connection.line().split(b";", 1)[0].strip()
        try:
            self._left = int(digits, 16)
        except ValueError as error:
            raise self._connection.malformed("chunk size") from error
        if self._left < 0:
            raise self._connection.malformed("chunk size")
        if self._left == 0:
            while self._connection.line():
                pass
            self.is_finished = True


class _UntilClose:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.is_finished = False  # for ever: such a connection cannot be kept

    def readinto(self, view: memoryview) -> int:
        return self._connection.receive(view)


class Response:
    """An answer whose headers are here and whose body is still to be read. Header names are lower case."""

    def __init__(self, status: int, headers: dict[str, str], body: Body, connection: Connection, is_persistent: bool) -> None:
        self.status = status
        self.headers = headers
        self.readinto = body.readinto
        self._body = body
        self._connection = connection
        self._is_persistent = is_persistent

    @property
    def is_reusable(self) -> bool:
        """The connection is ready for the next request."""
        return self._is_persistent and self._body.is_finished and self._connection.is_clean

    def rest(self, limit_bytes: int) -> bytes:
        """What is left of the body. Raises BadResponse when that is more than `limit_bytes`."""
        collected = bytearray()
        piece = memoryview(bytearray(min(limit_bytes, 64 << 10) + 1))
        while received := self.readinto(piece):
            collected += piece[:received]
            if len(collected) > limit_bytes:
                raise self._connection.malformed(f"answer: more than {limit_bytes} bytes")
        return bytes(collected)


class Pool:
    """Kept connections to one route, the most recently used first. At most `max_idle` wait in it."""

    def __init__(self, route: Route, timeouts: Timeouts, max_idle: int) -> None:
        self.route = route
        self._timeouts = timeouts
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Connection]] = []
        self._closed = False

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @contextmanager
    def ask(self, request: bytes, abort: Abort, *, bodyless: bool = False) -> Iterator[Response]:
        """One exchange. The connection is kept when the body was read to its end, whatever the caller raises."""
        connection, response = self._answered(request, abort, bodyless)
        try:
            yield response
        finally:
            if abort.disarm() and response.is_reusable:
                self._put(connection)
            else:
                connection.socket.close()

    def close(self) -> None:
        """Idempotent. Exchanges that run end as they would; none begins any more."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.socket.close()

    def _answered(self, request: bytes, abort: Abort, bodyless: bool) -> tuple[Connection, Response]:
        for connection in self._taken():
            try:
                abort.arm(connection.socket)
                return connection, connection.ask(request, bodyless=bodyless)
            except _Stale:
                self._discard(connection, abort)
            except BaseException:
                self._discard(connection, abort)
                raise
        connection = Connection(dial(self.route, self._timeouts, abort), self.route, self._timeouts)
        try:
            return connection, connection.ask(request, bodyless=bodyless)
        except BaseException:
            self._discard(connection, abort)
            raise

    @staticmethod
    def _discard(connection: Connection, abort: Abort) -> None:
        abort.disarm()
        connection.socket.close()

    def _taken(self) -> list[Connection]:
        """A kept connection, or none; raises Unavailable after `close`."""
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise Unavailable(f"the tier of {self.route.server} is closed")
            if not self._idle:
                return []
            since, connection = self._idle.pop()
            if now - since <= MAX_IDLE_SECONDS:
                return [connection]
            outdated = [connection, *(other for _, other in self._idle)]  # the others wait even longer
            self._idle = []
        for connection in outdated:
            connection.socket.close()
        return []

    def _put(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._max_idle:
                self._idle.append((time.monotonic(), connection))
                return
        connection.socket.close()
