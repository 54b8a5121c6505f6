"""An HTTP server that answers what a test tells it to, wrong answers included, and keeps what it was asked.

def script(request: Asked) -> Answer: ...
with running_scripted(script) as server: ...
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

_REQUEST_BYTES = 64 << 10
_SILENCE_SECONDS = 30.0  # after which a connection is given up, so that no test leaves a thread behind


# What becomes of the connection: kept, closed, held open in silence, or reset when the next request comes.
Then = Literal["keep", "close", "stall", "reset"]


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: Mapping[str, str]  # lower-case names
    connection: int  # counts from 0


@dataclass(frozen=True)
class Answer:
    """Raw bytes to send, and what becomes of the connection."""

    raw: bytes
    then: Then = "keep"


def reply(
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    then: Then = "keep",
) -> Answer:
    """Content-Length is that of `body` unless `headers` has one ('' leaves it out)."""
    lines = {"content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return Answer(f"HTTP/1.1 {status} Scripted\r\n{head}\r\n".encode("latin-1") + body, then)


def error_reply(status: int, code: str, headers: Mapping[str, str] | None = None, message: str = "", **fields: str) -> Answer:
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in {"Code": code, "Message": message, **fields}.items())
    return reply(status, headers, f'<?xml version="1.0"?><Error>{inner}</Error>'.encode())


def in_order(answers: Sequence[Answer]) -> Callable[[Asked], Answer]:
    """One after the other; the last again and again."""
    left = list(answers)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


@dataclass
class Scripted:
    endpoint_url: str
    port: int
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    @property
    def methods(self) -> list[str]:
        return [asked.method for asked in self.asked]


class _Loop:
    def __init__(self, script: Callable[[Asked], Answer], tls: ssl.SSLContext | None) -> None:
        self._script = script
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopped = False
        port = self._listener.getsockname()[1]
        self.server = Scripted(f"{'https' if tls else 'http'}://127.0.0.1:{port}", port)
        self._spawn(self._accept)

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._stopped:
                    sock.close()
                    return
                self._open.add(sock)
                number = self.server.connections
                self.server.connections += 1
            self._spawn(lambda sock=sock, number=number: self._serve(sock, number))  # type: ignore[misc]

    def _serve(self, sock: socket.socket, number: int) -> None:
        served = sock
        try:
            sock.settimeout(_SILENCE_SECONDS)
            if self._tls is not None:
                served = self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open.discard(sock)
                    self._open.add(served)
            with suppress(OSError):
                self._converse(served, number)
        except OSError:
            pass  # a failed handshake is the client's to notice
        finally:
            with self._lock:
                self._open.discard(served)
            served.close()

    def _converse(self, sock: socket.socket, number: int) -> None:
        received = b""
        while True:
            while b"\r\n\r\n" not in received:
                piece = sock.recv(_REQUEST_BYTES)
                if not piece:
                    return
                received += piece
            head, _, received = received.partition(b"\r\n\r\n")
            asked = _parse(head.decode("latin-1"), number)
            self.server.asked.append(asked)
            answer = self._script(asked)
            sock.sendall(answer.raw)
            if answer.then == "close":
                return
            if answer.then == "reset":
                sock.recv(1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            if answer.then == "stall":
                sock.recv(1)  # until the client or the end of the test closes
                return

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            opened = list(self._open)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in opened:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_SILENCE_SECONDS)


def _parse(head: str, number: int) -> Asked:
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Asked(method, target, headers, number)


@contextmanager
def running_scripted(script: Callable[[Asked], Answer], *, tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    loop = _Loop(script, tls)
    try:
        yield loop.server
    finally:
        loop.stop()
