"""A random history leaves the index on disk and the one in memory equal."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.index import samples
from tiercache.core.record import ROOT_INODE, ChunkRecord, DirectoryState, Inode, Kind
from tiercache.index.index import (
    Change,
    DropChunk,
    DropDirectory,
    DropEntry,
    DropHot,
    DropPin,
    PutChunk,
    PutDirectory,
    PutEntry,
    PutHot,
    PutPin,
    Touch,
)
from tiercache.index.lmdb import LmdbIndex, open_index
from tiercache.index.memory import MemoryIndex

NUMBERS = range(4)
DIRECTORY = samples.entry(b"d", kind=Kind.DIRECTORY, version="")
PARENTS = [ROOT_INODE, DIRECTORY.inode, Inode(777)]
NAMES = [b"", b"a", b"b", b"\xff\xfe"]
ENTRIES = [
    DIRECTORY,
    *(samples.entry(name, parent=parent, version=version) for parent in PARENTS for name in NAMES for version in ("v1", "v2")),
]
PREFIXES = ["", "x/", "x/\udc80"]

ids = st.sampled_from([samples.object_id(number) for number in NUMBERS])
small = st.integers(0, 3)
held = st.integers(0, 5).map(lambda blocks: blocks * 4096)
parents = st.sampled_from(PARENTS)
changes = st.one_of(
    st.builds(PutEntry, st.sampled_from(ENTRIES), st.floats(0, 1e9)),
    st.builds(DropEntry, parents, st.sampled_from([*NAMES, b"d"])),
    st.builds(PutDirectory, parents, st.builds(DirectoryState, st.floats(0, 1e9), small, small, st.sampled_from(PREFIXES))),
    st.builds(DropDirectory, parents),
    st.builds(
        PutHot, st.builds(lambda n, d, c: samples.hot(n, chunks=c + 1, directory=d), st.sampled_from(NUMBERS), small, small)
    ),
    st.builds(PutChunk, ids, small, st.builds(ChunkRecord, st.integers(0, 2**64 - 1), small), held, st.booleans()),
    st.builds(DropChunk, ids, small, held),
    st.builds(DropHot, ids),
    st.builds(Touch, ids, st.integers(0, 100), small),
    st.builds(PutPin, st.builds(samples.pin, st.sampled_from(PREFIXES), exact=st.booleans(), owner=st.sampled_from("ab"))),
    st.builds(DropPin, st.just("set"), st.sampled_from(PREFIXES), st.booleans()),
)
steps = st.one_of(st.lists(changes, max_size=6), st.just("prune"), st.just("reopen"))


def observed(index: LmdbIndex | MemoryIndex) -> object:
    inodes = [*(entry.inode for entry in ENTRIES), *PARENTS]
    return (
        [index.names(parent) for parent in PARENTS],
        [index.listing(parent) for parent in PARENTS],
        [index.entry(inode) for inode in inodes],
        [index.directory(inode) for inode in inodes],
        samples.everything(index),
        [index.held_bytes(directory) for directory in range(4)],
        index.hot_count(),
        index.pins(),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=15))
def test_a_random_history_leaves_both_equal(history: Sequence[list[Change] | str]) -> None:
    async def play() -> None:
        with tempfile.TemporaryDirectory() as directory:
            memory = MemoryIndex()
            disk = await open_index(Path(directory), boot_id="boot", exists=lambda record: True, map_bytes=1 << 20)
            try:
                for step in history:
                    if step == "prune":
                        assert await disk.prune() == await memory.prune()
                    elif step == "reopen":
                        await disk.aclose(clean=True)
                        disk = await open_index(Path(directory), boot_id="boot", exists=lambda record: True, map_bytes=1 << 20)
                    else:
                        assert not isinstance(step, str)
                        await disk.commit(step)
                        await memory.commit(step)
                    assert observed(disk) == observed(memory)
            finally:
                await disk.aclose(clean=False)

    trio.run(play)
