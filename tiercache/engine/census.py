"""How much of each dataset is hot. One dataset: the index's own totals. Several: a count of all records, renewed now and then in
a thread, since the index keeps totals by directory and not by dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from tiercache.index.index import Index

RENEW_SECONDS = 60.0


@dataclass(frozen=True)
class Count:
    objects_count: int = 0
    held_bytes: int = 0


class Census:
    def __init__(self, index: Index, datasets: Sequence[str], directories_count: int) -> None:
        self._index = index
        self._datasets = datasets
        self._directories_count = directories_count
        self._counts: dict[str, Count] = {}

    def of(self, dataset: str) -> Count:
        if len(self._datasets) == 1:
            held_bytes = sum(self._index.held_bytes(directory) for directory in range(self._directories_count))
            return Count(self._index.hot_count(), held_bytes)
        return self._counts.get(dataset, Count())

    async def run(self) -> None:
        while len(self._datasets) > 1:
            self._counts = await trio.to_thread.run_sync(self._count)
            await trio.sleep(RENEW_SECONDS)

    def _count(self) -> dict[str, Count]:
        counts: dict[str, Count] = {}
        for record in self._index.all_hot():
            before = counts.get(record.dataset, Count())
            counts[record.dataset] = Count(before.objects_count + 1, before.held_bytes + record.held_bytes)
        return counts
