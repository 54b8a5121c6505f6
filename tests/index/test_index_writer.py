"""The writer: groups, a sick disk, damage at run time, growth under readers, touches, the bounded queue."""

from __future__ import annotations

import random
import resource
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.index import samples
from tiercache.core.record import ChunkRecord, ObjectId
from tiercache.errors import HotSick, IndexDamaged
from tiercache.index import queue
from tiercache.index.cleanmark import write_mark
from tiercache.index.environment import DATA_NAME, Environment
from tiercache.index.index import DropHot, PutChunk, PutEntry, PutHot, PutPin, Touch
from tiercache.index.lmdb import LmdbIndex, open_index
from tiercache.index.queue import Queue, Ticket, Work
from tiercache.index.records import CHUNKS, HOT, TABLES


async def opened(directory: Path, *, map_bytes: int = 1 << 20, touch_seconds: float = 0.02) -> LmdbIndex:
    return await open_index(
        directory, boot_id="boot", exists=lambda record: True, map_bytes=map_bytes, touch_seconds=touch_seconds
    )


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[LmdbIndex]:
    index = await opened(tmp_path / "index")
    try:
        yield index
    finally:
        await index.aclose(clean=False)


@contextmanager
def full_disk(directory: Path, slack_bytes: int = 0) -> Iterator[None]:
    """No file may grow beyond what the index file has now, and some slack: a write past it fails, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((directory / DATA_NAME).stat().st_size + slack_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


async def test_commits_that_wait_together_share_a_transaction(index: LmdbIndex) -> None:
    before = index._environment.last_transaction()
    async with trio.open_nursery() as nursery:
        for number in range(500):
            nursery.start_soon(index.commit, samples.filled(number))
    assert index.hot_count() == 500
    assert index._environment.last_transaction() - before < 100


async def test_a_full_disk_fails_its_waiters_and_nothing_else(index: LmdbIndex, tmp_path: Path) -> None:
    await index.commit(samples.filled(1))
    many = [PutEntry(samples.entry(b"%d" % number), 1.0) for number in range(5000)]
    with full_disk(tmp_path / "index"):
        index.submit(many)
        with pytest.raises(HotSick, match=r"data\.mdb"):
            await index.commit([*many, *samples.filled(2)])
        assert index.hot(samples.object_id(1)) is not None
        assert index.hot(samples.object_id(2)) is None
        assert (index.hot_count(), index.held_bytes(0)) == (1, samples.CHUNK_BYTES)
    await index.commit([*many, *samples.filled(3)], sync=True)
    assert (index.hot_count(), index.held_bytes(0)) == (2, 2 * samples.CHUNK_BYTES)
    assert len(index.names(many[0].entry.parent, limit=10_000)) == 5000


async def test_a_log_that_cannot_be_written_breaks_only_what_was_promised(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    index = await opened(directory)
    await index.commit([change for number in range(300) for change in samples.filled(number, chunks=50)])
    slack_bytes = 1 << 20
    with (directory / "objects.log").open("r+b") as file:
        file.truncate((directory / DATA_NAME).stat().st_size + slack_bytes)
    with full_disk(directory, slack_bytes):
        await index.commit([Touch(samples.object_id(1), 5, 1)])
        with pytest.raises(HotSick, match=r"objects\.log"):
            await index.commit([PutPin(samples.pin("a"))], sync=True)
    await index.commit([PutPin(samples.pin("b"))], sync=True)
    assert samples.pin("b") in index.pins()
    await index.aclose(clean=True)


async def test_the_map_grows_while_readers_read(index: LmdbIndex) -> None:
    """From 1 MiB, with reads on the loop between all awaits and a scan in a thread all the time."""
    stop = threading.Event()

    def scan() -> int:
        rounds = 0
        while not stop.is_set():
            numbers = [record.access_count for record in index.all_hot()]
            assert numbers == [7] * len(numbers)
            rounds += 1
        return rounds

    async def read() -> None:
        rng = random.Random(3)
        with trio.CancelScope() as scope:
            scopes.append(scope)
            while True:
                number = rng.randrange(3000)
                record = index.hot(samples.object_id(number))
                if record is not None:
                    assert record.key == f"train/{number}.jpg"
                    assert index.chunks(record.object_id)[0].digest == samples.digest(number, 0)
                await trio.lowlevel.checkpoint()

    scopes: list[trio.CancelScope] = []
    small = index._environment.map_bytes()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, scan)
        nursery.start_soon(read)
        for start in range(0, 3000, 100):
            changes = [change for number in range(start, start + 100) for change in samples.filled(number, chunks=4)]
            touches = [Touch(samples.object_id(number), 1, 7) for number in range(start, start + 100)]
            await index.commit([*changes, *touches])
        stop.set()
        scopes[0].cancel()
    assert small <= 1 << 20
    assert index._environment.map_bytes() >= 2 * small
    assert index.hot_count() == 3000
    assert index.size_bytes() > 1 << 20


async def test_touches_are_added_up_and_written_together(index: LmdbIndex) -> None:
    await index.commit([*samples.filled(1), *samples.filled(2)])
    before = index._environment.last_transaction()
    for second in range(1000):
        index.submit([Touch(samples.object_id(1), second, 1), Touch(samples.object_id(2), 1000 - second, 2)])
    index.submit([Touch(samples.object_id(3), 1, 1)])

    def counts() -> tuple[int, int]:
        one, two = index.hot(samples.object_id(1)), index.hot(samples.object_id(2))
        assert one is not None
        assert two is not None
        return one.access_count, two.access_count

    await samples.until(lambda: counts() == (1000, 2000))
    one, two = index.hot(samples.object_id(1)), index.hot(samples.object_id(2))
    assert one is not None
    assert two is not None
    assert (one.accessed_seconds, two.accessed_seconds) == (999, 1000)
    assert index._environment.last_transaction() - before < 20


async def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    index = await opened(tmp_path / "index", touch_seconds=1000.0)
    index.submit([*samples.filled(1), Touch(samples.object_id(1), 77, 5)])
    await index.aclose(clean=True)
    await index.aclose(clean=True)
    with pytest.raises(HotSick, match="closed"):
        await index.commit([])
    index.submit(samples.filled(2))
    again = await opened(tmp_path / "index")
    record = again.hot(samples.object_id(1))
    assert record is not None
    assert (record.complete, record.accessed_seconds, record.access_count) == (True, 77, 5)
    assert again.hot_count() == 1
    await again.aclose(clean=True)


async def test_a_cancelled_commit_leaves_the_writer_at_work(index: LmdbIndex) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await index.commit(samples.filled(1))
    assert scope.cancelled_caught
    await index.commit(samples.filled(2))
    assert index.hot(samples.object_id(2)) is not None


async def test_damage_at_run_time_is_raised_by_reads_commits_and_watch(tmp_path: Path) -> None:
    """A value that changed behind a clean mark: only its checksum can tell."""
    directory = tmp_path / "index"
    first = await opened(directory)
    await first.commit([*samples.filled(1), *samples.filled(2)])
    await first.aclose(clean=True)
    environment = Environment(directory, 1 << 20)
    environment.write(lambda view: view._transaction.put(samples.object_id(1), b"noise", db=view._databases[HOT.name]))
    transaction = environment.last_transaction()
    environment.close()
    write_mark(directory, directory / DATA_NAME, transaction)

    index = await opened(directory)
    assert index.health.rebuilt == ""
    assert index.hot(samples.object_id(2)) is not None
    with pytest.raises(IndexDamaged, match="hot/"):
        index.hot(samples.object_id(1))
    with pytest.raises(IndexDamaged, match="hot/"):
        await index.commit([Touch(samples.object_id(1), 1, 1)])
    with pytest.raises(IndexDamaged):
        await index.commit([])
    with pytest.raises(IndexDamaged):
        await index.watch()
    await index.aclose(clean=True)

    again = await opened(directory)
    assert "hot/" in again.health.rebuilt
    assert (again.health.recovered_count, again.health.unclean) == (2, True)
    await again.aclose(clean=True)


async def test_watch_returns_when_the_index_is_closed(index: LmdbIndex) -> None:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(index.watch)
            await index.aclose(clean=False)


def test_a_value_under_another_key_or_table_is_not_believed() -> None:
    record = ChunkRecord(1, 1)
    raw = CHUNKS.pack(b"key", record)
    assert CHUNKS.unpack(b"key", raw) == record
    for table, key in ((CHUNKS, b"kez"), (HOT, b"key")):
        with pytest.raises(IndexDamaged):
            table.unpack(key, raw)
    for length in range(len(raw)):
        with pytest.raises(IndexDamaged):
            CHUNKS.unpack(b"key", raw[:length])
    assert len({table.name for table in TABLES}) == len(TABLES)


def test_the_queue_drops_the_oldest_touches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_TOUCHED", 3)
    waiting = Queue(0.0)
    drops = [DropHot(ObjectId(bytes([number]) * 20)) for number in range(10)]
    for number, drop in enumerate(drops):
        assert waiting.put(Work([drop]))
        waiting.touch(Touch(drop.object_id, number, 1))
    waiting.touch(Touch(drops[9].object_id, 1, 1))
    waiting.close()
    assert not waiting.put(Work([drops[0]]))
    taken = [change for work in waiting.take(0.0) or [] for change in work.changes]
    assert taken[:10] == drops
    assert taken[10:] == [Touch(drops[7].object_id, 7, 1), Touch(drops[8].object_id, 8, 1), Touch(drops[9].object_id, 9, 2)]
    assert waiting.take(0.0) is None


def test_a_batch_is_bounded_but_never_splits_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_BATCH_CHANGES", 5)
    waiting = Queue(1.0)
    works = [Work([PutHot(samples.hot(number))] * size) for number, size in enumerate((2, 3, 1, 9, 1))]
    for work in works:
        waiting.put(work)
    waiting.close()
    batches = []
    while batch := waiting.take(0.0):
        batches.append(batch)
    assert batches == [works[0:2], works[2:3], works[3:4], works[4:5]]


async def test_what_nobody_waits_for_lingers_until_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "LINGER_SECONDS", 3600.0)
    waiting = Queue(3600.0)
    lingering = Work([PutHot(samples.hot(1))])
    waiting.put(lingering)
    assert waiting.take(0.0) == []
    awaited = Work([PutHot(samples.hot(2))], ticket=Ticket(trio.lowlevel.current_trio_token()))
    waiting.put(awaited)
    assert waiting.take(0.0) == [lingering, awaited]
    waiting.put(lingering)
    assert waiting.take(0.0) == []


async def test_an_object_of_many_chunks_is_dropped_whole(index: LmdbIndex) -> None:
    record = samples.hot(5, chunks=3000)
    await index.commit(
        [PutHot(record), *(PutChunk(record.object_id, n, ChunkRecord(n, 1), 4096, n == 2999) for n in range(3000))]
    )
    assert len(index.chunks(record.object_id)) == 3000
    assert index.held_bytes(0) == 3000 * 4096
    await index.commit([DropHot(record.object_id)])
    assert (index.chunks(record.object_id), index.held_bytes(0), index.hot_count()) == ({}, 0, 0)
