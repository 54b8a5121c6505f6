"""The reference model: a dictionary of bytes, against a real engine to which everything happens that can.

The model knows every version that every key ever had and when it was the current one. What it demands of the engine:

* A read gives exactly the bytes of the version that was opened, or an error that has a reason: VersionChanged when that version
  is no longer the store's, Unavailable or BadResponse when the store or the index fails at that time. Never a mixture or zeros.
* An open leads to a version that was current within the time to live, or since the last refresh if that is later. The time to
  live is suspended while the store does not answer.
* The ledger never exceeds the capacity, and the files never occupy more than it says.
* When all is quiet nothing is reserved, nobody uses anything, and ledger and index agree.

Operations are drawn from a seeded generator. Threads make the interleaving of a seed differ a little from run to run.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import DATASET, KIB, Clock, Lagging, Mounted, engine_on, limits, occupied_bytes, until
from tests.engine.faults import FailingDisk, broken, no_space
from tests.reference.homes import Home, spoil
from tiercache.core.record import Inode, Pin
from tiercache.engine.pinning import key_of
from tiercache.errors import BadResponse, HotSick, HotTierError, NotFound, TiercacheError, TierError, Unavailable, VersionChanged
from tiercache.tiers.faulty import Fault, Faulty
from tiercache.tiers.memory import MemoryCold

CHUNK_BYTES = 64 * KIB
CAPACITY_BYTES = 24 * CHUNK_BYTES
TTL_SECONDS = 60.0
KEYS = ("a", "b", "c/d", "c/e", "c/f/g")
SIZES = (0, 1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 200_000, 400_000, 1_100_000)
MAX_HANDLES = 6
EXTENTS_BYTES = 4096
"""What the file system may count for the map of a file that was filled in many pieces."""


class Weather:
    """The store's faults: how often a request fails, and whether any could have failed since somebody looked."""

    def __init__(self, rng: random.Random) -> None:
        self.ratio = 0.0
        self._rng = rng

    def draw(self, operation: str, key: str) -> Fault | None:
        if self._rng.random() >= self.ratio:
            return None
        if self._rng.random() < 0.2:
            return Fault(operation, error=lambda: BadResponse(f"nonsense about {key}"))
        after_bytes = self._rng.choice((0, 0, 1, 5000, 40_000)) if operation == "read" else 0
        return Fault(operation, after_bytes=after_bytes, error=lambda: Unavailable(f"{key} did not come"))


@dataclass
class Handle:
    inode: Inode
    key: str
    version: str


@dataclass
class Truth:
    """What was in the store, and when: for each key (since, version), '' for its absence."""

    history: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: {key: [(-1e18, "")] for key in KEYS})
    contents: dict[tuple[str, str], bytes] = field(default_factory=dict)
    refreshed: dict[str, float] = field(default_factory=dict)

    def current(self, key: str) -> str:
        return self.history[key][-1][1]

    def possible(self, key: str, now: float, *, silent: bool = False) -> set[str]:
        """Versions that an open may lead to: those that were current at some time within the time to live, or since the last
        refresh. While the store is silent, what was known goes on being believed."""
        since = max(-1e18 if silent else now - TTL_SECONDS, self.refreshed.get(key, -1e18))
        history = self.history[key]
        following = [begin for begin, _ in history[1:]] + [float("inf")]
        return {version for (_, version), end in zip(history, following, strict=True) if end >= since}


class Model:
    def __init__(self, home: Home, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.truth = Truth()
        self.store = MemoryCold(piece_bytes=16 * KIB)
        self.weather = Weather(random.Random(seed + 1))
        self.handles: list[Handle] = []
        self.steps: list[str] = []
        self.limit_bytes = CAPACITY_BYTES
        self._home = home
        self._path = path
        self._numbers = limits(
            CHUNK_BYTES,
            whole_file_bytes=self.rng.choice((0, 128 * KIB, 64 << 20)),
            read_ahead_bytes=self.rng.choice((0, 4 * CHUNK_BYTES, 16 * CHUNK_BYTES)),
        )
        self._stack = AsyncExitStack()
        self.mount: Mounted
        self.index: Lagging
        self.disk: FailingDisk

    # -- the process

    async def start(self) -> None:
        self.index, self.disk, ledger = await self._home.open()
        self._stack = AsyncExitStack()
        mounting = engine_on(
            self._path,
            Faulty(self.store, self.weather),
            index=self.index,
            files=self.disk,
            capacity_bytes=CAPACITY_BYTES,
            ttl_seconds=TTL_SECONDS,
            numbers=self._numbers,
            clock=self.clock,
            seed=self.rng.randrange(1 << 30),
        )
        self.mount = await self._stack.enter_async_context(mounting)
        assert self.mount.ledger.held_bytes == ledger.held_bytes
        await self._sweep()
        self.mount.engine.nursery.start_soon(self.mount.engine.promotion.run)
        self.mount.engine.nursery.start_soon(self.mount.engine.pinning.run)

    async def _end(self, *, clean: bool) -> None:
        self.heal()
        self.handles.clear()
        await self._stack.aclose()
        await self._home.close(clean=clean)

    async def stop(self) -> None:
        for handle in self.handles:
            self.mount.release(handle.inode)
        self.heal()
        await self.quiet()
        await self._end(clean=not self.mount.engine.holdings.has_residue)

    async def restart(self) -> None:
        self.steps.append("restart")
        await self.stop()
        await self.start()

    async def crash(self) -> None:
        """Killed at this moment; sometimes with what it had not committed yet, sometimes with the whole machine."""
        loses, reboots = self.rng.random() < 0.5, self.rng.random() < 0.5
        self.steps.append(f"crash loses={loses} reboots={reboots}")
        if loses:
            self.index.lose()
        await self._end(clean=False)
        if reboots:
            self._home.reboot()
            spoil(self._path, self.rng)
        await self.start()

    async def _sweep(self) -> None:
        """What the machine left behind counts as well, even if it is more than the capacity; nothing is added to that."""
        await self.mount.engine.holdings.sweep(0)
        self.limit_bytes = max(CAPACITY_BYTES, self.mount.ledger.used_bytes)

    def heal(self) -> None:
        """The weather clears up: store, disk and index work again."""
        self.weather.ratio = 0.0
        self.disk.writing = self.disk.reading = self.disk.opening = self.disk.unlinking = self.disk.syncing = None
        self.index.failing = None
        self.index.lagging = False
        self.index.catch_up()

    @property
    def fair(self) -> bool:
        """Is there nothing that excuses an error?"""
        return self.weather.ratio == 0.0 and self.index.failing is None

    @property
    def silent(self) -> bool:
        """Does the store leave questions without an answer, or has it not answered one since it did?"""
        return self.weather.ratio > 0.0 or bool(self.mount.engine.namespace._outages._silent)

    # -- the store

    def put(self, key: str, size_bytes: int) -> None:
        data = self.rng.randbytes(size_bytes)
        version = self.store.put(key, data).version
        self.truth.contents[key, version] = data
        self._note(key, version)

    def _note(self, key: str, version: str) -> None:
        if self.truth.current(key) != version:
            self.truth.history[key].append((self.clock.now, version))

    def change_store(self) -> None:
        key = self.rng.choice(KEYS)
        version = self.truth.current(key)
        kind = self.rng.choice(("new", "same size", "grow", "shrink", "delete"))
        self.steps.append(f"{kind} {key}")
        size_bytes = len(self.truth.contents[key, version]) if version else 0
        if kind == "delete":
            if version:
                self.store.delete(key)
                self._note(key, "")
        elif kind == "same size" and version:
            self.put(key, size_bytes)
        elif kind == "grow" and version:
            self.put(key, size_bytes + self.rng.choice((1, 4096, 100_000)))
        elif kind == "shrink" and version:
            self.put(key, max(0, size_bytes - self.rng.choice((1, 4096, 100_000))))
        else:
            self.put(key, self.rng.choice(SIZES))

    # -- the user

    async def open(self) -> None:
        key = self.rng.choice(KEYS)
        self.steps.append(f"open {key}")
        silent = self.silent
        try:
            inode = await self._open_as_kernel(key)
        except NotFound:
            assert "" in self.truth.possible(key, self.clock.now, silent=silent or self.silent), f"{key} is there"
            return
        except (TierError, HotSick) as error:
            self._excuse(error)
            return
        entry = self.mount.engine.namespace.entry(inode)
        assert entry is not None
        possible = self.truth.possible(key, self.clock.now, silent=silent or self.silent)
        assert entry.version in possible, f"{key} was opened as {entry.version}"
        self.handles.append(Handle(inode, key, entry.version))
        if len(self.handles) > MAX_HANDLES:
            await self.release()

    async def _open_as_kernel(self, key: str) -> Inode:
        """OPEN that is answered with ESTALE makes the kernel look up the path again, once."""
        entry = await self.mount.entry(key)
        try:
            await self.mount.engine.reader.open(entry.inode)
        except VersionChanged:
            entry = await self.mount.entry(key)
            await self.mount.engine.reader.open(entry.inode)
        return entry.inode

    async def release(self) -> None:
        if self.handles:
            handle = self.handles.pop(self.rng.randrange(len(self.handles)))
            self.steps.append(f"release {handle.key}")
            self.mount.release(handle.inode)

    async def read(self) -> None:
        if self.handles:
            await self._read_one(self.rng.choice(self.handles), self.rng.random())

    async def _read_one(self, handle: Handle, draw: float) -> None:
        data = self.truth.contents[handle.key, handle.version]
        offset = self.rng.randrange(len(data) + 1)
        length = self.rng.choice((1, 4096, 10_000, 128 * KIB, 300 * KIB))
        if draw < 0.3:
            offset -= offset % CHUNK_BYTES
        self.steps.append(f"read {handle.key} {offset}+{length} of {len(data)}")
        was_fair = self.fair
        try:
            got = await self.mount.read(handle.inode, offset, length)
        except VersionChanged:
            assert self.truth.current(handle.key) != handle.version, "its version is in the store"
        except (Unavailable, BadResponse, HotSick) as error:
            self._excuse(error, was_fair=was_fair)
        else:
            assert got == data[offset : offset + length], f"wrong bytes of {handle.key} at {offset}"

    async def read_to_the_end(self) -> None:
        if self.handles:
            handle = self.rng.choice(self.handles)
            self.steps.append(f"cat {handle.key}")
            data = self.truth.contents[handle.key, handle.version]
            for offset in range(0, len(data), 32 * KIB):
                try:
                    got = await self.mount.read(handle.inode, offset, 32 * KIB)
                except VersionChanged:
                    assert self.truth.current(handle.key) != handle.version
                    return
                except (Unavailable, BadResponse, HotSick) as error:
                    self._excuse(error)
                    return
                assert got == data[offset : offset + 32 * KIB], f"wrong bytes of {handle.key} at {offset}"

    async def storm(self) -> None:
        """Many readers at once, some of whom give up, while the store changes under them."""
        self.steps.append("storm")
        if not self.handles:
            return

        async def impatient() -> None:
            with trio.CancelScope() as scope:
                scope.deadline = trio.current_time() + self.rng.random() * 0.01
                await self._read_one(self.rng.choice(handles), self.rng.random())

        async def patient() -> None:
            for _ in range(3):
                await self._read_one(self.rng.choice(handles), self.rng.random())

        async def change() -> None:
            for _ in range(self.rng.randrange(20)):
                await trio.lowlevel.checkpoint()
            self.change_store()

        handles = list(self.handles)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(self.rng.choice((patient, patient, impatient)))
            if self.rng.random() < 0.3:
                nursery.start_soon(change)

    def _excuse(self, error: TiercacheError, *, was_fair: bool = True) -> None:
        assert not (was_fair and self.fair), f"nothing failed: {type(error).__name__}: {error.line}"

    # -- the operator, the machine, the time

    async def refresh(self) -> None:
        key = self.rng.choice(KEYS)
        self.steps.append(f"refresh {key}")
        now = self.clock.now
        try:
            await self.mount.engine.namespace.refresh(DATASET, key)
        except NotFound:
            assert "" in self.truth.possible(key, now)
        except (TierError, HotTierError) as error:
            self._excuse(error)
            return
        if self.index.failing is None:  # else it is known in memory only, and forgotten with the process
            self.truth.refreshed[key] = now

    async def pin(self) -> None:
        self.steps.append("pin")
        pinning = self.mount.engine.pinning
        wanted = Pin(DATASET, self.rng.choice(("a", "c", "c/f")), False, "model", "", 0, 0, 0)
        try:
            if self.rng.random() < 0.5:
                await pinning.remove([key_of(wanted)])
                return
            admission, sized = await pinning.admit([wanted], self.mount.engine.facts.hot_bytes)
            if not admission.refusal:
                await pinning.add(sized)
        except NotFound:
            return
        except (TierError, HotTierError) as error:
            self._excuse(error)

    async def upkeep(self) -> None:
        """What runs every second or half minute in a daemon."""
        self.steps.append("upkeep")
        holdings = self.mount.engine.holdings
        works: list[Callable[[], Awaitable[object]]] = [
            lambda: holdings.sync(0),
            lambda: holdings.reclaim(0, CHUNK_BYTES * 4),
            lambda: holdings.remove_leftovers(0),
            lambda: holdings.sweep(0),
            lambda: holdings.evict([record.object_id for record in self.index.all_hot()][:2]),
        ]
        try:
            await self.rng.choice(works)()
        except HotTierError:
            troubles = (self.disk.opening, self.disk.unlinking, self.disk.syncing, self.disk.writing, self.disk.reading)
            assert self.index.failing is not None or any(troubles)

    async def pass_time(self) -> None:
        seconds = self.rng.choice((1.0, 3.0, 11.0, TTL_SECONDS + 1.0))
        self.steps.append(f"{seconds} s later")
        self.clock.pass_seconds(seconds)

    async def change_weather(self) -> None:
        self.heal()
        kind = self.rng.choice(("clear", "clear", "store", "away", "full", "disk", "reads", "lossy", "index", "slow index"))
        self.steps.append(f"weather: {kind}")
        match kind:
            case "store":
                self.weather.ratio = 0.3
            case "away":
                self.weather.ratio = 1.0
            case "full":
                self.disk.writing = no_space
            case "disk":
                self.disk.writing = self.disk.opening = self.disk.unlinking = broken
            case "reads":
                self.disk.reading = broken
            case "lossy":
                self.disk.syncing = broken
            case "index":
                self.index.failing = lambda: HotSick("the index's disk is full")
            case "slow index":
                self.index.lagging = True

    # -- all of it

    async def step(self) -> None:
        operations: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (20, self.open),
            (30, self.read),
            (6, self.read_to_the_end),
            (8, self.storm),
            (12, self.release),
            (10, self._change),
            (8, self.pass_time),
            (4, self.refresh),
            (3, self.pin),
            (6, self.upkeep),
            (6, self.change_weather),
            (2, self.restart),
            (4, self.crash),
        ]
        (operation,) = self.rng.choices([each for _, each in operations], [weight for weight, _ in operations])
        await operation()
        self.check()

    async def _change(self) -> None:
        self.change_store()

    def check(self) -> None:
        ledger = self.mount.ledger
        assert ledger.used_bytes <= self.limit_bytes, "more is promised than there is"
        own_bytes = len(list(self.disk.walk(0))) * EXTENTS_BYTES
        found_bytes, known_bytes = occupied_bytes(self.disk) - own_bytes, ledger.held_bytes + ledger.reserved_bytes
        assert found_bytes <= known_bytes, f"files occupy {found_bytes} bytes, {known_bytes} are accounted for"

    async def quiet(self) -> None:
        """Until nothing runs any more; then what must hold at rest."""
        await wait_all_tasks_blocked()  # what was started a moment ago has begun
        await until(lambda: not self.mount.engine.promotion._wishes and not self.mount.engine.promotion._busy)
        await until(lambda: all(found.done for found in self.mount.engine.pinning._progress.values()))
        await self.mount.settled()
        holdings, ledger = self.mount.engine.holdings, self.mount.ledger
        assert ledger.reserved_bytes == 0
        assert self.mount.engine.reader._budget.used_bytes == 0
        if not holdings.has_residue:
            known_bytes = self.index.held_bytes(0)
            assert ledger.held_bytes == known_bytes, f"{ledger.held_bytes} accounted for, {known_bytes} in the index"
        self.check()

    async def run(self, steps_count: int) -> None:
        try:
            await self._run(steps_count)
        finally:
            await self._stack.aclose()

    async def _run(self, steps_count: int) -> None:
        for key in KEYS:
            self.put(key, self.rng.choice(SIZES))
        await self.start()
        for _ in range(steps_count):
            await self.step()
        for handle in self.handles:
            self.mount.release(handle.inode)
        self.handles.clear()
        self.heal()
        self.clock.pass_seconds(TTL_SECONDS + 1.0)
        await self.quiet()
        assert not self.mount.engine.holdings._held
        with trio.fail_after(10):
            while self.silent:  # the first question after an outage is answered from memory
                for key in KEYS:
                    with suppress(NotFound):
                        await self.mount.entry(key)
                await trio.sleep(0.001)
        for key in KEYS:
            version = self.truth.current(key)
            if version:
                assert await self.mount.cat(key) == self.truth.contents[key, version]
        await self.stop()
