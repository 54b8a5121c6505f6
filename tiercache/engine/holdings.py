"""What the hot tier holds: the one place where index, hot files and space accounting change together.

State of an object: *absent* (no record, no file), *begun* (record and sparse file, some chunks), *complete*.
`Held` is the in-memory side of one object, alive as long as somebody has it open, fills or verifies it.

Invariants, and who keeps them:

* A chunk is `present` only after its bytes were written and hashed. The set changes on the event loop only, in
  `commit_chunk` and `drop_chunk`; the index follows through the writer's queue, in the same order.
* The index shows committed state only, and its writer is always a little behind. So a `Held` whose changes are not
  committed outlives its last user (`_retire`): whoever comes next must not load a record that is not there yet, make the file
  anew, and then find the chunks of the former file in the index. When the writer lost changes (its disk failed), the index is
  compared with what is true: what it does not know becomes residue, what it should not know makes the object *doubtful*.
* A doubtful object's record says more than is true. It is forgotten, with its file, before anybody uses it.
* Room is reserved before a byte is written (`reserve`), and every reservation is settled or cancelled once. An object is
  accounted in the ledger with the bytes of its present chunks and its residue (`engine/residue.py`), no more and no less.
* An object with users is never evicted, whether they came through the engine or through the publication, which withdraws
  an object before anything is done to its file. `_parting` enters ids into `_leaving` before the first await, and
  `acquire` waits for those: nobody opens a file that is being removed.
* Order of eviction: forget in the index (committed), then unlink, then release the room. A crash in between
  leaves a file without a record, which `sweep` removes after the next unclean start. A file that cannot be unlinked stays
  accounted as a leftover, and its turn comes again.
* A hot directory whose disk fails is passed by for a while (`engine/disks.py`). What was not loaded then is by its next fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import msgspec
import structlog
import trio

from tiercache.core.chunk import held_bytes
from tiercache.core.eviction import Evict
from tiercache.core.record import ChunkRecord, HotRecord, ObjectId, ObjectRef
from tiercache.engine.disks import Disks
from tiercache.engine.held import Held, counted_bytes
from tiercache.engine.outgoing import Outgoing
from tiercache.engine.publication import Publication
from tiercache.engine.residue import SOMEWHERE, Residue
from tiercache.engine.room import Room
from tiercache.errors import HotFull, HotSick, HotTierError, NotHeld
from tiercache.index.index import Change, DropChunk, DropHot, Index, PutChunk, PutHot, Touch
from tiercache.tiers.hot import HotFile, HotTier
from tiercache.tiers.space import Reservation

log = structlog.get_logger()

MAKE_ROOM_ROUNDS = 3
RETIRE_SECONDS = 0.05  # objects stay open so much longer, and share a commit
SWEEP_COUNT = 100


class Holdings:
    def __init__(
        self,
        nursery: trio.Nursery,
        index: Index,
        files: HotTier,
        room: Room,
        publication: Publication,
        outgoing: Outgoing,
        chunk_bytes: int,
        clock: Callable[[], float],
        protected: Callable[[HotRecord], bool],
    ) -> None:
        self._nursery = nursery
        self._index = index
        self._files = files
        self.room = room
        self.chunk_bytes = chunk_bytes
        self._clock = clock
        self._protected = protected
        self._publication = publication
        self._outgoing = outgoing
        self._held: dict[ObjectId, Held] = {}
        self._leaving: dict[ObjectId, trio.Event] = {}
        self._retiring: list[Held] = []
        self._doubtful: set[ObjectId] = set()
        self._residue = Residue()
        self._leftovers: list[dict[ObjectId, int]] = [{} for _ in files.directories]
        self._unsynced: list[dict[ObjectId, set[int]]] = [{} for _ in files.directories]
        self.disks = Disks(len(files.directories), clock)

    # -- using an object

    async def acquire(self, ref: ObjectRef) -> Held:
        """The object's in-memory state, loaded from the index; the caller owes one `release`."""
        object_id = ref.object_id
        while (leaving := self._leaving.get(object_id)) is not None:
            await leaving.wait()
        held = self._held.get(object_id) or self._enter(ref, self._index.hot(object_id))
        held.users += 1
        if not held.is_loaded:
            try:
                async with held.opening:
                    await self._load(held)
            except HotTierError as error:
                log.warning("hot_copy_not_opened", key=ref.key, error=error.line)
            except BaseException:
                self.release(held)
                raise
        return held

    def is_known(self, object_id: ObjectId) -> bool:  # hot, or it will be, or was a moment ago
        return object_id in self._held or object_id in self._leaving or self._index.hot(object_id) is not None

    def acquire_new(self, ref: ObjectRef) -> Held | None:
        """`acquire` of an object that is not known, else None. Never waits."""
        if self.is_known(ref.object_id):
            return None
        (held := self._enter(ref, None)).users += 1
        return held

    def _enter(self, ref: ObjectRef, record: HotRecord | None) -> Held:
        held = self._held[ref.object_id] = Held(ref, record.chunk_bytes if record else self.chunk_bytes)
        held.is_loaded = record is None
        return held

    def release(self, held: Held) -> None:
        held.users -= 1
        assert held.users >= 0, "released more often than acquired"
        if held.users or self._held.get(held.ref.object_id) is not held:
            return
        if not held.changes_count:
            self._let_go(held)
            return
        self._retiring.append(held)
        if len(self._retiring) == 1:
            self._nursery.start_soon(self._retire)

    def _let_go(self, held: Held) -> None:
        del self._held[held.ref.object_id]
        if held.file is not None and not held.present:
            self._nursery.start_soon(self._remove_empty, held.file)  # a fill that came to nothing: nothing worth keeping
        held.file = None

    async def _retire(self) -> None:
        """Let go of objects without users when the index knows what was done to them, many in one commit."""
        while self._retiring:
            await trio.sleep(RETIRE_SECONDS)
            batch = [(held, held.changes_count) for held in self._retiring]
            try:
                await self._index.commit([])
            except HotTierError as error:
                log.error("hot_changes_lost", objects=len(batch), error=error.line)
            self._retiring = self._retiring[len(batch) :]
            for held, changes_count in batch:
                if self._held.get(held.ref.object_id) is not held or held.users:
                    continue  # its last user brings it here again
                if held.changes_count > changes_count:
                    self._retiring.append(held)
                    continue
                try:
                    self._compare(held)
                except HotTierError:
                    self._doubtful.add(held.ref.object_id)  # the index cannot even be read
                self._let_go(held)

    def _compare(self, held: Held) -> None:
        """Does the index know of the object what is true? Where changes were lost on the way, set it right."""
        object_id = held.ref.object_id
        record = self._index.hot(object_id)
        if held.file is None or (record is not None and record.held_bytes == held.present_bytes):
            return
        known = set(self._index.chunks(object_id)) if record is not None else set()
        for chunk in known - held.present:
            self._doubtful.add(object_id)
            self._residue.take(object_id, chunk)  # the record counts it still
        lost = held.present - known
        for chunk in lost:
            self._residue.add(object_id, SOMEWHERE, held_bytes(held.span(chunk)[1]))
        if record is None:
            held.present, held.complete = set(), False
            return
        right_bytes = counted_bytes(record, self._index)
        complete = record.complete and not lost  # its last chunk may have been recorded, and not all of those before it
        self._index.submit([PutHot(msgspec.structs.replace(record, held_bytes=right_bytes, complete=complete))])

    async def _remove_empty(self, file: HotFile) -> None:
        """Remove a file of which the index knows no chunk, or nothing at all."""
        object_id = file.object_id
        if self.in_use(object_id):
            return
        try:
            with self._parting([object_id]):
                if not await self._remove([object_id], {}):
                    await self._unlink(object_id, file.directory, 0)
        except HotTierError as error:
            log.warning("hot_file_not_removed", path=file.path, error=error.line)

    def in_use(self, object_id: ObjectId) -> bool:
        return object_id in self._held or object_id in self._leaving or self._publication.uses(object_id) > 0

    def held(self, object_id: ObjectId) -> Held | None:
        return self._held.get(object_id)

    def touch(self, object_id: ObjectId, seconds: int, count: int) -> None:
        """Note accesses for eviction; `seconds` is when the last one was."""
        self._index.submit([Touch(object_id, seconds, count)])

    def _submit(self, held: Held, change: Change) -> None:
        held.changes_count += 1
        self._index.submit([change])

    async def _load(self, held: Held) -> None:
        """What the index knows of the object, under `held.opening`. Raises HotFull, HotSick, and can be tried again then."""
        if held.is_loaded:
            return
        object_id = held.ref.object_id
        record = self._index.hot(object_id)
        if record is not None:
            try:
                file = await self.disks.run(record.directory, self._files.open, object_id, record.size_bytes, record.directory)
                if object_id in self._doubtful:
                    raise NotHeld(f"the index is not to be believed about {held.ref.key}")
            except NotHeld:
                await self._remove([object_id], {})
            else:
                chunks = self._index.chunks(object_id)
                trusted_epoch = self._index.health.trusted_epoch
                held.file = file
                held.present = set(chunks)
                held.unverified = {chunk: it.digest for chunk, it in chunks.items() if it.epoch < trusted_epoch}
                held.complete = len(held.present) == held.chunk_count
        held.is_loaded = True

    # -- filling it

    async def begin(self, held: Held) -> HotFile:
        """The object's file, created if need be. One that could not be loaded before is loaded now. Raises HotFull, HotSick."""
        async with held.opening:
            await self._load(held)
            return self.begin_loaded(held)

    def begin_loaded(self, held: Held) -> HotFile:
        """`begin` of an object that `is_loaded`."""
        directory = self.room.choose(lambda each: not self.disks.is_sick(each)) if held.file is None else held.file.directory
        if self.disks.is_sick(directory):
            raise HotSick(f"hot directory {directory} failed a moment ago")
        if held.file is None:
            held.file = self._files.begin(held.ref.object_id, held.ref.size_bytes, directory)
            self._submit(held, PutHot(held.begun(int(self._clock()))))
        return held.file

    async def reserve(self, held: Held, chunk: int) -> Reservation:
        """Room for one chunk of a begun object, by evicting others if need be. Raises HotFull.

        One object gets no more than the low watermark: what is larger would be evicted as a whole by the next reclaim.
        """
        directory, wanted_bytes = self.lacking(held, chunk)
        try:
            return self.room.reserve(directory, wanted_bytes)
        except HotFull:
            await self.make_room(directory, wanted_bytes)
            return self.room.reserve(directory, wanted_bytes)

    def lacking(self, held: Held, chunk: int) -> tuple[int, int]:
        """In which directory the chunk needs room, and how much. Raises HotFull."""
        assert held.file is not None
        chunk_bytes = held_bytes(held.span(chunk)[1])
        self.room.refuse_giant(held.file.directory, held.present_bytes, chunk_bytes)
        return held.file.directory, chunk_bytes - self._residue.of(held.ref.object_id, chunk)

    def commit_chunk(self, held: Held, chunk: int, digest: int, reservation: Reservation) -> None:
        """The chunk's bytes are in the file and hash to `digest`: it is present from now on."""
        object_id = held.ref.object_id
        added_bytes = held_bytes(held.span(chunk)[1])
        reservation.settle(added_bytes - self._residue.take(object_id, chunk))
        held.present.add(chunk)
        held.complete = len(held.present) == held.chunk_count
        record = ChunkRecord(digest, self._index.health.epoch)
        self._submit(held, PutChunk(object_id, chunk, record, added_bytes, held.complete))
        if held.file is not None:
            self._unsynced[held.file.directory].setdefault(object_id, set()).add(chunk)

    def abandon_chunk(self, held: Held, chunk: int, written_bytes: int, reservation: Reservation) -> None:
        """The fill failed after writing so much: what lies in the file stays accounted.

        An earlier fill may have left other parts of the chunk, or the same: they are taken for others.
        """
        before_bytes = self._residue.of(held.ref.object_id, chunk)
        added_bytes = min(held_bytes(written_bytes), held_bytes(held.span(chunk)[1]) - before_bytes)
        reservation.settle(added_bytes)
        self._residue.add(held.ref.object_id, chunk, added_bytes)

    def drop_chunk(self, held: Held, chunk: int) -> None:
        """The chunk's bytes are not what was written: fetch it again. Its blocks become residue."""
        self._publication.withdraw_object(held.ref.object_id)
        held.present.discard(chunk)
        held.complete = False
        held.unverified.pop(chunk, None)
        dropped_bytes = held_bytes(held.span(chunk)[1])
        self._residue.add(held.ref.object_id, chunk, dropped_bytes)
        self._submit(held, DropChunk(held.ref.object_id, chunk, dropped_bytes))

    def verified(self, held: Held, chunk: int) -> None:
        """A chunk of an older boot hashed right: it need not be hashed again in this one."""
        digest = held.unverified.pop(chunk, None)
        if digest is not None:
            record = ChunkRecord(digest, self._index.health.epoch)
            self._submit(held, PutChunk(held.ref.object_id, chunk, record, 0, False))

    @property
    def has_residue(self) -> bool:
        """Is there more in the files than the index knows, or less?"""
        return bool(self._residue or self._doubtful or any(self._leftovers))

    # -- making room

    async def make_room(self, directory: int, wanted_bytes: int) -> None:
        """Evict until `wanted_bytes` can be reserved, if it could be in an empty directory and as far as anything may go.

        The caller finds out by reserving. Victims that were read again since they were sampled stay, hence more than one round.
        """
        if wanted_bytes > self.room.ledgers[directory].limit_bytes:
            return
        async with self.room.reclaiming(directory):
            for _ in range(MAKE_ROOM_ROUNDS):
                need_bytes = self.room.lacks_bytes(directory, wanted_bytes)
                if not need_bytes or not (victims := await self._victims(directory, need_bytes)):
                    return
                await self.evict([victim.object_id for victim in victims], victims)

    async def reclaim(self, directory: int, excess_bytes: int) -> int:
        """Evict about `excess_bytes`; how many objects went."""
        async with self.room.reclaiming(directory):
            victims = await self._victims(directory, excess_bytes)
            return await self.evict([victim.object_id for victim in victims], victims)

    async def _victims(self, directory: int, need_bytes: int) -> list[Evict]:
        ready = await self._outgoing.take(directory, need_bytes, self.in_use)
        return ready or self.room.victims(directory, need_bytes, self._index, self._clock(), self.spares)

    def spares(self, record: HotRecord) -> bool:  # in use, or pinned
        return self.in_use(record.object_id) or self._protected(record)

    async def evict(self, victims: Sequence[ObjectId], chosen: Sequence[Evict] = ()) -> int:
        """Remove hot copies that nobody uses; how many went. `chosen` were picked for their age, and stay if it is outdated."""
        going = [victim for victim in victims if not self.in_use(victim) and not self._publication.withdraw_object(victim)]
        if not going:
            return 0
        with self._parting(going):
            return await self._remove(going, {victim.object_id: victim.accessed_seconds for victim in chosen})

    @contextmanager
    def _parting(self, going: Sequence[ObjectId]) -> Iterator[None]:
        """While the block runs nobody can begin to use these objects, which nobody uses."""
        done = trio.Event()
        self._leaving.update((object_id, done) for object_id in going)
        try:
            yield
        finally:
            for object_id in going:
                del self._leaving[object_id]
            done.set()

    async def _remove(self, going: Sequence[ObjectId], ages: dict[ObjectId, int]) -> int:
        """Forget in the index, unlink, release the room: once begun, all of it. How many there were; `ages` as in `evict`."""
        records: list[tuple[HotRecord, int]] = []
        with trio.CancelScope(shield=True):
            await self._index.commit([])  # what is queued for them first, so that the records tell their true size and age
            for record in filter(None, map(self._index.hot, going)):
                outdated = ages.get(record.object_id, record.accessed_seconds) != record.accessed_seconds
                if not outdated and not (ages and self._protected(record)):
                    records.append((record, counted_bytes(record, self._index)))
            await self._index.commit([DropHot(record.object_id) for record, _ in records])
            self._doubtful.difference_update([victim for victim in going if self._index.hot(victim) is None])
            for record, known_bytes in records:
                await self._unlink(record.object_id, record.directory, known_bytes, evicted=bool(ages))
        return len(records)

    async def _unlink(self, object_id: ObjectId, directory: int, counted_bytes: int, *, evicted: bool = False) -> None:
        """Remove a file that no record names any more. One that cannot be removed stays accounted, as a leftover."""
        leftovers = self._leftovers[directory]
        gone_bytes = counted_bytes + self._residue.take_all(object_id) + leftovers.pop(object_id, 0)
        try:
            await self.disks.run(directory, self._files.unlink, object_id, directory)
        except HotTierError as error:
            log.warning("hot_file_not_removed", object=object_id.hex(), directory=directory, error=error.line)
            leftovers[object_id] = gone_bytes
        else:
            self.room.release(directory, gone_bytes, evicted=evicted)

    async def remove_leftovers(self, directory: int) -> None:  # what could not be removed when its turn was
        if self.disks.is_sick(directory):
            return
        for object_id in list(self._leftovers[directory]):
            record = self._index.hot(object_id)
            if not self.in_use(object_id) and (record is None or record.directory != directory):
                with self._parting([object_id]):
                    await self._unlink(object_id, directory, 0)

    # -- the disk

    async def sync(self, directory: int) -> None:
        """Have everything written back; if the disk lost something, drop what was committed since the last time.
        Raises HotTierError when that could not be recorded; nothing that was lost is served all the same."""
        if self.disks.is_hung(directory):
            return  # what was committed since the last time is the next sync's business
        since, self._unsynced[directory] = self._unsynced[directory], {}
        try:
            await self.disks.wait_for(directory, self._files.syncfs, directory)
        except HotSick as error:
            log.error("hot_bytes_lost", directory=directory, objects=len(since), error=error.line)
            self.disks.failed(directory, error)
            for object_id, chunks in since.items():
                held = self._held.get(object_id)
                if held is None or not held.is_loaded:
                    self._publication.withdraw_object(object_id)
                    self._doubtful.add(object_id)
                else:
                    for chunk in filter(held.has, chunks):
                        self.drop_chunk(held, chunk)
        if self._doubtful:
            await self.evict(list(self._doubtful))

    async def sweep(self, directory: int) -> int:
        """Remove what a crash left, files without a record and records without a chunk, and account for blocks without a record;
        how many files went. Raises HotTierError."""
        files = self._files.walk(directory)
        removed_count = 0
        while batch := await self.disks.run(directory, lambda: list(islice(files, SWEEP_COUNT))):
            await self._index.commit([])
            strays, empty = [], []
            for object_id, _, occupied_bytes in batch:
                if self.in_use(object_id):
                    continue
                record = self._index.hot(object_id)
                if record is None or record.directory != directory:
                    strays.append(object_id)
                elif record.held_bytes == 0:
                    empty.append(object_id)
                elif record.held_bytes < held_bytes(record.size_bytes):
                    known_bytes = record.held_bytes + self._residue.total(object_id)
                    self._found(object_id, directory, occupied_bytes - known_bytes)
            with self._parting(strays):
                for object_id in strays:
                    await self._unlink(object_id, directory, 0)
            removed_count += len(strays) + await self.evict(empty)
        return removed_count

    def _found(self, object_id: ObjectId, directory: int, stray_bytes: int) -> None:
        """A walk found blocks of the object's file that nobody knew of."""
        if stray_bytes > 0:
            self.room.ledgers[directory].held_bytes += stray_bytes
            self._residue.add(object_id, SOMEWHERE, stray_bytes)
