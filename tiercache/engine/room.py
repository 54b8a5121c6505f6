"""Room in the hot directories: where a new object goes, and what has to go for it.

One ledger a directory (`tiers/space.py`) says what there is; `core/eviction.py` says who goes. This is where the two meet
the index, and nothing here touches a disk or waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence

import trio

from tiercache.core.eviction import FRESH_SECONDS, Candidate, Evict, SampledLru
from tiercache.core.record import HotRecord, ObjectId
from tiercache.core.watermark import blocks
from tiercache.errors import HotFull
from tiercache.index.index import Index
from tiercache.tiers.space import Ledger, Reservation

SAMPLE_COUNT = 64
EMPTY_SAMPLES = 4
"""After so many samples without a victim everything is taken for pinned, in use or fresh."""


class Room:
    def __init__(self, ledgers: Sequence[Ledger], rng: random.Random, evicted: Callable[[int, int], None]) -> None:
        self.ledgers = ledgers
        self._rng = rng
        self._evicted = evicted
        self._policies = [SampledLru() for _ in ledgers]
        self._reclaiming = [trio.Lock() for _ in ledgers]

    def choose(self, usable: Callable[[int], bool]) -> int:
        """The directory for a new object: the one with the largest part of its limit free, sick ones last."""

        def preference(directory: int) -> tuple[bool, float]:
            ledger = self.ledgers[directory]
            return usable(directory), ledger.free_bytes / max(1, ledger.limit_bytes)

        return max(range(len(self.ledgers)), key=preference)

    def reserve(self, directory: int, length_bytes: int) -> Reservation:
        """Raises HotFull with the numbers."""
        return self.ledgers[directory].reserve(length_bytes)

    def refuse_giant(self, directory: int, present_bytes: int, wanted_bytes: int) -> None:
        """Raises HotFull when an object would take more of the directory than reclaim leaves to all of them."""
        ledger = self.ledgers[directory]
        most_bytes = int(ledger.limit_bytes * ledger.low_ratio) - ledger.overhead_bytes
        if present_bytes + wanted_bytes > most_bytes:
            raise HotFull(f"an object may take {most_bytes} bytes of {ledger.name}, and holds {present_bytes} of them")

    def lacks_bytes(self, directory: int, wanted_bytes: int) -> int:
        """What has to be evicted before so much can be reserved; more than that where others have filled the disk."""
        ledger = self.ledgers[directory]
        return max(0, blocks(wanted_bytes, ledger.block_bytes) + ledger.used_bytes - ledger.limit_bytes)

    def has_room(self, wanted_bytes: int) -> bool:
        """Could so much be reserved somewhere without evicting anything?"""
        return any(not self.lacks_bytes(directory, wanted_bytes) for directory in range(len(self.ledgers)))

    @property
    def scarce(self) -> bool:
        """Could a chunk be taken only by evicting something?"""
        return all(ledger.over_high for ledger in self.ledgers)

    @property
    def capacity_bytes(self) -> int:
        return sum(ledger.limit_bytes for ledger in self.ledgers)

    def reclaiming(self, directory: int) -> trio.Lock:
        """Held by whoever evicts from a directory, so that two do not make the same room twice."""
        return self._reclaiming[directory]

    def victims(
        self,
        directory: int,
        need_bytes: int,
        index: Index,
        now_seconds: float,
        spared: Callable[[HotRecord], bool],
        *,
        taken: Container[ObjectId] = frozenset(),
        fresh_seconds: int = FRESH_SECONDS,
        limit_count: int = 1 << 30,
    ) -> list[Evict]:
        """Copies to drop so that `need_bytes` become free, as far as anything may go; none that are `taken` already.

        About `limit_count` at most: choosing 64 blocks the event loop for 4 ms.
        """
        chosen: dict[ObjectId, Evict] = {}
        freed_bytes = empty = 0
        while freed_bytes < need_bytes and len(chosen) < limit_count and empty < EMPTY_SAMPLES:
            records = index.sample_hot(SAMPLE_COUNT, self._rng)
            sample = [_candidate(record) for record in records if record.directory == directory and not spared(record)]
            found = self._policies[directory].choose(
                sample,
                need_bytes - freed_bytes,
                now_seconds,
                protected=lambda object_id: object_id in chosen or object_id in taken,
                fresh_seconds=fresh_seconds,
            )
            empty = 0 if found else empty + 1
            for victim in found:
                chosen[victim.object_id] = victim
                freed_bytes += victim.held_bytes
        return list(chosen.values())

    def release(self, directory: int, held_bytes: int, *, evicted: bool = False) -> None:
        """A file is gone from a directory; `evicted` when it went to make room."""
        self.ledgers[directory].release(held_bytes)
        if evicted:
            self._evicted(directory, held_bytes)


def _candidate(record: HotRecord) -> Candidate:
    return Candidate(
        object_id=record.object_id,
        held_bytes=record.held_bytes,
        accessed_seconds=record.accessed_seconds,
        access_count=record.access_count,
        size_bytes=record.size_bytes,
    )
