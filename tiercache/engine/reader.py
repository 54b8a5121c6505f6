"""The way of a read: open, read, release of one file, from the hot file if it is there, else by a fill, else past the hot tier.

    read(inode, offset, length)
      chunk present            -> hot file (page cache without a thread, else a thread)
      chunk on its way         -> wait until these bytes have come, read them from their place
      chunk absent             -> core.admission decides: FILL starts a fill and waits, PASS fetches only the extent
    afterwards core.prefetch says which chunks of the stream to start next, and core.admission whether the whole file
    is worth promoting.

A handle is the inode number: it means the same to a successor of this process. An inode is one version of a file for
ever, so what an open handle sees never changes under it: bytes of its version that can no longer be had are
VersionChanged (ESTALE), never bytes of the next one.

`open` of a file that is not complete confirms the version first, or a reader of metadata that is still within its TTL
would open an old version and fail at its first read: a small file by starting its fill (the GET that is
needed anyway), a large one by asking for its metadata again when that is older than a second. What has changed is
answered with VersionChanged, on which the kernel looks the name up again and opens the new version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import structlog
import trio

from tiercache.core.admission import Admit, Miss, Touches, admit, pass_extent, promote_rest, touches_capacity
from tiercache.core.chunk import chunks_of
from tiercache.core.prefetch import Budget, Run, Streams, plan
from tiercache.core.record import Entry, Inode, ObjectId, ObjectRef
from tiercache.engine.disks import find_resident
from tiercache.engine.fill import Fill, Filler
from tiercache.engine.held import Held
from tiercache.engine.holdings import Holdings
from tiercache.engine.namespace import Namespace
from tiercache.engine.publication import Publication
from tiercache.engine.small_files import Answer, SmallFiles
from tiercache.engine.source import Source
from tiercache.errors import HotFull, HotSick, HotTierError, NotFound, TiercacheError, Unavailable, VersionChanged
from tiercache.tiers.hot import Placed, hash_range
from tiercache.tiers.tier import MemorySink

log = structlog.get_logger()

CONFIRM_SECONDS = 1.0
CONFIRM_WAIT_SECONDS = 2.0
REFUSAL_SECONDS = 1.0
"""For so long after a read waited in vain, the next ones of its dataset fail at once, unless the store has answered since.
The kernel repeats a failed read-ahead page by page, and keeps all but twelve waiting reads back: each would wait for the whole
deadline again, one after another."""


class Observer(Protocol):
    """What the reader reports; the daemon connects it to the metrics."""

    def opened(self, dataset: str, is_hit: bool) -> None: ...

    def read_done(self, dataset: str, tier: str, count: int, seconds: float) -> None: ...

    def streamed(self, dataset: str, reason: str, count: int) -> None: ...

    def read_ahead(self, count: int) -> None: ...

    def verify_failed(self, ref: ObjectRef) -> None: ...

    def fetched_by_open(self, dataset: str, tier: str, count: int) -> None: ...

    def opened_natively(self, dataset: str, count: int, opened_bytes: int, read_bytes: int) -> None: ...


class OpenFile:
    """One inode that is open, however often."""

    def __init__(self, entry: Entry, held: Held, max_window_bytes: int) -> None:
        self.entry = entry
        self.held = held
        self.opens = 0
        self.ahead_bytes = 0
        self.is_published = False
        self.streams = Streams(max_window_bytes=max_window_bytes)


class Reader:
    def __init__(
        self,
        nursery: trio.Nursery,
        namespace: Namespace,
        holdings: Holdings,
        filler: Filler,
        source: Callable[[str], Source],
        observer: Observer,
        *,
        clock: Callable[[], float],
        promote: Callable[[ObjectRef], None],
        whole_file_bytes: int,
        read_ahead_bytes: int,
        publication: Publication,
    ) -> None:
        self._nursery = nursery
        self._namespace = namespace
        self._holdings = holdings
        self._filler = filler
        self._source = source
        self._observer = observer
        self._clock = clock
        self._promote = promote
        self._whole_file_bytes = whole_file_bytes
        self._window_bytes = min(read_ahead_bytes // 2, 16 * holdings.chunk_bytes)
        self._publication = publication
        self._budget = Budget(read_ahead_bytes)
        self._small = SmallFiles(self, namespace, holdings, filler, publication, self._budget)
        self._touches = Touches(touches_capacity(holdings.room.capacity_bytes, holdings.chunk_bytes))
        self._refusals: dict[str, tuple[float, str]] = {}
        self._opened: dict[Inode, OpenFile] = {}
        self._strangers: set[Inode] = set()
        self._verifying: dict[tuple[ObjectId, int], trio.Event] = {}

    # -- open and release

    async def open(self, inode: Inode) -> bool:
        """True: this open is the publication's, and no read or release of it will come here.

        Raises VersionChanged when the inode is not what its name leads to any more, and any TierError.
        """
        entry = self._namespace.entry(inode)
        if entry is None or not self._namespace.is_current(entry):
            raise VersionChanged(f"inode {inode} is not the present version")
        self._small.opened(entry)
        held = await self._holdings.acquire(entry.ref)
        is_hit = held.complete
        try:
            if not held.complete:  # also when others have it open: they may hold a version that is gone
                await self._confirm(entry, held)
        except BaseException:
            self._holdings.release(held)
            raise
        if held.file is not None:
            self._holdings.touch(held.ref.object_id, int(self._clock()), 1)
        self._observer.opened(entry.dataset, is_hit)
        self._publish(entry, held)
        if self._publication.hand_over(entry):
            if not is_hit:
                self._observer.fetched_by_open(entry.dataset, held.origin(0), entry.size_bytes)
            self._holdings.release(held)
            return True
        file = self._opened.get(inode)
        if file is None:
            file = self._opened[inode] = OpenFile(entry, held, self._window_bytes)
        else:
            self._holdings.release(held)
        file.opens += 1
        return False

    def open_small(self, inode: Inode, answer: Answer) -> bool:
        """`open` without a task, where it is one of a small cold file. False: it is not, or something has to be waited for."""
        return self._small.open(inode, answer)

    def in_trouble(self, dataset: str) -> bool:
        return self._source(dataset).in_trouble

    def is_only_cold(self, ref: ObjectRef) -> bool:
        return self._source(ref.dataset).is_only_cold(ref)

    def opened_small(self, entry: Entry, held: Held) -> None:
        self._holdings.touch(held.ref.object_id, int(self._clock()), 1)
        self._observer.opened(entry.dataset, False)
        self._observer.fetched_by_open(entry.dataset, held.origin(0), entry.size_bytes)

    def fetched_ahead(self, count: int) -> None:
        self._observer.read_ahead(count)

    def _publish(self, entry: Entry, held: Held) -> bool:
        """Trust before publication: complete, every chunk hashed, and verified since the last unclean boot."""
        if held.file is None or not held.complete or held.unverified:
            return False
        return self._publication.publish(entry, held.file.directory)

    async def adopt(self) -> None:
        """Take over what a predecessor left open, before any request is served."""
        for entry, daemon_count in self._publication.still_open():
            if daemon_count:
                await self._adopt(entry, daemon_count)

    async def _adopt(self, entry: Entry, opens: int) -> OpenFile:
        held = await self._holdings.acquire(entry.ref)
        file = self._opened.get(entry.inode)
        if file is not None:
            self._holdings.release(held)
            return file
        file = self._opened[entry.inode] = OpenFile(entry, held, self._window_bytes)
        file.opens = opens
        return file

    def release(self, inode: Inode) -> None:
        file = self._opened.get(inode)
        if file is None:
            return
        file.opens -= 1
        if file.opens == 0:
            del self._opened[inode]
            file.held.brought.clear()
            self._holdings.release(file.held)

    @property
    def open_count(self) -> int:
        return len(self._opened)

    async def _confirm(self, entry: Entry, held: Held) -> None:
        try:
            if held.chunk_count == 1 or (entry.archived and not held.has(0)):  # few listings tell what was restored: a GET does
                fill = self._filler.running(entry.object_id, 0) or self._filler.start(held, 0, 0)
                await fill.confirmed.wait()
                if not isinstance(fill.error, HotTierError):  # the hot tier's trouble is no reason not to open: reads go past it
                    fill.check()
            elif self._namespace.age_seconds(entry) > CONFIRM_SECONDS and not self._source(entry.dataset).has_warm(entry.ref):
                now = None
                try:
                    with trio.move_on_after(CONFIRM_WAIT_SECONDS):
                        now = await self._namespace.revalidate(entry)
                except Unavailable:
                    now = None
                if now is None:
                    return  # what is hot of it can still be read; what is not will say so
                if now.inode != entry.inode:
                    raise VersionChanged(f"{entry.key} was overwritten")
        except (VersionChanged, NotFound) as error:
            await self._look_again(entry)
            raise VersionChanged(str(error)) from error

    async def _notice_change(self, entry: Entry) -> None:
        """A read found out that the version is gone: the next open must not be led to it again. Best effort."""
        try:
            await self._look_again(entry)
        except TiercacheError as error:
            log.info("changed_object_not_looked_up", dataset=entry.dataset, key=entry.key, error=error.line)

    async def _look_again(self, entry: Entry) -> None:
        if not self._namespace.is_current(entry):
            return
        try:
            await self._namespace.revalidate(entry)
        except NotFound:
            return

    # -- read

    async def read(self, inode: Inode, offset: int, length: int) -> bytes:
        """The bytes of the inode's version; short only at the end of the file. Raises TierError."""
        data = await self._find(inode, offset, length, may_place=False)
        assert isinstance(data, bytes)
        return data

    async def find(self, inode: Inode, offset: int, length: int) -> bytes | Placed:
        """Like `read`, but bytes that lie in a hot file may be left there, to be read before the caller waits for anything."""
        return await self._find(inode, offset, length, may_place=True)

    async def _find(self, inode: Inode, offset: int, length: int, *, may_place: bool) -> bytes | Placed:
        began = time.perf_counter()
        file = self._opened.get(inode) or await self._stranger(inode)
        size = file.entry.size_bytes
        if offset >= size or length <= 0:
            return b""
        length = min(length, size - offset)
        held = file.held
        data = self._resident(held, offset, length, may_place) if held.complete and not held.unverified else None
        if data is not None:
            tier = held.origin(offset // held.chunk_bytes)
        else:
            self._refuse_in_vain(held, began, chunks_of(offset, length, held.chunk_bytes))
            run = file.streams.observe(offset, length)
            try:
                data, tier = await self._assemble(held, run, offset, length, may_place)
            except (VersionChanged, NotFound) as error:
                await self._notice_change(file.entry)
                raise VersionChanged(str(error)) from error
            except Unavailable as error:
                now = time.perf_counter()
                if now - began > REFUSAL_SECONDS:
                    self._refusals[held.ref.dataset] = now + REFUSAL_SECONDS, str(error)
                raise
            if not held.complete:
                self._look_ahead(file, run)
        if held.complete and not file.is_published:
            file.is_published = self._publish(file.entry, held)  # its next reads need not come here
        self._observer.read_done(file.entry.dataset, tier, len(data), time.perf_counter() - began)
        return data

    async def _stranger(self, inode: Inode) -> OpenFile:
        """A file that was not opened here: the publication gives back a read of what was withdrawn, or cannot be read any more.

        It is kept until the publication has no open of it (`harvest`).
        """
        entry = self._namespace.entry(inode)
        if entry is None:
            entry = next((left.entry for left in self._publication.still_open() if left.entry.inode == inode), None)
        if entry is None:
            raise VersionChanged(f"inode {inode} is not known any more")
        self._strangers.add(inode)
        return await self._adopt(entry, 1)

    def harvest(self) -> None:
        """Note what was opened natively: for eviction, and for the counters."""
        for use in self._publication.harvest():
            if use.open_count:
                self._holdings.touch(use.object_id, use.used_seconds, use.open_count)
            self._observer.opened_natively(use.dataset, use.open_count, use.open_count * use.size_bytes, use.bytes_read)
        for inode in list(self._strangers):
            file = self._opened.get(inode)
            if file is None or not self._publication.uses(file.held.ref.object_id):
                self._strangers.discard(inode)
                self.release(inode)

    def _refuse_in_vain(self, held: Held, now: float, chunks: Iterable[int]) -> None:
        """Raises Unavailable if a read of the dataset failed a moment ago, nothing came since, and this one needs bytes too."""
        until, message = self._refusals.get(held.ref.dataset, (0.0, ""))
        if now < until and self._source(held.ref.dataset).in_trouble and not all(held.has(chunk) for chunk in chunks):
            raise Unavailable(message)

    def _resident(self, held: Held, offset: int, length: int, may_place: bool) -> bytes | Placed | None:
        try:
            return find_resident(held.file, offset, length, may_place=may_place) if held.file is not None else None
        except HotSick:
            return None  # the longer way deals with it

    async def _assemble(self, held: Held, run: Run, offset: int, length: int, may_place: bool) -> tuple[bytes | Placed, str]:
        chunks = chunks_of(offset, length, held.chunk_bytes)
        if len(chunks) == 1:
            return await self._piece(held, run, chunks[0], offset, length, may_place)
        pieces, slowest = [], "hot"
        for chunk in chunks:
            begin, size = held.span(chunk)
            low, high = max(offset, begin), min(offset + length, begin + size)
            piece, tier = await self._piece(held, run, chunk, low, high - low, may_place=False)
            assert isinstance(piece, bytes)
            pieces.append(piece)
            slowest = tier if tier != "hot" else slowest
        return b"".join(pieces), slowest

    async def _piece(
        self, held: Held, run: Run, chunk: int, offset: int, length: int, may_place: bool
    ) -> tuple[bytes | Placed, str]:
        while True:
            if held.has(chunk):
                try:
                    if chunk in held.unverified and not await self._verify(held, chunk):
                        continue
                    assert held.file is not None
                    data = await self._holdings.disks.read(held.file, offset, length, may_place=may_place)
                    return data, held.origin(chunk)
                except (HotFull, HotSick):
                    return await self._past(held, offset, length, "sick")
            fill = self._filler.running(held.ref.object_id, chunk)
            if fill is None:
                miss = self._miss(held, run, chunk, offset, length)
                verdict = admit(miss, self._whole_file_bytes)
                self._touches.record(held.ref.object_id, miss, verdict, self._clock())
                if verdict is Admit.PASS:
                    return await self._past(held, offset, length, "admission", pass_extent(miss))
                fill = self._filler.start(held, chunk, offset)
                self._consider_promotion(held, run)
            try:
                return await self._filler.read(fill, offset, length, may_place=may_place), fill.tier
            except (HotFull, HotSick):
                return await self._past(held, offset, length, "sick")

    def _miss(self, held: Held, run: Run, chunk: int, offset: int, length: int) -> Miss:
        before = chunk - 1
        neighbour = before >= 0 and (held.has(before) or self._filler.running(held.ref.object_id, before) is not None)
        return Miss(
            size_bytes=held.ref.size_bytes,
            chunk_bytes=held.chunk_bytes,
            chunk=chunk,
            offset=offset,
            length=length,
            run_bytes=run.run_bytes,
            neighbour=neighbour,
            scarce=self._holdings.room.scarce,
            past=self._touches.recall(held.ref.object_id, chunk, self._clock()),
        )

    async def _past(
        self, held: Held, offset: int, length: int, reason: str, extent: tuple[int, int] | None = None
    ) -> tuple[bytes, str]:
        begin, size = extent or (offset, length)
        sink = MemorySink(size)
        tier = await self._source(held.ref.dataset).read(held.ref, begin, size, sink, background=False)
        self._observer.streamed(held.ref.dataset, reason, size)
        return bytes(sink.view[offset - begin : offset - begin + length]), tier

    async def _verify(self, held: Held, chunk: int) -> bool:
        """Hash a chunk that was written before an unclean boot; False (and the chunk dropped) when it is damaged."""
        key = (held.ref.object_id, chunk)
        while (running := self._verifying.get(key)) is not None:
            await running.wait()
        if chunk not in held.unverified:
            return held.has(chunk)
        assert held.file is not None
        self._verifying[key] = trio.Event()
        try:
            digest = await self._holdings.disks.run(held.file.directory, hash_range, held.file, *held.span(chunk))
        finally:
            self._verifying.pop(key).set()
        if chunk not in held.unverified:
            return held.has(chunk)
        if digest == held.unverified[chunk]:
            self._holdings.verified(held, chunk)
            return True
        self._observer.verify_failed(held.ref)
        self._holdings.drop_chunk(held, chunk)
        return False

    # -- ahead of the reader

    def _look_ahead(self, file: OpenFile, run: Run) -> None:
        held = file.held
        if held.past:
            run = msgspec.structs.replace(run, window_bytes=min(run.window_bytes, held.chunk_bytes))
        object_id = held.ref.object_id

        def known(chunk: int) -> bool:
            return held.has(chunk) or self._filler.running(object_id, chunk) is not None

        for chunk in plan(run, held.ref.size_bytes, held.chunk_bytes, known):
            begin, size = held.span(chunk)
            granted_bytes = self._budget.grant(size, file.ahead_bytes)
            if granted_bytes < size:
                self._budget.give_back(granted_bytes)
                return
            file.ahead_bytes += granted_bytes
            self._observer.read_ahead(granted_bytes)
            self._nursery.start_soon(self._until_done, file, self._filler.start(held, chunk, begin), granted_bytes)

    async def _until_done(self, file: OpenFile, fill: Fill, granted_bytes: int) -> None:
        try:
            await fill.done.wait()
        finally:
            file.ahead_bytes -= granted_bytes
            self._budget.give_back(granted_bytes)

    def _consider_promotion(self, held: Held, run: Run) -> None:
        if held.chunk_count < 2 or held.past:
            return
        if self._holdings.room.scarce and run.run_bytes < held.chunk_bytes:
            return  # somebody else's copy would have to go for a file that may only be looked into
        present_count = held.present_count + held.filling_count
        if promote_rest(held.ref.size_bytes, held.chunk_bytes, present_count, run.run_bytes, self._whole_file_bytes):
            self._promote(held.ref)
