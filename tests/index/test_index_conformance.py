"""What every index does: the contract of tiercache/index/index.py, on the disk and in memory."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from tests.index import samples
from tiercache.core.record import ROOT_INODE, ChunkRecord, DirectoryState, Inode, Kind
from tiercache.index.index import (
    DropChunk,
    DropDirectory,
    DropEntry,
    DropHot,
    DropPin,
    Index,
    PutChunk,
    PutDirectory,
    PutEntry,
    PutHot,
    PutPin,
    Touch,
)
from tiercache.index.lmdb import LmdbIndex, open_index
from tiercache.index.memory import MemoryIndex


@pytest.fixture(params=["lmdb", "memory"])
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LmdbIndex | MemoryIndex]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    index = await open_index(tmp_path / "index", boot_id="boot", exists=lambda record: True, map_bytes=1 << 20)
    try:
        yield index
    finally:
        await index.aclose(clean=False)


async def test_a_name_leads_to_its_newest_entry_and_the_former_inode_stays(index: Index) -> None:
    old, new = samples.entry(b"a", version="v1"), samples.entry(b"a", version="v2")
    await index.commit([PutEntry(old, 1.5)])
    assert index.link(ROOT_INODE, b"a") is not None
    await index.commit([PutEntry(new, 2.5)])
    link = index.link(ROOT_INODE, b"a")
    assert link is not None
    assert (link.inode, link.checked_seconds) == (new.inode, 2.5)
    assert index.entry(old.inode) == old
    assert index.entry(new.inode) == new
    assert index.link(ROOT_INODE, b"b") is None
    assert index.link(Inode(2), b"a") is None
    assert index.entry(Inode(2)) is None


async def test_prune_forgets_superseded_inodes_and_only_those(index: Index) -> None:
    old, new, gone, kept = (
        samples.entry(*args, version=v) for *args, v in ((b"a", "v1"), (b"a", "v2"), (b"g", "v1"), (b"k", "v1"))
    )
    await index.commit([PutEntry(e, 1.0) for e in (old, new, gone, kept)])
    await index.commit([DropEntry(ROOT_INODE, b"g"), DropEntry(ROOT_INODE, b"never-was")])
    assert index.link(ROOT_INODE, b"g") is None
    assert index.entry(gone.inode) == gone
    assert await index.prune() == 2
    assert [index.entry(e.inode) for e in (old, new, gone, kept)] == [None, new, None, kept]
    assert await index.prune() == 0


async def test_a_version_that_comes_back_is_not_superseded(index: Index) -> None:
    first, second = samples.entry(b"a", version="v1"), samples.entry(b"a", version="v2")
    await index.commit([PutEntry(first, 1.0), PutEntry(second, 2.0), PutEntry(first, 3.0)])
    assert await index.prune() == 1
    assert index.entry(first.inode) == first
    assert index.entry(second.inode) is None


async def test_prune_forgets_what_lies_below_a_directory_that_is_gone(index: Index) -> None:
    top = samples.entry(b"top", kind=Kind.DIRECTORY)
    below = samples.entry(b"below", parent=top.inode, kind=Kind.DIRECTORY)
    leaf = samples.entry(b"leaf", parent=below.inode)
    other = samples.entry(b"other")
    orphan = samples.entry(b"orphan", parent=Inode(12345))
    await index.commit([PutEntry(e, 1.0) for e in (top, below, leaf, other, orphan)])
    await index.commit([PutDirectory(below.inode, DirectoryState(1.0, 1, 0)), DropEntry(ROOT_INODE, b"top")])
    assert await index.prune() == 4
    assert index.directory(below.inode) is None
    assert index.names(below.inode) == []
    assert index.names(Inode(12345)) == []
    assert [name for name, _ in index.names(ROOT_INODE)] == [b"other"]


async def test_names_come_in_byte_order_and_in_pages(index: LmdbIndex | MemoryIndex) -> None:
    names = [b"\x01", b"a", b"a\x00", b"a\x00b", b"aa", b"b", b"\xff" * 255]
    nameless = samples.entry(b"", parent=Inode(50), key="marker")
    neighbours = [samples.entry(b"x", parent=Inode(49)), samples.entry(b"x", parent=Inode(51))]
    entries = [samples.entry(name, parent=Inode(50)) for name in names]
    shuffled = random.Random(1).sample(entries, len(entries))
    await index.commit([PutEntry(e, 7.0) for e in [*shuffled, *neighbours, nameless]])
    assert [name for name, _ in index.names(Inode(50))] == names
    for limit in (1, 2, 3):
        seen, after = [], b""
        while page := index.names(Inode(50), after, limit):
            assert len(page) <= limit
            seen += page
            after = page[-1][0]
        assert [name for name, _ in seen] == names
        assert {link.checked_seconds for _, link in seen} == {7.0}
    assert index.listing(Inode(50)) == entries
    assert index.listing(Inode(50), b"a", 2) == entries[2:4]
    assert index.names(Inode(50), b"\xff" * 255) == []


async def test_case_15_names_and_keys_that_are_not_utf8_come_back_as_they_were(index: Index) -> None:
    name = bytes(range(1, 47)) + bytes(range(48, 256))
    odd = samples.entry(name, key=(b"dir/" + name).decode("utf-8", "surrogateescape"))
    plain = samples.entry("größe\u2028".encode(), key="größe\u2028")
    record = samples.hot(1, key=odd.key)
    odd_pin = samples.pin(odd.key * 4)
    state = DirectoryState(1.0, 2, 3, example=odd.key)
    await index.commit([PutEntry(odd, 1.0), PutEntry(plain, 1.0), PutHot(record), PutPin(odd_pin), PutDirectory(Inode(5), state)])
    assert index.entry(odd.inode) == odd
    assert index.entry(plain.inode) == plain
    assert index.hot(record.object_id) == record
    assert index.pins() == [odd_pin]
    assert index.directory(Inode(5)) == state
    await index.commit([DropPin("set", odd_pin.prefix, False)])
    assert index.pins() == []


async def test_directories_are_remembered_and_forgotten(index: Index) -> None:
    child = samples.entry(b"c", parent=Inode(9))
    await index.commit([PutEntry(child, 1.0), PutDirectory(Inode(9), DirectoryState(3.0, 1, 0))])
    assert index.directory(Inode(9)) == DirectoryState(3.0, 1, 0)
    await index.commit([DropDirectory(Inode(9)), DropDirectory(Inode(10))])
    assert index.directory(Inode(9)) is None
    assert index.link(Inode(9), b"c") is not None


async def test_chunks_complete_an_object_and_are_counted(index: Index) -> None:
    record = samples.hot(1, chunks=2, directory=1)
    await index.commit([PutHot(record)])
    assert index.hot(record.object_id) == record
    first, second = ChunkRecord(2**64 - 1, 1), ChunkRecord(0, 1)
    await index.commit([PutChunk(record.object_id, 1, first, 4096, completes=False)])
    assert index.held_bytes(1) == 4096
    await index.commit([PutChunk(record.object_id, 0, second, 8192, completes=True)])
    complete = index.hot(record.object_id)
    assert complete is not None
    assert (complete.complete, complete.held_bytes) == (True, 12288)
    assert index.chunks(record.object_id) == {0: second, 1: first}
    verified = ChunkRecord(0, 2)
    await index.commit([PutChunk(record.object_id, 0, verified, 0, completes=False)])
    assert index.hot(record.object_id) == complete
    assert index.chunks(record.object_id)[0] == verified
    assert (index.held_bytes(0), index.held_bytes(1), index.hot_count()) == (0, 12288, 1)


async def test_a_dropped_chunk_makes_the_object_incomplete_and_counts_once(index: Index) -> None:
    await index.commit(samples.filled(1, chunks=2))
    drop = DropChunk(samples.object_id(1), 0, samples.CHUNK_BYTES)
    await index.commit([drop, drop])
    record = index.hot(samples.object_id(1))
    assert record is not None
    assert (record.complete, record.held_bytes) == (False, samples.CHUNK_BYTES)
    assert set(index.chunks(samples.object_id(1))) == {1}
    assert index.held_bytes(0) == samples.CHUNK_BYTES


async def test_what_concerns_an_evicted_object_is_ignored(index: Index) -> None:
    await index.commit([*samples.filled(1), *samples.filled(2)])
    gone = samples.object_id(1)
    await index.commit([DropHot(gone), DropHot(gone)])
    late = [PutChunk(gone, 0, ChunkRecord(1, 1), 4096, True), DropChunk(gone, 0, 4096), Touch(gone, 9, 1)]
    await index.commit(late)
    assert index.hot(gone) is None
    assert index.chunks(gone) == {}
    assert (index.hot_count(), index.held_bytes(0)) == (1, samples.CHUNK_BYTES)
    assert [record.object_id for record in index.all_hot()] == [samples.object_id(2)]


async def test_a_replaced_record_moves_its_bytes(index: Index) -> None:
    await index.commit(samples.filled(1, directory=0))
    before = index.hot(samples.object_id(1))
    assert before is not None
    moved = samples.hot(1, directory=2)
    await index.commit([PutHot(moved)])
    assert index.chunks(samples.object_id(1)) == {0: ChunkRecord(samples.digest(1, 0), 1)}
    assert (index.held_bytes(0), index.held_bytes(2), index.hot_count()) == (0, 0, 1)
    await index.commit([PutHot(before)])
    assert (index.held_bytes(0), index.held_bytes(2)) == (samples.CHUNK_BYTES, 0)


async def test_touches_add_up_and_never_go_back_in_time(index: Index) -> None:
    await index.commit(samples.filled(1))
    await index.commit([Touch(samples.object_id(1), 50, 2), Touch(samples.object_id(1), 40, 3)])
    record = index.hot(samples.object_id(1))
    assert record is not None
    assert (record.accessed_seconds, record.access_count) == (50, 5)


async def test_a_sample_is_distinct_and_reaches_everything(index: Index) -> None:
    assert index.sample_hot(5, random.Random(0)) == []
    await index.commit([change for number in range(40) for change in samples.filled(number)])
    everything = {record.object_id for record in index.all_hot()}
    assert len(everything) == 40
    seen = set()
    for seed in range(200):
        drawn = [record.object_id for record in index.sample_hot(8, random.Random(seed))]
        assert len(drawn) == len(set(drawn)) <= 8
        assert len(drawn) >= 4
        seen |= set(drawn)
    assert len(seen & everything) == len(seen) >= 35
    assert {record.object_id for record in index.sample_hot(100, random.Random(0))} == everything


async def test_all_hot_is_in_id_order_and_works_from_another_thread(index: Index) -> None:
    await index.commit([change for number in range(700) for change in samples.filled(number)])
    ids = await trio.to_thread.run_sync(lambda: [record.object_id for record in index.all_hot()])
    assert ids == sorted(samples.object_id(number) for number in range(700))


async def test_pins_are_replaced_by_what_they_pin(index: Index) -> None:
    await index.commit([PutPin(samples.pin("b")), PutPin(samples.pin("a")), PutPin(samples.pin("a", exact=True))], sync=True)
    await index.commit([PutPin(samples.pin("a", owner="bob"))], sync=True)
    assert index.pins() == [samples.pin("a", owner="bob"), samples.pin("a", exact=True), samples.pin("b")]
    await index.commit([DropPin("set", "a", False), DropPin("set", "c", False), DropPin("other", "b", False)], sync=True)
    assert index.pins() == [samples.pin("a", exact=True), samples.pin("b")]


async def test_an_empty_commit_waits_for_what_was_submitted_before(index: Index) -> None:
    index.submit(samples.filled(1))
    index.submit([DropHot(samples.object_id(1)), *samples.filled(2)])
    await index.commit([])
    assert index.hot(samples.object_id(1)) is None
    assert index.hot(samples.object_id(2)) is not None
