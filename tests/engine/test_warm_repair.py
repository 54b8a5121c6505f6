"""Repair of warm copies: whatever is missing or bad is as it was afterwards, and nothing is worse."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.tiers.warm_copies import CHUNK_BYTES, Flash, flash, ref_of
from tiercache.core.manifest import Manifest
from tiercache.core.record import ObjectId
from tiercache.core.stripe import Generation, manifest_path, shard_path
from tiercache.engine.warm_examining import examine, locate
from tiercache.engine.warm_repair import Outcome, Repairs
from tiercache.errors import NotHeld
from tiercache.tiers.warm.pieces import Wish
from tiercache.tiers.warm.target import Target

NOISE = random.Random(5).randbytes(3 * CHUNK_BYTES + 12_345)
TEXT = b"".join(b"line %d of a text that shrinks\n" % number for number in range(9_000))
SMALL = {f"small/{number}": random.Random(number).randbytes(977 * number) for number in range(12)}


class Mending:
    """Repairs of a store's copies, and what they came to."""

    def __init__(self, store: Flash) -> None:
        self.store = store
        self.outcomes: list[Outcome] = []
        self.repairs = Repairs(store.targets, store.copies, self.outcomes.append)

    async def repair(self, manifest: Manifest) -> Outcome:
        return await self.repairs.repair(wish_for(manifest))

    async def is_whole(self, manifest: Manifest) -> bool:
        files, unanswered = await locate(self.store.targets, manifest.object_id, manifest.generation)

        async def pace(_: int) -> None: ...

        condition = await examine(manifest, files, unanswered, pace)
        holders = [target.path for index in range(6) for target in condition.good(index)]
        return condition.is_whole and len(set(holders)) == len(holders) == 6 and len(self.store.manifests(manifest)) >= 3


def wish_for(manifest: Manifest) -> Wish:
    return Wish(manifest.object_id, manifest.generation, manifest.is_pack)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip_header(path: Path) -> None:
    _flip(path, 20)


def _flip_piece(path: Path) -> None:
    _flip(path, 70)


def _flip_footer(path: Path) -> None:
    _flip(path, path.stat().st_size - 40)


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(8).randbytes(path.stat().st_size))


HARMS = [_remove, _truncate, _lengthen, _empty, _flip_header, _flip_piece, _flip_footer, _noise]


@pytest.mark.parametrize("harm", HARMS)
async def test_any_two_bad_files_are_as_they_were(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        for manifest in (await store.write("noise", NOISE), await store.write("text", TEXT), await store.write_pack(SMALL)):
            whole = [store.shard(manifest, index).read_bytes() for index in range(6)]
            for lost in random.Random(2).sample(list(itertools.combinations(range(6), 2)), 5):
                for index in lost:
                    harm(store.shard(manifest, index))
                assert await mending.repair(manifest) == "repaired"
                assert [store.shard(manifest, index).read_bytes() for index in range(6)] == whole
            assert await mending.repair(manifest) == "whole"
        assert _drafts(store) == []


async def test_damage_in_all_files_but_never_more_than_m_in_a_stripe(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        manifest = await store.write("noise", NOISE)
        whole = [store.shard(manifest, index).read_bytes() for index in range(6)]
        for index in range(6):
            _flip(store.shard(manifest, index), manifest.stripe(index // 2).piece_offset + 5)
        assert await mending.repair(manifest) == "repaired"
        assert [store.shard(manifest, index).read_bytes() for index in range(6)] == whole


async def test_a_lost_copy_is_left_as_it_is(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        manifest = await store.write("noise", NOISE)
        for index in range(3):
            _noise(store.shard(manifest, index))
        before = [store.shard(manifest, index).read_bytes() for index in range(6)]
        assert await mending.repair(manifest) == "impossible"
        assert [store.shard(manifest, index).read_bytes() for index in range(6)] == before
        assert mending.outcomes == ["impossible"]


def _wipe(target: Target) -> None:
    for name in ("shards", "manifests", "packs"):
        shutil.rmtree(Path(target.path, name), ignore_errors=True)


async def _kill(target: Target) -> None:
    shutil.rmtree(target.path)
    _touch(Path(target.path))
    await target.probe(target.identity)
    assert target.state == "down"


def _touch(path: Path) -> None:
    path.write_bytes(b"not a directory")


def _drafts(store: Flash) -> list[Path]:
    return [path for target in store.targets.all for path in Path(target.path, "drafts").iterdir()]


async def test_emptied_targets_get_everything_back(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        manifests = [await store.write("noise", NOISE), await store.write_pack(SMALL)]
        for target in store.targets.all[:2]:
            _wipe(target)
        for manifest in manifests:
            assert await mending.repair(manifest) == "repaired"
            assert await mending.is_whole(manifest)


async def test_dead_targets_are_replaced_by_others(tmp_path: Path) -> None:
    async with flash(tmp_path, targets_count=8) as store:
        mending = Mending(store)
        manifest = await store.write("noise", NOISE)
        gone = [store.holder(manifest, index) for index in (1, 5)]
        for target in gone:
            await _kill(target)
        assert await mending.repair(manifest) == "repaired"
        assert await mending.is_whole(manifest)
        (copy,) = await store.another_node().copies.find(manifest.object_id)
        assert not {target.uuid for target in gone} & set(copy.manifest.placed)
        assert await store.another_node().read("noise", NOISE) == NOISE
        assert await mending.repair(manifest) == "whole"


async def test_without_another_target_the_copy_stays_partial(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        manifest = await store.write("noise", NOISE)
        await _kill(store.holder(manifest, 3))
        assert await mending.repair(manifest) == "partial"
        assert await store.another_node().read("noise", NOISE) == NOISE


async def test_a_degraded_copy_is_completed(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        manifest = await store.write("text", TEXT, without=(0, 4))
        assert await mending.repair(manifest) == "repaired"
        (copy,) = await store.another_node().copies.find(manifest.object_id)
        assert None not in copy.manifest.placed
        assert await mending.is_whole(copy.manifest)


@pytest.mark.parametrize("is_pack", [False, True])
async def test_manifests_come_back(tmp_path: Path, is_pack: bool) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        manifest = await (store.write_pack(SMALL) if is_pack else store.write("text", TEXT))
        paths = store.manifests(manifest)
        assert len(paths) == 3
        paths[0].unlink()
        _flip(paths[1], 30)
        assert await mending.repair(manifest) == "repaired"
        assert [path.read_bytes() for path in paths] == [manifest.raw] * 3


async def test_a_copy_that_was_removed_meanwhile_does_not_come_back(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        mending = Mending(store)
        manifest = await store.write("text", TEXT)
        store.shard(manifest, 2).unlink()
        assert (await store.copies.find(manifest.object_id))[0].generation == manifest.generation
        for path in store.manifests(manifest):
            path.unlink()
        assert await mending.repair(manifest) == "failed"
        assert store.manifests(manifest) == []
        assert not store.shard(manifest, 2).exists()
        with pytest.raises(NotHeld):
            await mending.repairs.repair(Wish(ObjectId(bytes(20)), Generation(1), False))


async def test_two_nodes_repair_at_once(tmp_path: Path) -> None:
    async with flash(tmp_path, targets_count=9) as store:
        manifest = await store.write("noise", NOISE)
        for index in (0, 5):
            target = store.holder(manifest, index)
            await _kill(target)
        nodes = [Mending(store.another_node()) for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.repair, manifest)
        assert await store.another_node().read("noise", NOISE) == NOISE
        assert await nodes[0].repair(manifest) in ("whole", "repaired")


async def test_wishes_are_worked_off_once(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        done = trio.Event()
        outcomes: list[Outcome] = []

        def note(outcome: Outcome) -> None:
            outcomes.append(outcome)
            done.set()

        repairs = Repairs(store.targets, store.copies, note)
        manifest = await store.write("noise", NOISE)
        _noise(store.shard(manifest, 0))
        for _ in range(5):
            assert await store.read("noise", NOISE) == NOISE
        for wish in store.seen.wishes:
            repairs.wish(wish)
        assert repairs.waiting_count == 1
        store.nursery.start_soon(repairs.run)
        with trio.fail_after(20.0):
            await done.wait()
        assert outcomes == ["repaired"]
        store.seen.wishes.clear()
        assert await store.another_node().read("noise", NOISE) == NOISE
        assert await store.warm.holds(ref_of("noise", NOISE))


async def test_paths_are_what_the_formats_say(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        manifest = await store.write("noise", NOISE)
        name = f"{manifest.object_id.hex()}.{manifest.generation:016x}"
        assert shard_path(manifest.object_id, manifest.generation, 3) == f"shards/{name[:3]}/{name}.03"
        assert manifest_path(manifest.object_id, manifest.generation, is_pack=False) == f"manifests/{name[:3]}/{name}"
