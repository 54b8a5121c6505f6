"""Pins: what stays in the hot tier although nobody reads it, and is fetched although nobody asked.

A pin is durable before the command returns: it is committed with sync, then obeyed. Admission counts first
(the cold store's listing, so the numbers are those of now) and refuses what cannot fit, with the numbers.
Sizes are whole file system blocks, which is what files take. Everything pinned is fetched in the background, one pin
after another and `AT_ONCE` objects at a time, through the same single flight as readers. A pin of a prefix covers what
appears below it later: the eviction rule goes by the key, and each start and each `REVISIT_SECONDS` fetches what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog
import trio

from tiercache.core.pin import PinSet, Refused, admits, covered_bytes, live
from tiercache.core.record import Entry, Pin
from tiercache.core.watermark import blocks
from tiercache.engine.namespace import Namespace
from tiercache.engine.promotion import Promotion
from tiercache.engine.room import Room
from tiercache.errors import NotFound, TiercacheError
from tiercache.index.index import DropPin, Index, PutPin

log = structlog.get_logger()

REVISIT_SECONDS = 600.0
AT_ONCE = 4
"""Objects of one pin: hides the time to the first byte of small ones, and leaves the tier's slots to readers."""

PinKey = tuple[str, str, bool]


@dataclass
class Progress:
    """What the background fetch of one pin has done. `hot_*` count what is complete on the local disk."""

    objects_count: int = 0
    wanted_bytes: int = 0
    hot_objects_count: int = 0
    hot_bytes: int = 0
    failed_count: int = 0
    last_error: str = ""
    done: bool = False


@dataclass(frozen=True)
class Admission:
    """The numbers of a request. `refusal` is '' when it was (or with `dry_run` would be) admitted."""

    objects_count: int
    wanted_bytes: int
    hot_bytes: int
    pinned_bytes: int
    pinnable_bytes: int
    refusal: str


def key_of(pin: Pin) -> PinKey:
    return pin.dataset, pin.prefix, pin.exact


class Pinning:
    def __init__(
        self,
        nursery: trio.Nursery,
        index: Index,
        namespace: Namespace,
        promotion: Promotion,
        datasets: Collection[str],
        room: Room,
        clock: Callable[[], float],
    ) -> None:
        self._nursery = nursery
        self._index = index
        self._namespace = namespace
        self._promotion = promotion
        self._datasets = datasets
        self._room = room
        self._block_bytes = max(ledger.block_bytes for ledger in room.ledgers)
        self._clock = clock
        self._set = PinSet(live(index.pins(), clock()))
        self._progress: dict[PinKey, Progress] = {}
        self._fetching: dict[PinKey, trio.CancelScope] = {}
        self._turn = trio.Lock()

    def protects(self, dataset: str, key: str) -> bool:
        """Is this key pinned now?"""
        return self._set.covers(dataset, key, self._clock())

    def covering(self, dataset: str, key: str) -> Pin | None:
        return self._set.find(dataset, key, self._clock())

    def pins(self) -> list[Pin]:
        return list(live(self._index.pins(), self._clock()))

    def pinned_bytes(self, dataset: str | None = None) -> int:
        """Of all datasets, or of one."""
        return covered_bytes([pin for pin in self.pins() if dataset in (None, pin.dataset)])

    def _taken_bytes(self, entry: Entry) -> int:
        return blocks(entry.size_bytes, self._block_bytes)

    def progress(self, key: PinKey) -> Progress:
        """Raises NotFound for what is not pinned."""
        found = self._progress.get(key)
        if found is None:
            raise NotFound(f"{key[0]}/{key[1]} is not pinned", hint="`tiercache pins` lists what is")
        return found

    def hot_bytes(self, key: PinKey) -> int:
        """What the fetch of a pin has found or made hot so far."""
        found = self._progress.get(key)
        return found.hot_bytes if found else 0

    async def admit(self, wanted: Sequence[Pin], is_hot: Callable[[Entry], int]) -> tuple[Admission, list[Pin]]:
        """Count what the pins cover and decide; nothing is changed. Returns the pins with their sizes filled in."""
        sized = []
        objects_count = hot_bytes = 0
        for pin in wanted:
            walk = await self._namespace.walk(pin.dataset, pin.prefix, exact=pin.exact)
            pin_bytes = 0
            while entries := await walk.page():
                objects_count += len(entries)
                pin_bytes += sum(self._taken_bytes(entry) for entry in entries)
                hot_bytes += sum(blocks(is_hot(entry), self._block_bytes) for entry in entries)
            sized.append(_sized(pin, pin_bytes))
        if not objects_count:
            names = ", ".join(f"{pin.dataset}/{pin.prefix}" for pin in wanted)
            raise NotFound(f"nothing to pin at {names}", hint="`ls` the path under the mount")
        wanted_bytes = sum(pin.bytes_at_admission for pin in sized)
        replaced = {key_of(pin) for pin in sized}
        others = [pin for pin in self.pins() if key_of(pin) not in replaced]
        pinned_bytes = covered_bytes(others)
        more_bytes = covered_bytes([*others, *sized]) - pinned_bytes
        verdict = admits(more_bytes, min(hot_bytes, more_bytes), pinned_bytes, self._room.capacity_bytes)
        refusal = _refusal(verdict) if isinstance(verdict, Refused) else ""
        return Admission(objects_count, wanted_bytes, hot_bytes, pinned_bytes, verdict.limit_bytes, refusal), sized

    async def add(self, pins: Sequence[Pin]) -> None:
        """Make them durable, obey them, and start to fetch."""
        await self._index.commit([PutPin(pin) for pin in pins], sync=True)
        self._reload()
        for pin in pins:
            self.fetch(pin)

    async def remove(self, keys: Sequence[PinKey]) -> None:
        await self._index.commit([DropPin(*key) for key in keys], sync=True)
        self._reload()
        for key in keys:
            if scope := self._fetching.pop(key, None):
                scope.cancel()
            self._progress.pop(key, None)

    def _reload(self) -> None:
        self._set = PinSet(live(self._index.pins(), self._clock()))

    def fetch(self, pin: Pin) -> None:
        """Fetch what is missing of a pin in the background (again: from the start)."""
        key = key_of(pin)
        if scope := self._fetching.pop(key, None):
            scope.cancel()
        scope = self._fetching[key] = trio.CancelScope()
        progress = self._progress[key] = Progress()
        self._nursery.start_soon(self._fetch, pin, progress, scope)

    async def _fetch(self, pin: Pin, progress: Progress, scope: trio.CancelScope) -> None:
        with scope:
            try:
                async with self._turn:
                    await self._fetch_all(pin, progress)
            except TiercacheError as error:
                progress.failed_count += 1
                progress.last_error = error.line
                log.warning("pin_not_fetched", dataset=pin.dataset, prefix=pin.prefix, error=error.line)
            progress.done = True

    async def _fetch_all(self, pin: Pin, progress: Progress) -> None:
        """Begin with the objects in the order of the listing; an error of the listing is raised when those begun have ended."""
        walk = await self._namespace.walk(pin.dataset, pin.prefix, exact=pin.exact)
        places = trio.Semaphore(AT_ONCE)
        failure: TiercacheError | None = None
        async with trio.open_nursery() as nursery:
            try:
                while entries := await walk.page():
                    progress.objects_count += len(entries)
                    progress.wanted_bytes += sum(self._taken_bytes(entry) for entry in entries)
                    for entry in entries:
                        await places.acquire()
                        nursery.start_soon(self._fetch_one, entry, progress, places)
            except TiercacheError as error:
                failure = error
        if failure is not None:
            raise failure

    async def _fetch_one(self, entry: Entry, progress: Progress, places: trio.Semaphore) -> None:
        try:
            await self._promotion.fetch(entry.ref)
        except TiercacheError as error:
            progress.failed_count += 1
            progress.last_error = error.line
        else:
            progress.hot_objects_count += 1
            progress.hot_bytes += self._taken_bytes(entry)
        finally:
            places.release()

    async def run(self) -> None:
        """Fetch everything pinned at the start and look for new objects now and then; drop pins that have expired."""
        while True:
            now = self._clock()
            expired = [pin for pin in self._index.pins() if pin.expires_seconds and pin.expires_seconds <= now]
            if expired:
                await self.remove([key_of(pin) for pin in expired])
            for pin in self.pins():
                if pin.dataset not in self._datasets:
                    continue  # of another configuration that used this cache directory
                running = self._progress.get(key_of(pin))
                if running is None or running.done:
                    self.fetch(pin)
            await trio.sleep(REVISIT_SECONDS)


def _refusal(verdict: Refused) -> str:
    return (
        f"{verdict.wanted_bytes} bytes do not fit: {verdict.pinned_bytes} of {verdict.limit_bytes} pinnable bytes are "
        f"pinned already, {verdict.short_bytes} are missing"
    )


def _sized(pin: Pin, size_bytes: int) -> Pin:
    return Pin(pin.dataset, pin.prefix, pin.exact, pin.owner, pin.reason, pin.created_seconds, pin.expires_seconds, size_bytes)
