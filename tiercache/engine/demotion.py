"""Demotion: what will have to leave the hot tier gets a warm copy first, ahead of need.

    choose ──> a large object ──> workers ──> a copy of its own ──┐
       │                                                          ├──> outgoing.py: may go at once
       ├─────> a small one ─────> the open pack ──> a pack ───────┤
       └─────> not worth it, or has a warm copy already ──────────┘

The oldest AHEAD_BYTES of each hot directory (an eighth of a small one) are kept ready to go, so that a fill that needs room waits
for no compression. What is still on its way stays hot: it is a candidate, not a victim.

Nothing is written that is there already: a committed copy by any node is looked for before the first byte is read; what a replica
holds, old versions and parts of objects are not worth a copy (`core/admission.py`). A pack is closed when it is full, when it has
waited for PACK_WAIT_SECONDS, or when somebody waits for room.

Reader traffic goes first: `_calm` holds demotion back while fills run that somebody waits for, for CALM_SECONDS at most before
each stripe, unless room is wanted. When the warm tier refuses, demotion rests, nobody waits for it, and eviction drops what
the cold store has.

Members of packs are read without `Holdings.acquire`: an eviction meanwhile harms nothing, for what was read is compared with the
index's digest. A large object is held while it is read, so that its blocks stay accounted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import structlog
import trio

from tiercache.core.admission import worth_demoting
from tiercache.core.chunk import chunk_count, chunk_span
from tiercache.core.eviction import Evict
from tiercache.core.manifest import Member
from tiercache.core.record import ChunkRecord, HotRecord, ObjectId, ObjectRef
from tiercache.engine.alone import Alone
from tiercache.engine.dataset import Dataset
from tiercache.engine.holdings import Holdings
from tiercache.engine.namespace import Namespace
from tiercache.engine.outgoing import Outgoing
from tiercache.errors import Damaged, HotTierError, NotHeld, TiercacheError
from tiercache.index.index import Index
from tiercache.metrics.tally import Demotion as Demoted
from tiercache.tiers.hot import HotTier, read_into
from tiercache.tiers.warm.copies import Copies
from tiercache.tiers.warm.loans import LOANS
from tiercache.tiers.warm.writing import Batch, Writer, Written

log = structlog.get_logger()

AHEAD_BYTES = 1 << 30
AHEAD_SHARE = 8
CHOOSE_COUNT = 64
WORKERS = 3  # one that waits for the disks to flush and two that encode
QUEUE_COUNT = 256
UNDER_WAY_COUNT = 8192
PACK_BYTES = 32 << 20
PACK_COUNT = 4096
PACK_BATCH_BYTES = 4 << 20
PACK_WAIT_SECONDS = 5.0
TICK_SECONDS = 1.0
WANTED_SECONDS = 0.01  # between two choices while somebody waits
REST_SECONDS = 5.0
CALM_SECONDS = 0.1
CALM_STEP_SECONDS = 0.01


class Outcome(enum.Enum):
    """WRITTEN, ALREADY: there is a warm copy. SKIPPED: it is not worth one. FAILED: the warm tier or the hot copy did not allow
    it."""

    WRITTEN = "written"
    ALREADY = "already"
    SKIPPED = "skipped"
    FAILED = "failed"


class Observer(Protocol):
    def demoted(self, outcome: Demoted, logical_bytes: int = 0, stored_bytes: int = 0) -> None: ...


class _Candidate(NamedTuple):
    record: HotRecord
    victim: Evict


class Demotion:
    """`pack_threshold_bytes`: objects up to this size share packs. `busy`: do readers wait for fills? `wrote` hears of copies."""

    def __init__(
        self,
        index: Index,
        files: HotTier,
        holdings: Holdings,
        outgoing: Outgoing,
        namespace: Namespace,
        datasets: Sequence[Dataset],
        copies: Copies,
        writer: Writer,
        observer: Observer,
        *,
        pack_threshold_bytes: int,
        busy: Callable[[], bool],
        wrote: Callable[[Written], None],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._files = files
        self._holdings = holdings
        self._outgoing = outgoing
        self._namespace = namespace
        self._datasets: Mapping[str, Dataset] = {dataset.name: dataset for dataset in datasets}
        self._copies = copies
        self._writer = writer
        self._observer = observer
        self._pack_threshold_bytes = pack_threshold_bytes
        self._busy = busy
        self._wrote = wrote
        self._clock = clock
        self._under_way: dict[ObjectId, _Candidate] = {}
        self._writing: Alone[ObjectId] = Alone()  # ahead of need and by hand
        self._pack: list[_Candidate] = []
        self._pack_bytes = 0
        self._pack_since = 0.0
        self._packing = trio.Event()
        self._rests_until = 0.0
        self._send, self._receive = trio.open_memory_channel[_Candidate](QUEUE_COUNT)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._choose_ahead)
            nursery.start_soon(self._close_packs)
            for _ in range(WORKERS):
                nursery.start_soon(self._work)

    # -- ahead of need

    async def _choose_ahead(self) -> None:
        while True:
            if (rest_seconds := self._rests_until - trio.current_time()) > 0:
                self._outgoing.close()
                await trio.sleep(rest_seconds)
            self._outgoing.open()
            for directory in range(len(self._holdings.room.ledgers)):
                while self._choose(directory):
                    await trio.lowlevel.checkpoint()
            if self._outgoing.is_wanted:
                await trio.sleep(WANTED_SECONDS)
            else:
                with trio.move_on_after(TICK_SECONDS):
                    await self._outgoing.until_wanted()

    def _choose(self, directory: int) -> bool:
        """Put some candidates of the directory on their way, if more are needed; whether that may be worth repeating."""
        ledger = self._holdings.room.ledgers[directory]
        wanted_bytes = self._outgoing.wanted_bytes(directory)
        ahead_bytes = min(AHEAD_BYTES, max(wanted_bytes, ledger.limit_bytes // AHEAD_SHARE))
        if not wanted_bytes and ledger.used_bytes + ahead_bytes <= ledger.limit_bytes * ledger.low_ratio:
            return False
        if len(self._under_way) >= UNDER_WAY_COUNT:
            return False
        on_their_way = [each.victim.held_bytes for each in self._under_way.values() if each.record.directory == directory]
        missing_bytes = ahead_bytes - self._outgoing.ready_bytes(directory) - sum(on_their_way)
        if missing_bytes <= 0 or self._send.statistics().current_buffer_used + CHOOSE_COUNT > QUEUE_COUNT:
            return False
        victims = self._holdings.room.victims(
            directory,
            missing_bytes,
            self._index,
            self._clock(),
            self._holdings.spares,
            taken=_Both(self._outgoing, self._under_way),
            fresh_seconds=0,
            limit_count=CHOOSE_COUNT,
        )
        if not victims and not on_their_way:
            self._outgoing.nothing_more(directory)
        for victim in victims:
            record = self._index.hot(victim.object_id)
            if record is not None:
                self._begin(_Candidate(record, victim))
        return bool(victims)

    def _begin(self, candidate: _Candidate) -> None:
        record = candidate.record
        if not self._is_worth_it(record):
            self._settle(candidate, Outcome.SKIPPED)
            return
        self._under_way[record.object_id] = candidate
        if not self._is_small(record):
            self._send.send_nowait(candidate)
            return
        if not self._pack:
            self._pack_since = trio.current_time()
        self._pack.append(candidate)
        self._pack_bytes += record.size_bytes
        self._packing.set()

    def _settle(self, candidate: _Candidate, outcome: Outcome) -> None:
        self._under_way.pop(candidate.record.object_id, None)
        if outcome is not Outcome.FAILED:
            self._outgoing.put(candidate.record.directory, candidate.victim)

    async def _work(self) -> None:
        while True:
            candidate = await self._receive.receive()
            self._settle(candidate, await self._demote(candidate.record))

    async def _close_packs(self) -> None:
        while True:
            while not self._pack_is_due:
                await self._until_pack_changes()
            members, self._pack, self._pack_bytes = self._pack, [], 0
            self._packing = trio.Event()
            outcomes = await self._write_pack([candidate.record for candidate in members])
            for candidate in members:
                self._settle(candidate, outcomes[candidate.record.object_id])

    @property
    def _pack_is_due(self) -> bool:
        if not self._pack:
            return False
        is_full = self._pack_bytes >= PACK_BYTES or len(self._pack) >= PACK_COUNT
        return is_full or self._outgoing.is_wanted or trio.current_time() >= self._pack_since + PACK_WAIT_SECONDS

    async def _until_pack_changes(self) -> None:
        """Until members came, somebody waits for room, or a tick has passed."""
        if not self._pack:
            await self._packing.wait()
            return
        with trio.move_on_after(TICK_SECONDS):
            if self._pack_bytes < PACK_BYTES:
                await self._outgoing.until_wanted()

    async def _calm(self) -> None:
        """Wait until no reader waits for a fill, within bounds."""
        with trio.move_on_after(CALM_SECONDS):
            while self._busy() and not self._outgoing.is_wanted:  # noqa: ASYNC110 - a condition of many tasks
                await trio.sleep(CALM_STEP_SECONDS)

    # -- one round

    async def demote(self, records: Sequence[HotRecord], settled: Callable[[HotRecord, Outcome], None]) -> None:
        """Make warm copies of these now; `settled` hears of each."""
        small: list[HotRecord] = []
        large: list[HotRecord] = []
        for record in records:
            if not self._is_worth_it(record):
                settled(record, Outcome.SKIPPED)
            else:
                (small if self._is_small(record) else large).append(record)
        for pack in _packs_of(small):
            outcomes = await self._write_pack(pack)
            for record in pack:
                settled(record, outcomes[record.object_id])
        left = iter(large)

        async def work() -> None:
            for record in left:
                settled(record, await self._demote(record))

        async with trio.open_nursery() as nursery:  # while one is flushed to the disks, the next one is encoded
            for _ in range(min(WORKERS, len(large))):
                nursery.start_soon(work)

    def _is_small(self, record: HotRecord) -> bool:
        return record.size_bytes <= self._pack_threshold_bytes

    def _is_worth_it(self, record: HotRecord) -> bool:
        """A small object of several chunks, filled when chunks were smaller than packs take, is none that a pack can have."""
        if record.dataset not in self._datasets or (self._is_small(record) and record.size_bytes > record.chunk_bytes):
            return False
        is_superseded = self._namespace.is_superseded(record.dataset, record.key, record.version)
        return worth_demoting(record, is_superseded=is_superseded)

    async def _is_below(self, record: HotRecord) -> Outcome | None:
        """ALREADY when there is a committed copy, SKIPPED when a replica has the bytes, else None."""
        replica_holds = self._datasets[record.dataset].replica_holds
        if replica_holds is not None and await replica_holds(self._ref(record)):
            return Outcome.SKIPPED
        if self._copies.known(record.object_id):
            return Outcome.ALREADY
        if self._is_small(record):
            return None  # the catalogues were looked at just now
        self._copies.forget(record.object_id)  # that there was none a moment ago: another node may have written one since
        return Outcome.ALREADY if await self._copies.find(record.object_id) else None

    async def _demote(self, record: HotRecord) -> Outcome:
        async with self._writing.with_all([record.object_id]):
            try:
                outcome = await self._is_below(record)
                if outcome is None:
                    written = await self._write(record)
                    outcome = Outcome.WRITTEN
                    self._wrote(written)
                    self._observer.demoted("written", record.size_bytes, written.stored_bytes)
                else:
                    self._observer.demoted("already" if outcome is Outcome.ALREADY else "skipped")
            except TiercacheError as error:
                return await self._failed([record], error)
            return outcome

    async def _write(self, record: HotRecord) -> Written:
        ref = self._ref(record)
        held = await self._holdings.acquire(ref)
        try:
            file = held.file
            if file is None or not held.complete:
                raise NotHeld(f"{record.key} is not whole any more")
            chunks = self._index.chunks(record.object_id)
            if len(chunks) != chunk_count(record.size_bytes, record.chunk_bytes):
                raise NotHeld(f"{record.key} is not whole any more")
            spans = [chunk_span(record.size_bytes, record.chunk_bytes, chunk) for chunk in range(len(chunks))]

            async def load(begin: int, size: int) -> list[memoryview]:
                return [await self._holdings.disks.run(record.directory, read_into, file, begin, LOANS.take(size))]

            batches = [
                Batch(size, partial(load, begin, size), [chunks[chunk].digest]) for chunk, (begin, size) in enumerate(spans)
            ]
            source_id = self._datasets[record.dataset].source_id
            return await self._writer.write_object(ref, source_id, record.chunk_bytes, batches, self._calm)
        finally:
            self._holdings.release(held)

    async def _write_pack(self, records: Sequence[HotRecord]) -> dict[ObjectId, Outcome]:
        """Write those that nobody has written into one pack; what became of each."""
        async with self._writing.with_all([record.object_id for record in records]):
            return await self._write_what_is_missing(records)

    async def _write_what_is_missing(self, records: Sequence[HotRecord]) -> dict[ObjectId, Outcome]:
        outcomes: dict[ObjectId, Outcome] = {}
        missing: list[HotRecord] = []
        try:
            await self._copies.catalogues.refresh()
            for record in records:
                below = await self._is_below(record)
                if below is None:
                    missing.append(record)
                else:
                    outcomes[record.object_id] = below
                    self._observer.demoted("already" if below is Outcome.ALREADY else "skipped")
            if missing:
                outcomes |= await self._write_members(missing)
        except TiercacheError as error:
            left = [record for record in records if record.object_id not in outcomes]
            failed = await self._failed(left, error)
            outcomes |= {record.object_id: failed for record in left}
        return outcomes

    async def _write_members(self, records: Sequence[HotRecord]) -> dict[ObjectId, Outcome]:
        batches = [self._batch(group) for group in _groups_of(records, PACK_BATCH_BYTES)]
        written = await self._writer.write_pack(batches, self._calm)
        packed = {written.manifest.member_id(number) for number in range(written.manifest.stripes_count)}
        self._wrote(written)
        members = [record for record in records if record.object_id in packed]
        for number, record in enumerate(members):
            self._observer.demoted("pack", record.size_bytes, 0 if number else written.stored_bytes)
        lost = [record for record in records if record.object_id not in packed]
        if lost:
            await self._failed(lost, Damaged(f"{len(lost)} files are missing from the hot tier, or damaged"))
        return {record.object_id: Outcome.WRITTEN if record.object_id in packed else Outcome.FAILED for record in records}

    def _batch(self, records: Sequence[HotRecord]) -> Batch:
        known = [self._index.chunks(record.object_id) for record in records]
        members = [self._member(record) for record in records]

        async def load() -> list[memoryview | None]:
            return await self._holdings.disks.run(records[0].directory, self._read_all, records)

        return Batch(sum(record.size_bytes for record in records), load, [_digest(chunks) for chunks in known], members)

    def _read_all(self, records: Sequence[HotRecord]) -> list[memoryview | None]:
        """The bytes of small files; blocks. None for one that is not there any more."""
        found: list[memoryview | None] = []
        for record in records:
            try:
                file = self._files.open(record.object_id, record.size_bytes, record.directory)
                found.append(read_into(file, 0, LOANS.take(record.size_bytes)))
            except (NotHeld, HotTierError):
                found.append(None)
        return found

    async def _failed(self, records: Sequence[HotRecord], error: TiercacheError) -> Outcome:
        """A hot copy that is damaged, or not there, is dropped; when the warm tier refuses, demotion rests."""
        for _ in records:
            self._observer.demoted("failed")
        log.warning("not_demoted", objects=len(records), key=records[0].key, error=error.line)
        if isinstance(error, Damaged | NotHeld):
            with suppress(HotTierError):  # an index that cannot be written: it stays, and reads find out what it is
                await self._holdings.evict([record.object_id for record in records])
        else:
            self._rests_until = trio.current_time() + REST_SECONDS
            self._outgoing.close()
        return Outcome.FAILED

    # -- what the index does not say

    def _ref(self, record: HotRecord) -> ObjectRef:
        return ObjectRef(
            record.dataset, record.key, record.version, record.size_bytes, self._mtime_seconds(record), record.object_id
        )

    def _member(self, record: HotRecord) -> Member:
        source_id = self._datasets[record.dataset].source_id
        return Member(record.object_id, source_id, record.key, record.version, record.size_bytes, self._mtime_seconds(record))

    def _mtime_seconds(self, record: HotRecord) -> int:
        """0 when the namespace does not know the object any more."""
        entry = self._namespace.known(record.dataset, record.key)
        return entry.mtime_seconds if entry is not None and entry.version == record.version else 0


class _Both:
    """What is ready to go, or on its way there."""

    def __init__(self, outgoing: Outgoing, under_way: Mapping[ObjectId, object]) -> None:
        self._outgoing = outgoing
        self._under_way = under_way

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._under_way or object_id in self._outgoing


def _digest(chunks: Mapping[int, ChunkRecord]) -> int:
    """Of an object of one chunk. One without it has no digest, and what has none is not packed."""
    return chunks[0].digest if len(chunks) == 1 and 0 in chunks else -1


def _packs_of(records: Sequence[HotRecord]) -> list[list[HotRecord]]:
    return [
        pack[start : start + PACK_COUNT] for pack in _groups_of(records, PACK_BYTES) for start in range(0, len(pack), PACK_COUNT)
    ]


def _groups_of(records: Sequence[HotRecord], limit_bytes: int) -> list[list[HotRecord]]:
    """In order, each of one hot directory and of about so many bytes."""
    groups: list[list[HotRecord]] = []
    group_bytes = 0
    for record in sorted(records, key=lambda record: record.directory):
        if not groups or group_bytes >= limit_bytes or groups[-1][0].directory != record.directory:
            groups.append([])
            group_bytes = 0
        groups[-1].append(record)
        group_bytes += record.size_bytes
    return groups
