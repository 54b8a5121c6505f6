"""Writing copies: whose memory the bytes are in while they are on their way."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
import xxhash

from tests.tiers.warm_copies import CHUNK_BYTES, SOURCE_ID, Flash, flash, ref_of
from tiercache.errors import HotSick, Unavailable
from tiercache.tiers.warm.files import Buffer
from tiercache.tiers.warm.target import Draft
from tiercache.tiers.warm.writing import Batch, Staging, Writer

CHUNKS_COUNT = 40
AT_ONCE = 4
DATA = random.Random(1).randbytes(CHUNKS_COUNT * CHUNK_BYTES)
CHUNKS = [DATA[begin : begin + CHUNK_BYTES] for begin in range(0, len(DATA), CHUNK_BYTES)]


class Lent:
    """The memory that chunks of DATA were read into, in order."""

    def __init__(self) -> None:
        self.memory: list[object] = []

    async def load(self, chunk: bytes, memory: memoryview) -> list[memoryview]:
        await trio.lowlevel.checkpoint()
        self.memory.append(memory.obj)
        memory[:] = chunk
        return [memory]

    def is_new(self, number: int) -> bool:
        return all(self.memory[number] is not each for each in self.memory[:number])


def writer_of(store: Flash) -> Writer:
    bytes_each = int(CHUNK_BYTES * (2 + store.geometry.parity_count / store.geometry.data_count))
    staging = Staging(AT_ONCE * bytes_each)
    return Writer(store.targets, store.geometry, zstd_level=1, staging=staging, clock=time.time, rng=random.Random(5))


async def write(
    store: Flash, writer: Writer, load: Callable[[bytes, memoryview], Awaitable[Sequence[memoryview]]], key: str = "file"
) -> None:
    batches = [Batch(CHUNK_BYTES, partial(load, chunk), [xxhash.xxh3_64_intdigest(chunk)]) for chunk in CHUNKS]
    written = await writer.write_object(ref_of(key, DATA), SOURCE_ID, CHUNK_BYTES, batches, trio.lowlevel.checkpoint)
    store.copies.add(written.manifest)


async def test_memory_is_used_again_and_the_bytes_are_right(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        lent = Lent()
        await write(store, writer_of(store), lent.load)
        assert sum(map(lent.is_new, range(CHUNKS_COUNT))) <= AT_ONCE
        assert await store.read("file", DATA) == DATA


async def test_no_memory_is_kept_when_nothing_is_written(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        lent, writer = Lent(), writer_of(store)
        await write(store, writer, lent.load, "one")
        before = len(lent.memory)
        await write(store, writer, lent.load, "two")
        assert lent.is_new(before)


async def test_what_a_target_that_hangs_may_still_read_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with flash(tmp_path) as store:
        lent, append = Lent(), Draft.append
        hanging, failed_at = store.targets.all[0], CHUNKS_COUNT

        async def append_or_hang(draft: Draft, buffers: Sequence[Buffer]) -> None:
            nonlocal failed_at
            if draft.target is hanging and len(lent.memory) > CHUNKS_COUNT // 2:
                failed_at = len(lent.memory)
                raise Unavailable("does not answer")
            await append(draft, buffers)

        monkeypatch.setattr(Draft, "append", append_or_hang)
        await write(store, writer_of(store), lent.load)
        after = range(failed_at + AT_ONCE, CHUNKS_COUNT)
        assert len(after) > AT_ONCE
        assert all(lent.is_new(number) for number in after)
        assert await store.read("file", DATA) == DATA


async def test_what_a_disk_that_hangs_may_still_fill_is_not_used_again(tmp_path: Path) -> None:
    """A copy fails because its file cannot be read, while another one goes on."""
    async with flash(tmp_path) as store:
        writer, lent = writer_of(store), Lent()
        given_up: list[object] = []

        async def give_up(_: bytes, memory: memoryview) -> list[memoryview]:
            given_up.append(memory.obj)
            raise HotSick("the disk does not answer")

        async def load(chunk: bytes, memory: memoryview) -> list[memoryview]:
            assert all(memory.obj is not each for each in given_up)
            return await lent.load(chunk, memory)

        async def fail() -> None:
            while len(lent.memory) < 2 * AT_ONCE:
                await trio.lowlevel.checkpoint()
            with pytest.raises(HotSick):
                await write(store, writer, give_up, "bad")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, store, writer, load)
            nursery.start_soon(fail)
        assert given_up
        assert await store.read("file", DATA) == DATA
