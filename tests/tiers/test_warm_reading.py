"""Reads of warm copies: whole and damaged ones, healthy and broken targets. No wrong byte, no error while k pieces are left."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
import xxhash

from tests.tiers.warm_copies import CHUNK_BYTES, Flash, flash, ref_of
from tiercache.core.manifest import Manifest
from tiercache.errors import Damaged, NotHeld, TierError, Unavailable
from tiercache.tiers.hot import HotDirectory, HotTier, read
from tiercache.tiers.sink import FileSink
from tiercache.tiers.tier import MemorySink, SinkClosed
from tiercache.tiers.warm import hedging, shards
from tiercache.tiers.warm.pieces import Wish
from tiercache.tiers.warm.target import Target

NOISE = random.Random(5).randbytes(3 * CHUNK_BYTES + 12_345)  # stored plain
TEXT = b"".join(b"line %d of a text that shrinks\n" % number for number in range(9_000))
DATA = {"noise": NOISE, "text": TEXT}
SMALL = {f"small/{number}": random.Random(number).randbytes(50 + 977 * number) for number in range(12)}
DEADLINE_SECONDS = 20.0


@pytest.fixture(autouse=True)
def _piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done with large stripes is done with these too; members of packs are smaller."""
    monkeypatch.setattr(shards, "DELIVERED_FROM_BYTES", 12 << 10)


def extents(size: int) -> list[tuple[int, int]]:
    rng = random.Random(3)
    fixed = [(0, size), (0, 1), (size - 1, 1), (CHUNK_BYTES - 1, 2), (CHUNK_BYTES, CHUNK_BYTES), (1, size - 1)]
    drawn = [(offset, rng.randint(1, size - offset)) for offset in (rng.randrange(size) for _ in range(20))]
    return fixed + drawn


@pytest.mark.parametrize("geometry", ["4+2", "8+3", "1+0", "1+2", "2+0", "3+1"])
@pytest.mark.parametrize("key", DATA)
async def test_every_extent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, geometry: str, key: str) -> None:
    for name in ("UNTRIED_SECONDS", "HEDGE_FLOOR_SECONDS", "HEDGE_CEILING_SECONDS"):
        monkeypatch.setattr(hedging, name, DEADLINE_SECONDS)  # on a busy machine nobody is late
    data = DATA[key]
    async with flash(tmp_path, geometry) as store:
        await store.write(key, data)
        for offset, length in extents(len(data)):
            assert await store.read(key, data, offset, length) == data[offset : offset + length]
        assert store.seen.degraded_count == 0 or store.seen.hedged_count  # a busy machine may be late
        assert store.seen.wishes == []


async def test_members_of_a_pack(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        await store.write_pack(SMALL)
        with pytest.raises(NotHeld):
            await store.read("small/3", SMALL["small/3"])
        await store.catalogues.refresh()
        for key, data in SMALL.items():
            assert await store.warm.holds(ref_of(key, data))
            assert store.copies.known(ref_of(key, data).object_id)
            assert await store.read(key, data) == data
            assert await store.read(key, data, 7, 11) == data[7:18]


async def test_an_object_that_nobody_wrote_is_not_held(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        assert not await store.warm.holds(ref_of("other", b"x"))
        with pytest.raises(NotHeld):
            await store.read("other", b"x")


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(8).randbytes(path.stat().st_size))


def _flip(path: Path) -> None:
    """One bit of every piece."""
    data = bytearray(path.read_bytes())
    for position in range(64, len(data), 1000):
        data[position] ^= 4
    path.write_bytes(data)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [_remove, _empty, _truncate, _noise, _flip, _directory])
@pytest.mark.parametrize("key", DATA)
async def test_any_m_shards_may_be_bad(tmp_path: Path, harm: Callable[[Path], None], key: str) -> None:
    async with flash(tmp_path) as store:
        data = DATA[key]
        manifest = await store.write(key, data)
        whole = {index: store.shard(manifest, index).read_bytes() for index in range(6)}
        for lost in itertools.combinations(range(6), 2):
            for index in lost:
                harm(store.shard(manifest, index))
            node = store.another_node()
            for offset, length in extents(len(data))[:9]:
                assert await node.read(key, data, offset, length) == data[offset : offset + length]
            if lost != (4, 5):
                assert Wish(manifest.object_id, manifest.generation, False) in node.seen.wishes
                assert node.seen.degraded_count > 0
            for index in lost:
                path = store.shard(manifest, index)
                if path.is_dir():
                    path.rmdir()
                path.write_bytes(whole[index])


@pytest.mark.parametrize("harm", [_remove, _truncate, _noise])
async def test_more_than_m_bad_shards_are_an_error_at_once(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    async with flash(tmp_path) as store:
        manifest = await store.write("noise", NOISE)
        for index in (0, 2, 5):
            harm(store.shard(manifest, index))
        with trio.fail_after(DEADLINE_SECONDS), pytest.raises(Unavailable):
            await store.read("noise", NOISE)


async def test_bad_pieces_of_different_stripes_do_not_add_up(tmp_path: Path) -> None:
    """Three files are damaged, each in another stripe."""
    async with flash(tmp_path) as store:
        manifest = await store.write("noise", NOISE)
        for index in range(3):
            path = store.shard(manifest, index)
            data = bytearray(path.read_bytes())
            data[manifest.stripe(index).piece_offset] ^= 1
            path.write_bytes(data)
        assert await store.read("noise", NOISE) == NOISE
        assert store.seen.damages == ["bad_piece"] * 3


async def test_a_shard_elsewhere_is_found_and_remembered(tmp_path: Path) -> None:
    async with flash(tmp_path, "2+1", targets_count=5) as store:
        manifest = await store.write("noise", NOISE)
        used = {store.holder(manifest, index).path for index in range(3)}
        spare = [target for target in store.targets.all if target.path not in used]
        for index, target in zip((0, 2), spare, strict=True):
            _move(store.shard(manifest, index), Path(target.path))
        assert await store.read("noise", NOISE) == NOISE
        (copy,) = await store.copies.find(manifest.object_id)
        assert copy.moved
        assert all(store.targets.by_uuid[uuid] in spare for uuid in copy.moved.values())


async def test_a_degraded_copy_is_read_and_wished_whole(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        manifest = await store.write("text", TEXT, without=(1, 4))
        assert await store.read("text", TEXT) == TEXT
        assert store.seen.wishes[0] == Wish(manifest.object_id, manifest.generation, False)
        store.seen.wishes.clear()
        store.targets.all[0].health.is_full = True
        assert await store.read("text", TEXT) == TEXT
        assert store.seen.wishes == []  # there is no target for the sixth shard


async def test_the_oldest_generation_is_read_and_the_next_when_it_cannot_be(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        old = await store.write("noise", NOISE, generation=1 << 20)
        new = await store.write("noise", NOISE, generation=2 << 20)
        assert [copy.generation for copy in await store.copies.find(old.object_id)] == [1 << 20, 2 << 20]
        for index in range(3):
            _noise(store.shard(old, index))
        assert await store.read("noise", NOISE) == NOISE
        for index in range(6):
            store.shard(new, index).unlink()
        with pytest.raises(Unavailable):
            await store.read("noise", NOISE)


async def test_a_copy_that_was_collected_is_looked_up_again(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        old = await store.write("text", TEXT, generation=1 << 20)
        assert await store.read("text", TEXT) == TEXT
        await store.write("text", TEXT, generation=2 << 20)
        for path in [*store.manifests(old), *(store.shard(old, index) for index in range(6))]:
            path.unlink()
        assert await store.read("text", TEXT) == TEXT
        (copy,) = await store.copies.find(old.object_id)
        assert copy.generation == 2 << 20


async def test_stripes_with_right_pieces_and_a_wrong_sum_are_not_served(tmp_path: Path) -> None:
    """A writer that hashed something else than it wrote."""
    async with flash(tmp_path, "2+1") as store:
        for key, data in DATA.items():
            manifest = await store.write(key, data)
            raw = bytearray(manifest.raw)
            digest = manifest.stripe(0).digest.to_bytes(8, "little")
            raw[raw.index(digest)] ^= 1
            _reseal(raw)
            for path in store.manifests(manifest):
                path.write_bytes(raw)
            with pytest.raises(Damaged):
                await store.read(key, data)


async def test_pieces_are_handed_on_before_the_last_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNTRIED_SECONDS", "HEDGE_FLOOR_SECONDS", "HEDGE_CEILING_SECONDS"):
        monkeypatch.setattr(hedging, name, DEADLINE_SECONDS)
    data = NOISE[: CHUNK_BYTES - 7]
    async with flash(tmp_path) as store:
        manifest = await store.write("noise", data)
        two_pieces_bytes = 2 * manifest.stripe(0).piece_bytes(4)
        goes_on = trio.Event()
        slow = store.holder(manifest, 2)
        read_now = slow.read

        async def read_later(relative: str, offset: int, length: int, *, checksum: int | None = None) -> bytearray:
            await goes_on.wait()
            return await read_now(relative, offset, length, checksum=checksum)

        monkeypatch.setattr(slow, "read", read_later)
        sink = MemorySink(len(data))
        with trio.fail_after(DEADLINE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.warm.read, ref_of("noise", data), 0, len(data), sink)
                while sink.received_bytes < two_pieces_bytes:  # noqa: ASYNC110 - threads bring them
                    await trio.sleep(0.001)
                await trio.testing.wait_all_tasks_blocked()
                assert bytes(sink.view) == data[:two_pieces_bytes]
                goes_on.set()
        assert bytes(sink.view) == data
        assert store.seen.degraded_count == 0


async def test_a_hot_file_need_not_be_hashed_again(tmp_path: Path) -> None:
    (tmp_path / "hot").mkdir()
    files = HotTier([HotDirectory(0, tmp_path / "hot")])
    data = NOISE[:CHUNK_BYTES]
    async with flash(tmp_path) as store:
        await store.write("noise", data)
        ref = ref_of("noise", data)
        sink = FileSink(files.begin(ref.object_id, ref.size_bytes, 0), 0, ref.size_bytes)
        await store.warm.read(ref, 0, ref.size_bytes, sink)
        assert sink.digest == xxhash.xxh3_64_intdigest(data)
        assert read(sink.file, 0, ref.size_bytes) == data


def _move(path: Path, target: Path) -> None:
    """The same file on another target."""
    new = target / "shards" / path.parent.name
    new.mkdir(parents=True, exist_ok=True)
    path.rename(new / path.name)


def _reseal(raw: bytearray) -> None:
    raw[-8:] = xxhash.xxh3_64_intdigest(raw[:-8]).to_bytes(8, "little")


def _holders(store: Flash, manifest: Manifest) -> list[Target]:
    return [store.holder(manifest, index) for index in range(store.geometry.shards_count)]


def _wipe(target: Target) -> None:
    for name in ("shards", "manifests", "packs"):
        shutil.rmtree(Path(target.path, name), ignore_errors=True)


def _delete(target: Target) -> None:
    shutil.rmtree(target.path)


def _replace_by_noise(target: Target) -> None:
    for path in Path(target.path).rglob("*"):
        if path.is_file():
            _noise(path)


@pytest.mark.parametrize("harm", [_wipe, _delete, _replace_by_noise])
async def test_any_m_targets_may_be_lost(tmp_path: Path, harm: Callable[[Target], None]) -> None:
    pairs = list(itertools.combinations(range(6), 2))
    for number, lost in enumerate(random.Random(1).sample(pairs, 6)):
        directory = tmp_path / str(number)
        directory.mkdir()
        async with flash(directory) as store:
            for key, data in DATA.items():
                await store.write(key, data)
            await store.write_pack(SMALL)
            warmed = store.another_node()
            await warmed.catalogues.refresh()
            for key, data in DATA.items():
                await warmed.read(key, data, 0, 10)
            for index in lost:
                harm(store.targets.all[index])
            for node in (warmed, store.another_node()):
                await node.catalogues.refresh()
                for key, data in {**DATA, **SMALL}.items():
                    assert await node.read(key, data) == data


async def test_with_too_few_targets_nobody_says_that_there_is_no_copy(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        await store.write("noise", NOISE)
        for target in store.targets.all[:4]:
            _delete(target)
        with trio.fail_after(DEADLINE_SECONDS), pytest.raises(TierError):
            await store.read("noise", NOISE)
        with pytest.raises(Unavailable):
            await store.copies.find(ref_of("never", b"x").object_id)


async def test_a_closed_sink_and_a_closed_tier_end_reads(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        await store.write("text", TEXT)
        sink = MemorySink(len(TEXT))
        sink.close()
        with pytest.raises(SinkClosed):
            await store.warm.read(ref_of("text", TEXT), 0, len(TEXT), sink)
        await store.warm.aclose()
        await store.warm.aclose()
        with pytest.raises(Unavailable):
            await store.read("text", TEXT)


async def test_many_reads_at_once_within_little_memory(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        for key, data in DATA.items():
            await store.write(key, data)
        rng = random.Random(4)

        async def one() -> None:
            key = rng.choice(list(DATA))
            data = DATA[key]
            offset = rng.randrange(len(data))
            length = min(rng.randint(1, 100_000), len(data) - offset)
            assert await store.read(key, data, offset, length) == data[offset : offset + length]

        with trio.fail_after(DEADLINE_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(one)


async def test_readers_may_leave_at_any_time(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        await store.write("text", TEXT)
        for checkpoints in range(40):
            sink = MemorySink(len(TEXT))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.warm.read, ref_of("text", TEXT), 0, len(TEXT), sink)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            sink.close()
            assert bytes(sink.view) == TEXT[: sink.received_bytes]
        assert store.warm.working_bytes == 0
        assert await store.read("text", TEXT) == TEXT
