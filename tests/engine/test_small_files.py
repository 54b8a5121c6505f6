"""Small files are opened without a task, and those that are opened in order are there before they are opened.

Nobody pays for those who open at random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.engines import KIB, Mounted, content, engine_on, limits, until
from tests.engine.worlds import names_of
from tiercache.core.eviction import FRESH_SECONDS
from tiercache.core.neighbours import FIRST_BATCH, MARKS_COUNT, START_COUNT
from tiercache.core.record import Entry, Inode
from tiercache.engine.publication import NothingPublished
from tiercache.engine.small_files import AHEAD_COUNT
from tiercache.errors import HotSick, TiercacheError, Unavailable, VersionChanged
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.memory import MemoryCold

COUNT = 200
NAMES = [f"d/{number:04}.bin" for number in range(COUNT)]
DATA = {name: content(number, 5000 + number) for number, name in enumerate(NAMES)}


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    for name, data in DATA.items():
        store.put(name, data)
    store.put("d/0050.big", content(7, 2048 * KIB))
    store.put("d/0050.old", content(8, 5000), archived=True)
    store.put("d/0050x.bin/below", content(9, 100))
    return store


class Published(NothingPublished):
    """Remembers what was published; opens of it are not seen any more."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def publish(self, entry: Entry, directory: int) -> bool:
        self.names.append(entry.key)
        return True

    def hand_over(self, entry: Entry) -> bool:
        return entry.key in self.names


async def list_directory(mount: Mounted) -> None:
    entry = await mount.entry("d")
    await names_of(await mount.engine.namespace.open_directory(entry.inode))


async def read_in_order(mount: Mounted, names: Sequence[str]) -> None:
    for name in names:
        assert await mount.cat(name) == DATA[name]
        await mount.settled()


async def test_files_that_are_opened_in_order_are_there_already(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await list_directory(mount)
        for position, name in enumerate(NAMES):
            assert cold.reads[name] == (position > START_COUNT)
            await read_in_order(mount, [name])
            assert cold.reads[name] == 1
        assert cold.requests["read"] == COUNT  # nothing else
        assert mount.counted("tiercache_read_ahead_bytes_total") == sum(map(len, list(DATA.values())[START_COUNT + 1 :]))


async def test_files_that_are_opened_at_random_are_fetched_when_they_are_opened(tmp_path: Path, cold: MemoryCold) -> None:
    rng = random.Random(1)
    for number in range(4000):
        cold.put(f"d/x{number:04}.bin", b"x")
    async with engine_on(tmp_path, cold) as mount:
        await list_directory(mount)
        opened = [f"d/x{rng.randrange(4000):04}.bin" for _ in range(200)]
        for name in opened:
            assert await mount.cat(name) == b"x"
        await mount.settled()
        assert cold.requests["read"] == len({*opened})


async def test_all_but_the_marks_are_published(tmp_path: Path, cold: MemoryCold) -> None:
    published = Published()
    async with engine_on(tmp_path, cold, publication=published) as mount:
        await list_directory(mount)
        seen_count = 0
        for name in NAMES:
            if name not in published.names:  # else it would be opened without Python
                seen_count += 1
                await read_in_order(mount, [name])
        assert {*published.names} == {*NAMES}
        assert START_COUNT < seen_count < START_COUNT + 5 * MARKS_COUNT


async def open_small(mount: Mounted, name: str) -> bool | None:
    """None: it is none for which no task is needed. Raises what the open failed with."""
    answers: list[tuple[bool, TiercacheError | None]] = []
    inode = (await mount.entry(name)).inode
    if not mount.engine.reader.open_small(inode, lambda *answer: answers.append(answer)):
        return None
    await until(lambda: bool(answers))
    ((is_open, error),) = answers
    if error is not None:
        raise error
    return is_open


async def test_an_open_without_a_task(tmp_path: Path, cold: MemoryCold) -> None:
    published = Published()
    async with engine_on(tmp_path, cold, publication=published, numbers=limits(read_ahead_bytes=0)) as mount:
        for name in NAMES[:20]:
            assert await open_small(mount, name) is True
            assert published.names[-1] == name
            assert cold.reads[name] == 1
            await mount.settled()
            assert await open_small(mount, name) is None  # it is hot
        assert mount.counted("tiercache_opens_total", "data") == 20
        assert not mount.engine.filler.running_count
        assert mount.engine.reader.open_count == 0


async def test_several_opens_of_one_file_are_one_fetch(tmp_path: Path, cold: MemoryCold) -> None:
    gate = cold.hold("read", NAMES[0])
    async with engine_on(tmp_path, cold, publication=Published()) as mount:
        answers: list[bool] = []
        inode = (await mount.entry(NAMES[0])).inode
        for _ in range(5):
            assert mount.engine.reader.open_small(inode, lambda is_open, _: answers.append(is_open))
        await gate.reached.wait()
        assert answers == []
        gate.release()
        await until(lambda: answers == [True] * 5)
        assert cold.reads[NAMES[0]] == 1


async def test_what_is_not_small_or_not_there_needs_a_task(tmp_path: Path, cold: MemoryCold) -> None:
    cold.put("empty", b"")
    async with engine_on(tmp_path, cold, publication=Published()) as mount:
        for name in ("d/0050.big", "d/0050.old", "empty", "d"):
            assert await open_small(mount, name) is None
        assert not mount.engine.reader.open_small(Inode(12345), lambda *_: None)
        old = await mount.entry(NAMES[0])
        cold.put(NAMES[0], content(999, 5000))
        await mount.engine.namespace.refresh("data", NAMES[0])
        assert not mount.engine.reader.open_small(old.inode, lambda *_: None)


async def test_what_goes_wrong_is_left_to_an_open_with_a_task(tmp_path: Path, cold: MemoryCold) -> None:
    failing = Faulty(cold, script := Script())
    async with engine_on(tmp_path, failing, publication=Published(), numbers=limits(read_ahead_bytes=0)) as mount:
        await list_directory(mount)
        script.left.append(Fault("read", NAMES[0], error=lambda: Unavailable("no")))
        with pytest.raises(Unavailable):
            await open_small(mount, NAMES[0])
        assert cold.requests["read"] == 0  # and not once more, with another deadline
        assert await mount.cat(NAMES[0]) == DATA[NAMES[0]]
        cold.put(NAMES[1], content(999, 5000))
        mount.clock.pass_seconds(2)
        assert await open_small(mount, NAMES[1]) is False
        with pytest.raises(VersionChanged):
            await mount.open(NAMES[1])


async def test_an_index_that_cannot_be_read_ends_nothing(
    tmp_path: Path, cold: MemoryCold, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = MemoryIndex()
    gate = cold.hold("read", NAMES[30])
    async with engine_on(tmp_path, cold, index=index, publication=Published()) as mount:
        await list_directory(mount)
        await read_in_order(mount, NAMES[: START_COUNT + 1])
        assert mount.engine.reader.open_small((await mount.entry(NAMES[30])).inode, lambda *_: None)
        await gate.reached.wait()
        with monkeypatch.context() as patch:
            for name in ("hot", "link", "entry", "names", "chunks"):
                patch.setattr(index, name, _fail)
            gate.release()
            await until(lambda: mount.engine.filler.running_count == 0)
            assert not mount.engine.reader.open_small(Inode(12345), lambda *_: None)
        for name in NAMES:
            assert await mount.cat(name) == DATA[name]
        assert mount.engine.reader._budget.used_bytes == 0


def _fail(*_: object) -> NoReturn:
    raise HotSick("no")


async def test_without_room_it_is_left_to_an_open_with_a_task(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=4096, publication=Published()) as mount:
        assert await open_small(mount, NAMES[2]) is False
        assert await mount.cat(NAMES[2]) == DATA[NAMES[2]]


async def test_so_many_at_once_and_no_more(tmp_path: Path, cold: MemoryCold) -> None:
    gate = cold.hold("read", NAMES[START_COUNT + 1])
    gates = [cold.hold("read", name) for name in NAMES[START_COUNT + 2 : START_COUNT + 1 + 2 * FIRST_BATCH]]
    async with engine_on(tmp_path, cold) as mount:
        await list_directory(mount)
        for name in NAMES[: START_COUNT + 1]:
            assert await mount.cat(name) == DATA[name]
        await gate.reached.wait()
        await wait_all_tasks_blocked()
        assert sum(each.reached.is_set() for each in [gate, *gates]) == min(FIRST_BATCH, AHEAD_COUNT)
        for each in [gate, *gates]:
            each.release()
        await mount.settled()


async def test_a_reader_waits_for_what_is_on_its_way(tmp_path: Path, cold: MemoryCold) -> None:
    name = NAMES[START_COUNT + 3]
    gate = cold.hold("read", name)
    async with engine_on(tmp_path, cold) as mount:
        await list_directory(mount)
        for each in NAMES[: START_COUNT + 1]:
            await mount.cat(each)
        await gate.reached.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.cat, name)
            await wait_all_tasks_blocked()
            gate.release()
        assert cold.reads[name] == 1


async def test_what_was_overwritten_meanwhile_is_found_out_by_its_open(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await list_directory(mount)
        new = content(999, 6000)
        for name in NAMES[8:10]:
            cold.put(name, new)
        await read_in_order(mount, NAMES[:8])
        assert cold.reads[NAMES[12]] == 1  # one that has changed does not stop the others
        for name in NAMES[8:10]:
            mount.clock.pass_seconds(2)
            with pytest.raises(VersionChanged):
                await mount.open(name)
            assert await mount.cat(name) == new


async def test_a_store_that_fails_is_left_alone(tmp_path: Path, cold: MemoryCold) -> None:
    failing = Faulty(cold, script := Script())
    async with engine_on(tmp_path, failing) as mount:
        await list_directory(mount)
        await read_in_order(mount, NAMES[:START_COUNT])
        script.left += [Fault("read", name, error=lambda: Unavailable("no")) for name in NAMES[START_COUNT + 1 :]]
        await read_in_order(mount, NAMES[START_COUNT : START_COUNT + 1])
        assert COUNT - len(script.left) - START_COUNT - 1 <= AHEAD_COUNT
        script.left.clear()
        await read_in_order(mount, NAMES)
        assert cold.requests["read"] <= COUNT


@pytest.mark.parametrize("budget_bytes", [0, 20_000])
async def test_the_budget_of_all_readers_is_kept(tmp_path: Path, cold: MemoryCold, budget_bytes: int) -> None:
    async with engine_on(tmp_path, cold, numbers=limits(read_ahead_bytes=budget_bytes)) as mount:
        await list_directory(mount)
        await read_in_order(mount, NAMES[: START_COUNT + 1])
        ahead_bytes = sum(len(DATA[name]) for name in NAMES[START_COUNT + 1 :] if cold.reads[name])
        assert ahead_bytes <= budget_bytes
        assert (ahead_bytes > 0) == (budget_bytes > 0)
        await read_in_order(mount, NAMES)
        assert mount.engine.reader._budget.used_bytes == 0


async def test_in_a_tiny_hot_tier_nothing_goes_before_it_was_read(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold, capacity_bytes=25 * 8192, ttl_seconds=1e9) as mount:
        await list_directory(mount)
        for name in NAMES:
            await read_in_order(mount, [name])
            mount.clock.pass_seconds(FRESH_SECONDS)
        assert mount.counted("tiercache_evictions_total") > COUNT - 30
        assert set(cold.reads.values()) == {1}
        assert mount.counted("tiercache_read_ahead_bytes_total") > 0
        assert mount.engine.reader._budget.used_bytes == 0
