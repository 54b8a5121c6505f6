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

A tier puts bytes into a sink in one of two ways. Either it borrows memory piece by piece (`buffer`, `advance`), in a thread. Or
it asks once for the `place` of all bytes of the read, has them put there by threads of its own that need no Python (the S3
tier's), and says on the event loop how many of them have `landed`. What a place holds beyond that does not count.

Contract of `Cold.list(prefix, ...)`: pages in the store's order, at most `limit` names a page. With
`delimiter` it lists one level: objects directly under the prefix and the prefixes below. An empty
page with token '' means that nothing is there; failure is always an exception, never an empty page.
`Cold.head(key)` raises NotFound when, and only when, the store said so.
"""

from __future__ import annotations

from typing import Protocol

from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import TiercacheError
from tiercache.tiers.hot import HotFile

MAX_PAGE = 1000  # names a page; what S3 gives at most


class SinkClosed(TiercacheError):
    """The reader of these bytes has gone: stop and give up quietly."""


class FilePlace:
    """The bytes of a hot file from `offset` on. `is_alone`: nobody else writes the file, so who is given the place may make it.

    `is_closed`: nobody wants bytes there any more. `is_stuck` is set while, or because, the file system does not come back from
    an operation on the file.
    """

    __slots__ = ("file", "is_alone", "is_closed", "is_stuck", "offset")

    def __init__(self, file: HotFile, offset: int, *, is_alone: bool) -> None:
        self.file = file
        self.offset = offset
        self.is_alone = is_alone
        self.is_closed = False
        self.is_stuck = False


Place = FilePlace | memoryview


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

    def place(self, length: int) -> Place:
        """Where the next `length` bytes belong, to be put there without the sink's help. Raises SinkClosed."""

    def landed(self, count: int, digest: int | None = None) -> None:
        """The next `count` bytes are in their place. On the event loop. Raises SinkClosed.

        `digest` comes with the last of them: xxh3-64 of all that landed in the place.
        """


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

    def place(self, length: int) -> Place:
        if self._closed:
            raise SinkClosed("sink closed")
        room = memoryview(self._memory)[self._received : self._received + length]
        assert len(room) == length, "a tier is about to send more bytes than were asked for"
        return room

    def landed(self, count: int, digest: int | None = None) -> None:
        self.advance(count)

    def close(self) -> None:
        self._closed = True
