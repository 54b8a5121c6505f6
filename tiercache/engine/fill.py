"""Filling: one chunk of one object, fetched once whoever asks for it, and handed out while it arrives.

A `Fill` is the only thing that writes a chunk. It starts at the offset that the first caller wanted, goes to the end of
the chunk and then fetches what lies before; every caller is answered as soon as *its* bytes are there. The bytes go
straight into their place in the hot file; when the hot tier cannot take the chunk (full, pinned, sick) they
go into memory instead, past the hot tier, and the last few such chunks are kept for the readers that follow.

Why not one request a read: eight processes that read one cold file would fetch it eight times, and 128 KiB requests
pay a round trip each. Why not wait for the whole chunk: the first byte would cost 8 MiB of bandwidth.

Interleaving: `_fills` maps (object, chunk) to the running fill; it is entered before the first await and left after the
chunk is committed or the fill has failed, so between two awaits a chunk is present, being filled, or absent.
A fill belongs to the engine, not to its first caller: a cancelled caller leaves it running for the others, and its end is
bounded by the cold tier's deadline. It is a task, or for a small object, as long as nothing fails, not even that (`_begin`).
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable

import trio

from tiercache.core.chunk import fill_ranges
from tiercache.core.record import ObjectId
from tiercache.engine.held import Held
from tiercache.engine.holdings import Holdings
from tiercache.engine.source import Source
from tiercache.errors import HotFull, HotSick, HotTierError, TiercacheError, Unavailable
from tiercache.tiers.begun import Begun
from tiercache.tiers.hot import HotFile, Placed, hash_range
from tiercache.tiers.sink import FileSink
from tiercache.tiers.space import Reservation
from tiercache.tiers.tier import MemorySink, Sink, SinkClosed

Key = tuple[ObjectId, int]

MEMORY_BYTES = 64 << 20
"""What chunks streamed past the hot tier may occupy together, running and kept."""

VERIFIED_BYTES = 1 << 20
"""Objects up to this size are answered only when all of them has come: a tier can then check them against the
store's own checksum (MD5 ETag) before anybody sees a byte, at the cost of less than a millisecond."""


LOOK_SECONDS = 1.0
END_SECONDS = 1.0
"""For what was begun without a task to end when the daemon stops; only what a disk holds up takes longer."""


class Fill:
    """One chunk on its way. `start` is where it began; bytes before it come in a second range. `ended` is called at its end."""

    def __init__(self, held: Held, chunk: int, start: int, *, background: bool) -> None:
        self.held = held
        self.chunk = chunk
        self.background = background
        self.tier = ""
        self._verifies = held.ref.size_bytes <= VERIFIED_BYTES
        first = held.span(chunk)[0] if self._verifies else start  # a checksum is that of one range with everything in it
        self.ranges = fill_ranges(held.ref.size_bytes, held.chunk_bytes, chunk, first)
        self.error: TiercacheError | None = None
        self.done = trio.Event()
        self.memory: list[MemorySink] | None = None
        self.file: HotFile | None = None
        self.confirmed = trio.Event()
        self.begun: Begun | None = None
        self.ended: Callable[[], None] | None = None
        self._sinks: list[MemorySink | FileSink] = []
        self._token = trio.lowlevel.current_trio_token()
        self._loop_ident = threading.get_ident()
        self._waiting: list[tuple[int, int, trio.Event]] = []

    @property
    def is_small(self) -> bool:
        """All of a small object: one range, nothing of which is answered before its end."""
        return self._verifies and self.held.chunk_count == 1

    def add(self, sink: MemorySink | FileSink) -> None:
        self._sinks.append(sink)

    def asking(self, tier: str) -> None:
        self.tier = tier

    def restart(self) -> None:
        self._sinks = []

    @property
    def received_bytes(self) -> int:
        return sum(sink.received_bytes for sink in self._sinks)

    def covers(self, offset: int, length: int) -> bool:
        """Have the bytes [offset, offset + length) of the object, all of this chunk, arrived?"""
        if self._verifies and not self.done.is_set():
            return False
        for position, (begin, size) in enumerate(self.ranges):
            low, high = max(offset, begin), min(offset + length, begin + size)
            arrived = self._sinks[position].received_bytes if position < len(self._sinks) else 0
            if low < high and high > begin + arrived:
                return False
        return True

    async def wait(self, offset: int, length: int) -> None:
        """Until these bytes are there. Raises what the fill failed with."""
        while not self.covers(offset, length):
            if self.done.is_set():
                self.check()
                raise AssertionError("a fill that ended well covers its chunk")
            event = trio.Event()
            self._waiting.append((offset, length, event))
            if not self.covers(offset, length):  # else they came just now, before the thread that receives could see who waits
                await event.wait()

    def progressed(self, _received_bytes: int) -> None:
        """Called in the thread that receives, or on the event loop: wakes the loop only if there is somebody to wake."""
        if self._verifies:
            return  # nobody is answered before the end
        if self._waiting or not self.confirmed.is_set():
            if threading.get_ident() == self._loop_ident:
                self._wake()
            else:
                self._token.run_sync_soon(self._wake, idempotent=True)

    def _wake(self) -> None:
        self.confirmed.set()
        still = []
        for offset, length, event in self._waiting:
            if self.done.is_set() or self.covers(offset, length):
                event.set()
            else:
                still.append((offset, length, event))
        self._waiting = still

    def check(self) -> None:
        """Raises what the fill failed with, if it has failed."""
        if self.error is not None:
            raise copy.copy(self.error)

    def finish(self, error: TiercacheError | None) -> None:
        self.error = None if error is None else error.with_traceback(None)  # its frames hold this fill
        self.done.set()
        self._wake()
        ended, self.ended = self.ended, None
        if ended is not None:
            ended()


class Filler:
    """All fills of the daemon. `source(dataset)` tells where a dataset's bytes come from below the hot tier."""

    def __init__(
        self,
        nursery: trio.Nursery,
        holdings: Holdings,
        source: Callable[[str], Source],
        *,
        streamed: Callable[[str, str, int], None],
        filled: Callable[[str], None],
        failed: Callable[[str, TiercacheError], None],
    ) -> None:
        self._nursery = nursery
        self._holdings = holdings
        self._source = source
        self._streamed = streamed
        self._filled = filled
        self._failed = failed
        self._fills: dict[Key, Fill] = {}
        self._begun: set[Fill] = set()
        self._begun_ended = trio.Event()
        self._is_looking = False
        self._kept: OrderedDict[Key, Fill] = OrderedDict()
        half_bytes = max(MEMORY_BYTES // 2, holdings.chunk_bytes)
        self._memory_free_bytes = half_bytes
        self._kept_limit_bytes = half_bytes
        self._kept_bytes = 0

    def running(self, object_id: ObjectId, chunk: int) -> Fill | None:
        """The fill that has or will have the chunk's bytes: one that runs, or one kept in memory past the hot tier."""
        key = (object_id, chunk)
        fill = self._fills.get(key)
        if fill is None and (fill := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return fill

    @property
    def running_count(self) -> int:
        return len(self._fills)

    def start(self, held: Held, chunk: int, start: int, *, background: bool = False) -> Fill:
        """Begin to fetch a chunk that is neither present nor on its way."""
        key = (held.ref.object_id, chunk)
        assert key not in self._fills
        fill = self._fills[key] = Fill(held, chunk, start, background=background)
        held.users += 1
        held.filling_count += 1
        if not (fill.is_small and self._begin(key, fill)):
            self._nursery.start_soon(self._run, key, fill, None)
        return fill

    async def read(self, fill: Fill, offset: int, length: int, *, may_place: bool = False) -> bytes | Placed:
        """Bytes of the fill's chunk, or (`may_place`) where they lie, as soon as they are there. Raises what it failed with.

        HotFull or HotSick: they have arrived, but the disk does not give them back.
        """
        while True:
            await fill.wait(offset, length)
            if fill.memory is not None:
                return b"".join(_cut(fill, offset, length))
            assert fill.file is not None
            try:
                return await self._holdings.disks.read(fill.file, offset, length, may_place=may_place)
            except HotTierError:
                if fill.memory is None:
                    raise

    # -- a small object, without a task

    def _begin(self, key: Key, fill: Fill) -> bool:
        """Fill without a task, if nothing has to be waited for (`tiers/begun.py`). What goes wrong goes on in one."""
        held, holdings = fill.held, self._holdings
        if not held.is_loaded or held.opening.locked() or fill.chunk in held.unverified or held.has(fill.chunk):
            return False
        try:
            file = holdings.begin_loaded(held)
            reservation = holdings.room.reserve(*holdings.lacking(held, fill.chunk))
        except HotTierError:
            return False
        sink = FileSink(file, 0, held.ref.size_bytes)

        def ended(error: Exception | None) -> None:
            self._begun.discard(fill)
            fill.begun = None
            if not self._begun:
                self._begun_ended.set()
            if error is not None:
                self._nursery.start_soon(self._run, key, fill, (sink, reservation))
                return
            assert sink.digest is not None, "it has landed in one go"
            sink.close()
            self._commit(fill, sink.digest, reservation)
            self._end(key, fill, None)

        source = self._source(held.ref.dataset)
        begun = source.begin(held.ref, sink, background=fill.background, asking=fill.asking, ended=ended)
        if begun is None:
            sink.close()
            reservation.cancel()
            return False
        held.past = False
        fill.file, fill.begun = file, begun
        fill.add(sink)
        self._begun.add(fill)
        if not self._is_looking:
            self._is_looking = True
            self._nursery.start_soon(self._look)
        return True

    async def _look(self) -> None:
        """Look after what was begun without a task: that it ends in time, and with the nursery."""
        try:
            while self._begun:
                await trio.sleep(LOOK_SECONDS)
                for fill in list(self._begun):
                    assert fill.begun is not None
                    fill.begun.look()
        finally:
            self._is_looking = False
            if self._begun:
                self._begun_ended = trio.Event()
                for fill in self._begun:
                    assert fill.begun is not None
                    fill.begun.cancel()
                with trio.move_on_after(END_SECONDS, shield=True):
                    await self._begun_ended.wait()
                for fill in list(self._begun):
                    assert fill.begun is not None
                    fill.begun.abandon()

    # -- by a task

    async def _run(self, key: Key, fill: Fill, failed: tuple[FileSink, Reservation] | None) -> None:
        """`failed`: what was begun without a task."""
        error: TiercacheError | None = None
        try:
            try:
                await self._into_file(fill, failed)
            except HotTierError as why:
                await self._past(key, fill, why)
        except TiercacheError as failure:
            error = failure
            self._failed(fill.tier, failure)
        finally:
            self._end(key, fill, error)

    def _end(self, key: Key, fill: Fill, error: TiercacheError | None) -> None:
        del self._fills[key]
        fill.held.filling_count -= 1
        fill.finish(error or _stopped(fill))
        self._holdings.release(fill.held)

    def _commit(self, fill: Fill, digest: int, reservation: Reservation) -> None:
        self._holdings.commit_chunk(fill.held, fill.chunk, digest, reservation)
        fill.held.brought[fill.chunk] = fill.tier
        self._drop_kept((fill.held.ref.object_id, fill.chunk))
        self._filled(fill.tier)

    async def _fetch(self, fill: Fill, offset: int, length: int, sink: Sink) -> None:
        ref = fill.held.ref
        source = self._source(ref.dataset)
        await source.read(ref, offset, length, sink, background=fill.background, asking=fill.asking)

    async def _into_file(self, fill: Fill, failed: tuple[FileSink, Reservation] | None) -> None:
        held, chunk, holdings = fill.held, fill.chunk, self._holdings
        if failed is None:
            fill.file = file = await holdings.begin(held)
            if chunk in held.unverified:
                holdings.drop_chunk(held, chunk)
            if held.has(chunk):  # the object could be loaded only now
                fill.ranges = []
                fill.tier = "hot"
                return
            if self._source(held.ref.dataset).in_trouble:  # what is hot is not given up for bytes that may never come
                reservation = holdings.room.reserve(*holdings.lacking(held, chunk))
            else:
                reservation = await holdings.reserve(held, chunk)
            sinks = [FileSink(file, offset, length, on_progress=fill.progressed) for offset, length in fill.ranges]
        else:
            sinks, reservation = [failed[0]], failed[1]
            fill.file = file = sinks[0].file
        held.past = False
        finished = False
        fill.restart()
        try:
            for sink in sinks:
                fill.add(sink)
                await self._fetch(fill, sink.offset, sink.length, sink)
            known = sinks[0].digest if len(sinks) == 1 else None
            if known is None:
                digest = await holdings.disks.run(file.directory, hash_range, file, *held.span(chunk))
            else:
                digest = known
            finished = True
        except HotSick as error:
            holdings.disks.failed(file.directory, error)
            raise
        except Unavailable as error:
            if not any(sink.at_disk for sink in sinks):
                raise
            sick = HotSick(f"hot directory {file.directory} did not take bytes in time")
            holdings.disks.failed(file.directory, sick)
            raise sick from error
        finally:
            for sink in sinks:
                sink.close()
            if finished:
                self._commit(fill, digest, reservation)
            else:
                holdings.abandon_chunk(held, chunk, fill.received_bytes, reservation)

    async def _past(self, key: Key, fill: Fill, why: HotTierError) -> None:
        """Fill the chunk into memory. Raises `why` when there is no memory for it: readers then fetch their extents alone.

        Waiting for memory instead would add up the deadlines of all who wait when a store does not answer.
        """
        size_bytes = sum(length for _, length in fill.ranges)
        if size_bytes > self._memory_free_bytes:
            raise why
        self._memory_free_bytes -= size_bytes
        try:
            await self._into_memory(fill)
        finally:
            self._memory_free_bytes += size_bytes
        self._streamed(fill.held.ref.dataset, "full" if isinstance(why, HotFull) else "sick", fill.received_bytes)
        self._drop_kept(key)
        self._kept[key] = fill
        self._kept_bytes += fill.received_bytes
        while self._kept_bytes > self._kept_limit_bytes:
            self._drop_kept(next(iter(self._kept)))

    def _drop_kept(self, key: Key) -> None:
        if (fill := self._kept.pop(key, None)) is not None:
            self._kept_bytes -= fill.received_bytes

    async def _into_memory(self, fill: Fill) -> None:
        fill.restart()
        fill.held.past = True
        fill.memory = []
        fill.file = None  # a kept fill must not keep the blocks of a file that is evicted meanwhile
        for offset, length in fill.ranges:
            sink = _ProgressSink(length, fill.progressed)
            fill.memory.append(sink)
            fill.add(sink)
            try:
                await self._fetch(fill, offset, length, sink)
            finally:
                sink.close()


class _ProgressSink(MemorySink):
    """A memory sink that tells how far it is."""

    def __init__(self, capacity_bytes: int, on_progress: Callable[[int], None]) -> None:
        super().__init__(capacity_bytes)
        self._on_progress: Callable[[int], None] | None = on_progress

    def buffer(self, wanted_bytes: int) -> memoryview:
        return super().buffer(min(wanted_bytes, 1 << 20))

    def advance(self, count: int) -> None:
        super().advance(count)
        report = self._on_progress
        if report is not None:
            report(self.received_bytes)

    def close(self) -> None:
        """Lets go of the fill, which holds this sink: see `FileSink.close`."""
        super().close()
        self._on_progress = None


def _cut(fill: Fill, offset: int, length: int) -> list[memoryview]:
    assert fill.memory is not None
    pieces = []
    for (begin, size), sink in sorted(zip(fill.ranges, fill.memory, strict=False), key=lambda pair: pair[0]):
        low, high = max(offset, begin), min(offset + length, begin + size)
        if low < high:
            pieces.append(sink.view[low - begin : high - begin])
    return pieces


def _stopped(fill: Fill) -> TiercacheError | None:
    """What waiters get when the fill was cancelled (the daemon stops) before it had everything."""
    wanted = sum(length for _, length in fill.ranges)
    return None if fill.received_bytes == wanted else SinkClosed("the daemon is stopping")
