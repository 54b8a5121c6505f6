"""Promotion: the rest of a file that will be used, and all of what is pinned, fetched in the background.

A bounded set of wishes, each one an object; a few workers take them in turn and fill the missing chunks one after the other
through the same single flight as readers, at the cold tier's lower priority. A wish that does not fit in is dropped: it is
an opinion, and the reader that caused it is served anyway. Pins do not use the queue: their fetch waits its turn
(`fetch`), because somebody was promised the bytes.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from tiercache.core.record import ObjectId, ObjectRef
from tiercache.engine.fill import Filler
from tiercache.engine.holdings import Holdings
from tiercache.errors import HotFull, TiercacheError

WORKERS = 4
WISHES = 4096


class Promotion:
    def __init__(self, holdings: Holdings, filler: Filler) -> None:
        self._holdings = holdings
        self._filler = filler
        self._wishes: OrderedDict[ObjectId, ObjectRef] = OrderedDict()
        self._busy: set[ObjectId] = set()
        self._wake = trio.Event()

    def wish(self, ref: ObjectRef) -> None:
        """Fetch what is missing of the object when there is time for it."""
        if ref.object_id in self._wishes or ref.object_id in self._busy or len(self._wishes) >= WISHES:
            return
        self._wishes[ref.object_id] = ref
        self._wake.set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while not self._wishes:
                if self._wake.is_set():
                    self._wake = trio.Event()  # one for all workers: nobody waits for an event that nobody will set
                await self._wake.wait()
            object_id, ref = self._wishes.popitem(last=False)
            self._busy.add(object_id)
            try:
                await self.fetch(ref)
            except TiercacheError:
                continue  # counted where it happened; the next reader that needs the bytes asks again
            finally:
                self._busy.discard(object_id)

    async def fetch(self, ref: ObjectRef) -> None:
        """Fill every missing chunk of the object. Raises the first failure; HotFull when it does not fit."""
        held = await self._holdings.acquire(ref)
        try:
            for chunk in range(held.chunk_count):
                if held.has(chunk):
                    continue
                begin, _ = held.span(chunk)
                fill = self._filler.running(ref.object_id, chunk)
                if fill is None or fill.done.is_set():  # one that is done went past the hot tier, when that had no room
                    fill = self._filler.start(held, chunk, begin, background=True)
                await fill.done.wait()
                fill.check()
                if not held.has(chunk):
                    raise HotFull(f"{ref.key} does not fit into the hot tier")
        finally:
            self._holdings.release(held)
