"""The seam below the engine: where bytes come from, and where they are put.

A `Tier` has bytes of objects; a `Cold` tier also knows which objects there are. Retry, limit,
measurement and faults are wrappers of the same protocols, one file each, and every implementation
passes `tests/tiers/conformance.py`.

Contract of `Tier.read(ref, offset, length, sink)`:

* It puts exactly the bytes [offset, offset + length) of *this version* of the object into the
  sink, in order, and returns; or it raises a TierError. What the sink has accepted before an
  error is right and stays useful: a retry goes on at `offset + (sink.received_bytes - at_start)`.
* The version is checked *before* the first byte is handed over (If-Match and the response's own
  ETag and Content-Range; fstat before and after for directories). A mixture of versions is
  impossible: VersionChanged or NotFound is raised instead.
* 0 <= offset, 0 < length, offset + length <= ref.size_bytes: the caller's duty.
* It may be cancelled. A thread that was abandoned may still be inside the tier's code; it touches
  nothing but its own descriptors and the sink, and a closed sink refuses it with SinkClosed.
* Blocking work runs in threads under the tier's own limiter, never on the event loop.
* It never logs and never retries (wrappers do).

Contract of `Cold.list(prefix, ...)`: pages in the store's order, at most `limit` names a page. With
`delimiter` it lists one level: objects directly under the prefix and the prefixes below. An empty
page with token '' means that nothing is there; failure is always an exception, never an empty page.
`Cold.head(key)` raises NotFound when, and only when, the store said so.
"""

from __future__ import annotations

from typing import Protocol

from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import TiercacheError

MAX_PAGE = 1000  # names a page; what S3 gives at most


class SinkClosed(TiercacheError):
    """The reader of these bytes has gone: stop and give up quietly."""


class Sink(Protocol):
    """Where one read's bytes go, in order. Used by one thread at a time; `close` may come from another.

    The memory that `buffer` lends and any descriptor behind it belong to the sink, and live as long as a reference to it does.
    """

    @property
    def received_bytes(self) -> int:
        """How many bytes were accepted so far."""

    def buffer(self, wanted_bytes: int) -> memoryview:
        """Writable memory of 1 to `wanted_bytes` bytes to receive into. Raises SinkClosed."""

    def advance(self, count: int) -> None:
        """The first `count` bytes of the last `buffer` are the next bytes. Raises SinkClosed, HotFull, HotSick."""


class Tier(Protocol):
    name: str

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None: ...

    async def aclose(self) -> None:
        """Let go of connections and descriptors; running reads end with Unavailable. Idempotent."""


class Cold(Tier, Protocol):
    source_id: str

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page: ...

    async def head(self, key: str) -> Listed: ...


class MemorySink:
    """A sink that keeps what it gets: for bytes that are streamed past the hot tier, and for tests."""

    def __init__(self, capacity_bytes: int) -> None:
        self._memory = bytearray(capacity_bytes)
        self._received = 0
        self._closed = False

    @property
    def received_bytes(self) -> int:
        return self._received

    @property
    def view(self) -> memoryview:
        """The bytes received so far, not copied."""
        return memoryview(self._memory)[: self._received]

    def buffer(self, wanted_bytes: int) -> memoryview:
        if self._closed:
            raise SinkClosed("sink closed")
        room = memoryview(self._memory)[self._received : self._received + wanted_bytes]
        assert len(room) > 0, "a tier sent more bytes than were asked for"
        return room

    def advance(self, count: int) -> None:
        if self._closed:
            raise SinkClosed("sink closed")
        self._received += count
        assert self._received <= len(self._memory)

    def close(self) -> None:
        self._closed = True
