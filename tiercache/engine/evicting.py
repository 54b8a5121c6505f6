"""Eviction by hand: everything hot below some paths goes to the warm tier, or just goes.

What is below a directory is taken from the index of hot objects, not from the listing: objects whose names are gone from the
store are meant as well. Their ids are collected first (20 bytes each), so that the progress has a total, and each
is looked at once however long the work takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import trio

from tiercache.core.record import OBJECT_ID_BYTES, HotRecord, ObjectId
from tiercache.engine.demotion import Outcome
from tiercache.engine.holdings import Holdings
from tiercache.engine.progress import EvictProgress
from tiercache.engine.warm_controls import Demote
from tiercache.errors import HotTierError, TiercacheError, TierError
from tiercache.index.index import Index

WALK_COUNT = 5000  # records that a thread looks at before cancellation is heard
BATCH_COUNT = 1000
BATCH_BYTES = 1 << 30  # whose records are kept; what is dropped leaves its room at least as often

Prefix = tuple[str, str]
Settled = tuple[HotRecord, Outcome]


@dataclass
class Scope:
    """What is meant: single objects, and (dataset, prefix) with all below; a prefix is '' or ends with '/'.

    `keys` are (dataset, key) of files whose object is not known.
    """

    objects: set[ObjectId] = field(default_factory=set)
    prefixes: set[Prefix] = field(default_factory=set)
    keys: set[Prefix] = field(default_factory=set)

    def covering(self, dataset: str, key: str) -> Prefix | None:
        """The prefix or key that means this object."""
        if (dataset, key) in self.keys:
            return dataset, key
        end = 0
        while (dataset, key[:end]) not in self.prefixes:
            end = key.find("/", end) + 1
            if not end:
                return None
        return dataset, key[:end]


class Evicting:
    """`path_of(dataset, key)` names an object for the operator."""

    def __init__(self, index: Index, holdings: Holdings, path_of: Callable[[str, str], str]) -> None:
        self._index = index
        self._holdings = holdings
        self._path_of = path_of

    async def find(self, scope: Scope, progress: EvictProgress) -> tuple[bytes, set[Prefix]]:
        """The ids of the hot objects that are meant, one after the other, and which prefixes and keys have any."""
        ids, found = bytearray(), set[Prefix]()
        for record in filter(None, map(self._index.hot, scope.objects)):
            ids += record.object_id
            progress.total_bytes += record.held_bytes
        if scope.prefixes or scope.keys:
            records = self._index.all_hot()
            while await trio.to_thread.run_sync(self._walk, records, scope, ids, found, progress):
                pass
        progress.total_count = len(ids) // OBJECT_ID_BYTES
        return bytes(ids), found

    def _walk(
        self, records: Iterator[HotRecord], scope: Scope, ids: bytearray, found: set[Prefix], progress: EvictProgress
    ) -> bool:
        """Look at some more records; whether there may be others. In a thread, and nobody else touches these meanwhile."""
        looked_at_count = 0
        for record in islice(records, WALK_COUNT):
            looked_at_count += 1
            covering = scope.covering(record.dataset, record.key)
            if covering is not None and record.object_id not in scope.objects:
                ids += record.object_id
                found.add(covering)
                progress.total_bytes += record.held_bytes
        return looked_at_count == WALK_COUNT

    async def demote(self, ids: bytes, demote: Demote, progress: EvictProgress) -> None:
        """Remove them when there are warm copies; what is not worth one is dropped, what could not be written stays.

        Those that are settled are removed, all that have come together, while others are still being written.
        """
        for records in self._batches(ids, progress):
            send, receive = trio.open_memory_channel[Settled](len(records))

            def settled(record: HotRecord, outcome: Outcome, send: trio.MemorySendChannel[Settled] = send) -> None:
                send.send_nowait((record, outcome))
                progress.done(record.held_bytes)

            failure: TiercacheError | None = None
            async with trio.open_nursery() as nursery, send:
                nursery.start_soon(self._remove_settled, receive, progress)
                try:
                    await demote(records, settled)
                except TiercacheError as error:
                    failure = error  # raised as it is, not in a group: what was settled is removed first
            if failure is not None:
                raise failure

    async def _remove_settled(self, receive: trio.MemoryReceiveChannel[Settled], progress: EvictProgress) -> None:
        async for first in receive:
            together = [first]
            with suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    together.append(receive.receive_nowait())
            outcomes = dict(together)
            going = [record for record, outcome in outcomes.items() if not self._stays(record, outcome, progress)]
            for record in await self._remove(going, progress):
                match outcomes[record]:
                    case Outcome.WRITTEN:
                        progress.demoted_count += 1
                    case Outcome.ALREADY:
                        progress.already_count += 1
                    case _:
                        progress.dropped_count += 1

    def _stays(self, record: HotRecord, outcome: Outcome, progress: EvictProgress) -> bool:
        """There is no warm copy, and none would do: counted."""
        if outcome is not Outcome.FAILED:
            return False
        if self._index.hot(record.object_id) is not None:
            self._failed(record, progress, _not_written())
        else:  # evicted meanwhile by somebody who needed the room
            progress.dropped_count += 1
        return True

    async def drop(self, ids: bytes, progress: EvictProgress) -> None:
        for records in self._batches(ids, progress):
            progress.dropped_count += len(await self._remove(records, progress))
            for record in records:
                progress.done(record.held_bytes)

    async def _remove(self, records: Sequence[HotRecord], progress: EvictProgress) -> list[HotRecord]:
        """Remove hot copies; those that went. The others are counted: they failed, or somebody has opened them meanwhile."""
        try:
            await self._holdings.evict([record.object_id for record in records])
        except HotTierError as error:
            for record in records:
                self._failed(record, progress, error)
            return []
        gone = [record for record in records if self._index.hot(record.object_id) is None]
        progress.in_use_count += len(records) - len(gone)
        return gone

    def _failed(self, record: HotRecord, progress: EvictProgress, error: TiercacheError) -> None:
        progress.failures.add(self._path_of(record.dataset, record.key), error)

    def _batches(self, ids: bytes, progress: EvictProgress) -> Iterator[Sequence[HotRecord]]:
        """The records of those that may go. The others, in use or pinned, are counted."""
        batch: list[HotRecord] = []
        batch_bytes = 0
        for start in range(0, len(ids), OBJECT_ID_BYTES):
            record = self._index.hot(ObjectId(ids[start : start + OBJECT_ID_BYTES]))
            if record is None:  # it has been evicted since it was found
                progress.dropped_count += 1
                progress.done(0)
            elif self._holdings.in_use(record.object_id):
                progress.in_use_count += 1
                progress.done(record.held_bytes)
            elif self._holdings.spares(record):
                progress.pinned_count += 1
                progress.done(record.held_bytes)
            else:
                batch.append(record)
                batch_bytes += record.held_bytes
            if len(batch) == BATCH_COUNT or batch_bytes >= BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
        if batch:
            yield batch


def _not_written() -> TiercacheError:
    return TierError("no warm copy could be written", hint="it stays hot; the log and `tiercache targets` say why")
