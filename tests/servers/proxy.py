"""An HTTP proxy before a real S3 server: counts requests and the bytes of bodies, and can delay, cut, refuse or answer by itself.

    with running_proxy(weed.endpoint_url) as proxy:
        with proxy.recording() as seen: ...
        assert seen.gets == []

One thread a connection. Whoever reads a mount in the test's own process must not do it through `mmap`: a page fault holds the
interpreter's lock, and then nobody is left to serve it.
"""

from __future__ import annotations

import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_HEAD_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10
_SILENCE_SECONDS = 60.0


@dataclass
class Seen:
    """One request. `body_bytes` of the answer have been passed on so far; `status` is 0 before the answer."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    status: int = 0
    body_bytes: int = 0

    @property
    def is_list(self) -> bool:
        return "list-type" in self.query


class Record:
    """What was seen since the recording began, also after it has ended."""

    def __init__(self, log: list[Seen]) -> None:
        self._log = log
        self._begin = len(log)
        self._end: int | None = None

    def end(self) -> None:
        self._end = len(self._log)

    @property
    def requests(self) -> list[Seen]:
        return self._log[self._begin : self._end]

    @property
    def gets(self) -> list[Seen]:
        """Reads of objects."""
        return [seen for seen in self.requests if seen.method == "GET" and not seen.is_list]

    @property
    def lists(self) -> list[Seen]:
        return [seen for seen in self.requests if seen.is_list]

    @property
    def object_bytes(self) -> int:
        return sum(seen.body_bytes for seen in self.gets)


Verdict = bytes | None
"""An answer in place of the server's (its raw bytes, b'' to break the connection), or None to pass the request on."""


class Proxy:
    """Set `intercept`, `before` or `cut_after_bytes` at any time; they hold for requests that come after that."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream = ("127.0.0.1", upstream_port)
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._log: list[Seen] = []
        self.port = 0
        self.intercept: Callable[[Seen], Verdict] = lambda _: None
        self.before: Callable[[Seen], None] = lambda _: None
        self.cut_after_bytes: int | None = None
        """Break the connection after so many bytes of an object's body."""

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def recording(self) -> Iterator[Record]:
        record = Record(self._log)
        yield record
        record.end()

    def start(self) -> None:
        """Listen; after a `stop` on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Break all connections and refuse new ones. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_SILENCE_SECONDS)
        self._threads = []

    def _spawn(self, target: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(sock,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                if listener is not self._listener:
                    client.close()
                    return
                self._open.add(client)
            self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket()
        with self._lock:
            self._open.add(server)
        try:
            for each in (client, server):
                each.settimeout(_SILENCE_SECONDS)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.connect(self._upstream)
            with suppress(OSError, _Gone):
                self._converse(_Stream(client), _Stream(server))
        except OSError:
            pass  # the server does not listen: the client finds its connection closed
        finally:
            with self._lock:
                self._open -= {client, server}
            client.close()
            server.close()

    def _converse(self, client: _Stream, server: _Stream) -> None:
        while True:
            raw = client.head()
            seen = _parse(raw)
            self._log.append(seen)
            self.before(seen)
            answer = self.intercept(seen)
            if answer is not None:
                if not answer:
                    return
                seen.status = int(answer.split(b" ", 2)[1])
                client.send(answer)
                continue
            server.send(raw)
            _pass_body(client, server, seen.headers, lambda _: None)
            self._answer(seen, client, server)

    def _answer(self, seen: Seen, client: _Stream, server: _Stream) -> None:
        raw = server.head()
        first, headers = _lines(raw)
        seen.status = int(first.split(" ")[1])
        client.send(raw)
        if seen.method == "HEAD" or seen.status in (204, 304):
            return

        def count(count_bytes: int) -> None:
            seen.body_bytes += count_bytes
            limit = self.cut_after_bytes
            if limit is not None and not seen.is_list and seen.body_bytes >= limit:
                raise _Gone

        _pass_body(server, client, headers, count)


class _Gone(Exception):
    """The connection ends here, by the other side's will or ours."""


class _Stream:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = b""

    def send(self, raw: bytes) -> None:
        self._sock.sendall(raw)

    def _more(self, limit_bytes: int) -> bytes:
        piece = self._sock.recv(limit_bytes)
        if not piece:
            raise _Gone
        return piece

    def head(self) -> bytes:
        return self.until(b"\r\n\r\n")

    def until(self, end: bytes) -> bytes:
        while end not in self._received:
            self._received += self._more(_HEAD_BYTES)
        found, _, self._received = self._received.partition(end)
        return found + end

    def piece(self, limit_bytes: int) -> bytes:
        if self._received:
            found, self._received = self._received[:limit_bytes], self._received[limit_bytes:]
            return found
        return self._more(min(limit_bytes, _PIECE_BYTES))


def _lines(raw: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = raw.decode("latin-1").split("\r\n")
    return first, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def _parse(raw: bytes) -> Seen:
    first, headers = _lines(raw)
    method, target, _ = first.split(" ")
    path, _, query = target.partition("?")
    return Seen(method, urllib.parse.unquote(path), dict(urllib.parse.parse_qsl(query, keep_blank_values=True)), headers)


def _pass_body(source: _Stream, target: _Stream, headers: dict[str, str], count: Callable[[int], None]) -> None:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        size = -1
        while size:
            line = source.until(b"\r\n")
            size = int(line.split(b";")[0], 16)
            target.send(line)
            _pass_bytes(source, target, size, count)
            target.send(source.until(b"\r\n"))
        return
    _pass_bytes(source, target, int(headers.get("content-length", "0")), count)


def _pass_bytes(source: _Stream, target: _Stream, left_bytes: int, count: Callable[[int], None]) -> None:
    while left_bytes:
        piece = source.piece(left_bytes)
        target.send(piece)
        left_bytes -= len(piece)
        count(len(piece))


@contextmanager
def running_proxy(upstream_url: str) -> Iterator[Proxy]:
    port = urllib.parse.urlsplit(upstream_url).port
    assert port is not None
    proxy = Proxy(port)
    try:
        proxy.start()
        yield proxy
    finally:
        proxy.stop()
