"""Random histories of a store, of lookups, listings and refreshes, against a model that remembers every state of the store.

What the namespace says about a name must be true of the store at *some* moment that the dataset's time to live, and the last
refresh, still allow. The model knows all moments; it shares no code with what it judges but the rule what a name can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tiercache.core.naming import decode, encode, fault
from tiercache.core.record import ROOT_INODE, Entry, Kind, Page
from tiercache.engine.dataset import Dataset
from tiercache.engine.namespace import STALE_SECONDS, Namespace
from tiercache.errors import NotFound, Unavailable
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.tier import MAX_PAGE

PARTS = ["a", "b", "x", "x-", "x-1", "x-2", "x.", "", ".", "..", "\udcff", "n\nl", "e\u0301", "L" * 256, "%2F"]
NAMES = [part for part in PARTS if fault(encode(part)) is None]
DIRECTORY = "directory"
ABSENT = "absent"

# Mostly few keys that meet each other often (files that are directories too, siblings that sort between `x` and `x/`), now and
# then any odd one.
few = st.sampled_from(["a", "x", "x-1", "x-2", "x.", "a/a", "x/a", "x/x", "a/x", "a/x/a", "a/x-1", "a//x", "x/../a", "a/"])
odd = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("/".join).filter(bool)
keys = st.one_of(few, few, few, odd)
some = st.sampled_from([(), (), ("a",), ("x",), ("x-1",), ("a", "a"), ("x", "a"), ("a", "x"), ("a", "x", "a")])
paths = st.one_of(some, some, some, st.lists(st.sampled_from(NAMES), max_size=2).map(tuple))


@dataclass(frozen=True)
class Put:
    key: str
    data: bytes


@dataclass(frozen=True)
class Delete:
    position: int


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Lookup:
    path: tuple[str, ...]
    times: int


@dataclass(frozen=True)
class ListDirectory:
    path: tuple[str, ...]


@dataclass(frozen=True)
class Refresh:
    path: tuple[str, ...]


@dataclass(frozen=True)
class WalkAll:
    pass


@dataclass(frozen=True)
class Fail:
    after_requests: int


@dataclass(frozen=True)
class Remount:
    prune: bool


Step = Put | Delete | Wait | Lookup | ListDirectory | Refresh | WalkAll | Fail | Remount

step_kinds = [
    st.builds(Put, keys, st.sampled_from([b"", b"1", b"2"])),
    st.builds(Put, keys, st.sampled_from([b"", b"1", b"2"])),
    st.builds(Delete, st.integers(0, 30)),
    st.builds(Wait, st.sampled_from([1.0, 30.0, 60.0, 60.0])),
    st.builds(Lookup, paths, st.sampled_from([1, 1, 10])),
    st.builds(Lookup, paths, st.just(1)),
    st.builds(ListDirectory, paths),
    st.builds(ListDirectory, paths),
    st.builds(Refresh, paths),
    st.builds(WalkAll),
    st.builds(Fail, st.integers(0, 2)),
    st.builds(Remount, st.booleans()),
]
steps = st.one_of(step_kinds)


class Pages(MemoryCold):
    """A store with small pages, which fails when it is told to. `failed`: a request did, in this step or an earlier one."""

    page_names = 3
    fails_after = -1
    failed = False

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        page = await super().list(prefix, delimiter=delimiter, token=token, limit=min(limit, self.page_names))
        self.fails_after -= 1
        if self.fails_after == -1:
            self.failed = True
            raise Unavailable("told to fail")
        return page


def meaning(state: dict[str, str], prefix: str, name: str) -> str:
    """What a name is in one state of the store: a version, DIRECTORY or ABSENT."""
    if any(key.startswith(f"{prefix}{name}/") for key in state):
        return DIRECTORY
    return state.get(prefix + name, ABSENT)


@dataclass
class History:
    """All states of the store with the times at which they began."""

    states: list[tuple[float, dict[str, str]]] = field(default_factory=lambda: [(0.0, {})])
    floor: int = 0

    def change(self, now: float, state: dict[str, str]) -> None:
        self.states.append((now, state))

    def allowed(self, now: float, ttl: float, prefix: str, name: str) -> set[str]:
        found = {meaning(self.states[-1][1], prefix, name)}
        for position in range(self.floor, len(self.states) - 1):
            if self.states[position + 1][0] > now - ttl or ttl == float("inf"):
                found.add(meaning(self.states[position][1], prefix, name))
        return found


class Run:
    def __init__(self, nursery: trio.Nursery, ttl: float, page_names: int) -> None:
        self.nursery = nursery
        self.ttl = ttl
        self.store = Pages()
        self.store.page_names = page_names
        self.index = MemoryIndex()
        self.now = 1000.0
        self.history = History()
        self.names = self.mount()

    def mount(self) -> Namespace:
        return Namespace(
            self.index,
            [Dataset("data", self.store, self.store, "", self.ttl)],
            single=True,
            negative_ttl_seconds=5.0,
            clock=lambda: self.now,
            on_unreachable=lambda _dataset, _count: None,
            nursery=self.nursery,
        )

    def state(self) -> dict[str, str]:
        return dict(self.history.states[-1][1])

    async def step(self, step: Step) -> None:
        match step:
            case Put(key, data):
                version = self.store.put(key, data).version
                self.history.change(self.now, {**self.state(), key: version})
            case Delete(position):
                state = self.state()
                if state:
                    key = sorted(state)[position % len(state)]
                    self.store.delete(key)
                    self.history.change(self.now, {other: version for other, version in state.items() if other != key})
            case Wait(seconds):
                self.now += seconds
            case Fail(after_requests):
                self.store.fails_after = after_requests
            case Remount(prune):
                if prune:
                    await self.index.prune()
                self.names = self.mount()
            case _:
                await self.ask(step)
        await wait_all_tasks_blocked()
        self.store.failed = self.names.is_silent("data")

    async def ask(self, step: Step) -> None:
        try:
            match step:
                case Lookup(path, times):
                    for _ in range(times):
                        await self.walk_to(path)
                        await wait_all_tasks_blocked()
                case ListDirectory(path):
                    entry = await self.walk_to(path)
                    if entry is not None and entry.kind is Kind.DIRECTORY:
                        await self.list_directory(entry)
                case Refresh(path):
                    await self.refresh(path)
                case WalkAll():
                    await self.walk_all()
        except Unavailable:
            assert self.store.fails_after < 0, "nothing had been told to fail"

    async def walk_to(self, path: tuple[str, ...]) -> Entry | None:
        """Lookup by lookup, each judged; None when a name on the way is absent or a file."""
        entry = self.names.entry(ROOT_INODE)
        prefix = ""
        for name in path:
            if entry is None or entry.kind is not Kind.DIRECTORY:
                return None
            before = self.store.requests["list"]
            try:
                entry, seconds = await self.names.lookup(entry.inode, encode(name))
            except NotFound:
                entry, seconds = None, 0.0
            self.judge(prefix, name, entry)
            background = 2 if self.store.failed else 0  # what goes on being asked while the store is silent
            assert self.store.requests["list"] - before <= 2 + 1 + background, (
                "two requests, and a page that lookups had paid for"
            )
            assert 0 <= seconds <= (max(self.ttl, STALE_SECONDS) if self.store.failed else self.ttl)
            if entry is not None:
                assert self.names.entry(entry.inode) == entry
                assert self.names.is_current(entry)
            prefix += f"{name}/"
        return entry

    def judge(self, prefix: str, name: str, entry: Entry | None) -> None:
        said = ABSENT if entry is None else entry.version or DIRECTORY
        history, ttl = self.history, self.ttl
        if self.store.failed:  # what was known is believed, a refresh or not
            history, ttl = History(self.history.states), float("inf")
        assert said in history.allowed(self.now, ttl, prefix, name), (prefix, name)

    async def list_directory(self, directory: Entry) -> None:
        found: dict[str, Entry] = {}
        try:
            stream = await self.names.open_directory(directory.inode)
            position = 0
            while batch := await stream.read(position):
                for entry, _ in batch:
                    assert decode(entry.name) not in found, "a name came twice"
                    found[decode(entry.name)] = entry
                position = batch[-1][1]
        except NotFound:
            assert directory.inode != ROOT_INODE
            parent, _, name = directory.key.removesuffix("/").rpartition("/")
            allowed = self.history.allowed(self.now, self.ttl, f"{parent}/" if parent else "", name)
            assert allowed - {DIRECTORY}, "it was a directory all the time"
            return
        assert set(found) <= set(NAMES), "a name that POSIX does not have"
        for name in NAMES:
            self.judge(directory.key, name, found.get(name))

    async def refresh(self, path: tuple[str, ...]) -> None:
        await self.names.refresh("data", "")
        self.history.floor = len(self.history.states) - 1
        try:
            await self.names.refresh("data", "/".join(path))
        except NotFound:
            self.judge("".join(f"{name}/" for name in path[:-1]), path[-1], None)

    async def walk_all(self) -> None:
        walk = await self.names.walk("data", "")
        found: list[str] = []
        while page := await walk.page():
            found += [entry.key for entry in page]
            for entry in page:
                assert self.names.entry(entry.inode) == entry
        state = self.state()
        reachable = [
            key
            for key in state
            if all(fault(encode(part)) is None for part in key.split("/"))
            and not any(other.startswith(f"{key}/") for other in state)
        ]
        assert sorted(found) == sorted(reachable)


@given(
    st.sets(few, min_size=2),
    st.lists(steps, min_size=15, max_size=60),
    st.sampled_from([60.0, 60.0, 0.0, float("inf")]),
    st.sampled_from([1, 3, 1000]),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_a_name_leads_to_was_true_within_the_time_to_live(
    first: set[str], history: list[Step], ttl: float, page_names: int
) -> None:
    play([*(Put(key, b"1") for key in sorted(first)), *history], ttl, page_names)


def play(history: list[Step], ttl: float, page_names: int) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            run = Run(nursery, ttl, page_names)
            for step in history:
                await run.step(step)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_the_model_itself_notices_a_stale_answer() -> None:
    """A namespace that never asks again would be found out."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            run = Run(nursery, 60.0, 3)
            await run.step(Put("a", b"1"))
            await run.step(Lookup(("a",), 1))
            await run.step(Put("a", b"2"))
            old = await run.walk_to(("a",))
            await run.step(Wait(60.0))
            with pytest.raises(AssertionError):
                run.judge("", "a", old)
            nursery.cancel_scope.cancel()

    trio.run(main)
