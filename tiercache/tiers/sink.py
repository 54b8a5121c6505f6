"""The sink that puts a tier's bytes into a hot file, and the memory it lends.

Memory that a sink has lent goes back to the pool only from `advance`, that is from the thread that used it; a loan
that was abandoned is left to the garbage collector.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from tiercache.errors import HotSick
from tiercache.tiers.hot import HotFile, refusal
from tiercache.tiers.tier import FilePlace, Place, SinkClosed

BUFFER_BYTES = 1 << 20
IDLE_BUFFERS = 8
WRITE_BYTES = 1 << 20
"""Of one write(2). More makes ext4 take folios of 2 MiB for the page cache, which may have to be made first (measured in a VM:
0.2 to 2 CPU s/GiB with 2 and 8 MiB, 0.2 with 1 MiB)."""
FIRST_BUFFER_BYTES = 128 << 10  # the kernel's read size: the first caller waits for no more than it asked for


class BufferPool:
    """Buffers of one size for sinks, at most `idle_count` kept idle. Usable from all threads.

    How many exist at once is bounded by the number of threads that are receiving, each has one.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES, idle_count: int = IDLE_BUFFERS) -> None:
        self.buffer_bytes = buffer_bytes
        self._idle: deque[bytearray] = deque(maxlen=idle_count)

    def take(self) -> bytearray:
        try:
            return self._idle.pop()
        except IndexError:
            return bytearray(self.buffer_bytes)

    def give(self, memory: bytearray) -> None:
        assert len(memory) == self.buffer_bytes
        self._idle.append(memory)


BUFFERS = BufferPool()


class FileSink:
    """A Sink (see tiers/tier.py) that puts [offset, offset + length) of an object into its hot file.

    A byte that `received_bytes` counts can be read from the file. `on_progress(received_bytes)` is then called,
    in the receiving thread: it must be cheap and must not raise.

    The first buffer is small and each one after it twice as large, up to the pool's: the first caller gets his bytes early, the
    rest costs few system calls. A view that `buffer` lent is released by `advance`: a tier that keeps using it gets a ValueError.

    `close` may come from any thread, more than once, and never waits. A write that is then under way may still land,
    in this file and in this range only.
    """

    def __init__(
        self,
        file: HotFile,
        offset: int,
        length: int,
        *,
        on_progress: Callable[[int], None] | None = None,
        pool: BufferPool = BUFFERS,
    ) -> None:
        assert offset >= 0
        assert length > 0
        assert offset + length <= file.size_bytes
        self.file = file
        self.offset = offset
        self.length = length
        self._pool = pool
        self._on_progress = on_progress
        self._hash = xxhash.xxh3_64()
        self._received = 0
        self._lend_bytes = min(FIRST_BUFFER_BYTES, pool.buffer_bytes)
        self._memory: bytearray | None = None
        self._loan: memoryview | None = None
        self._closed = False
        self._at_disk = False
        self._place: FilePlace | None = None
        self._landed_digest: int | None = None

    @property
    def at_disk(self) -> bool:
        """Is the thread that fills inside an operation of the cache disk? When its read was given up, that is what hangs."""
        return self._at_disk or (self._place is not None and self._place.is_stuck)

    @property
    def received_bytes(self) -> int:
        return self._received

    @property
    def digest(self) -> int | None:
        """xxh3-64 of what was received: the chunk's digest when that was all of it, from its start. Ask after the read.

        None when bytes landed in more than one go: nobody has hashed all of them.
        """
        return self._hash.intdigest() if self._place is None else self._landed_digest

    def buffer(self, wanted_bytes: int) -> memoryview:
        if self._closed:
            raise SinkClosed(f"nobody waits any more for {self.file.path}")
        room_bytes = min(wanted_bytes, self._lend_bytes, self.length - self._received)
        assert room_bytes > 0, "a tier sent more bytes than were asked for"
        if self._memory is None:
            self._at_disk = True
            self.file.ensure()
            self._at_disk = False
            self._memory = self._pool.take()
        self._loan = memoryview(self._memory)[:room_bytes]
        return self._loan

    def advance(self, count: int) -> None:
        if self._closed:
            raise SinkClosed(f"nobody waits any more for {self.file.path}")
        loan, memory = self._loan, self._memory
        assert loan is not None, "advance without a buffer"
        assert memory is not None
        assert 0 <= count <= len(loan)
        with loan[:count] as piece:
            self._at_disk = True
            _write(self.file, piece, self.offset + self._received)
            self._at_disk = False
            self._hash.update(piece)
        loan.release()
        self._loan = self._memory = None
        self._pool.give(memory)
        self._lend_bytes = min(2 * self._lend_bytes, self._pool.buffer_bytes)
        self._received += count
        report = self._on_progress
        if report is not None:
            report(self._received)

    def place(self, length: int) -> Place:
        if self._closed:
            raise SinkClosed(f"nobody waits any more for {self.file.path}")
        assert self._received + length <= self.length, "a tier is about to send more bytes than were asked for"
        is_alone = self.offset == 0 and self.length == self.file.size_bytes
        self._place = FilePlace(self.file, self.offset + self._received, is_alone=is_alone)
        return self._place

    def landed(self, count: int, digest: int | None = None) -> None:
        if self._closed:
            raise SinkClosed(f"nobody waits any more for {self.file.path}")
        assert self._place is not None, "landed without a place"
        self._received += count
        is_one_go = self._place.offset == self.offset and self._received == self.length
        self._landed_digest = digest if is_one_go else None
        report = self._on_progress
        if report is not None:
            report(self._received)

    def close(self) -> None:
        """Also lets go of who listens: he holds this sink, and in a cycle the file would stay open until the garbage collector
        comes by (measured: 110 MB of evicted files beside a limit of 200 MB)."""
        self._closed = True
        self._on_progress = None
        if self._place is not None:
            self._place.is_closed = True


def put(place: Place, views: Sequence[memoryview], position: int = 0) -> None:
    """Put bytes that are in memory already where they belong, from `position` in the place on: one copy, where `buffer` and
    `advance` need two. Blocks.

    For a tier that has verified them, and tells the sink on the event loop that they have landed. Raises HotFull, HotSick, and
    SinkClosed soon after the sink was closed.
    """
    if not isinstance(place, FilePlace):
        for view in views:
            place[position : position + len(view)] = view
            position += len(view)
        return
    offset = place.offset + position
    place.is_stuck = True
    try:
        place.file.ensure()
        for view in views:
            for begin in range(0, len(view), WRITE_BYTES):
                if place.is_closed:
                    raise SinkClosed(f"nobody waits any more for {place.file.path}")
                _write(place.file, view[begin : begin + WRITE_BYTES], offset + begin)
            offset += len(view)
    finally:
        place.is_stuck = False


def _write(file: HotFile, piece: memoryview, offset: int) -> None:
    done = 0
    while done < len(piece):
        try:
            written = os.pwrite(file.fd, piece[done:], offset + done)
        except OSError as error:
            raise refusal(error, "write", file.path) from error
        if written == 0:
            raise HotSick(f"{file.path} takes no bytes at offset {offset + done}", hint="check the disk (kernel log)")
        done += written
