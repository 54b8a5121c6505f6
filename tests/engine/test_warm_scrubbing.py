"""Scrub of the warm tier: all damage is found and mended, what is superfluous goes when it is old, nothing else is touched."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import trio

from tests.tiers.warm_copies import Flash, flash, ref_of
from tiercache.core.manifest import Manifest
from tiercache.core.stripe import Generation, copy_name, encode_shard_header, shard_path
from tiercache.engine.progress import ScrubProgress
from tiercache.engine.warm_packing import Repacking
from tiercache.engine.warm_repair import Outcome, Repairs
from tiercache.engine.warm_scrubbing import GRACE_SECONDS, Cursor, WarmScrub
from tiercache.tiers.warm.target import Target
from tiercache.tiers.warm.writing import Staging, Writer

OLD_SECONDS = 2 * GRACE_SECONDS
OBJECTS = {f"object/{number}": random.Random(number).randbytes(50_000 * (number % 5) + number) for number in range(1, 12)}
TEXTS = {f"text/{number}": b"".join(b"%d of %d, " % (line, number) for line in range(15_000)) for number in range(4)}
SMALL = {f"small/{number}": random.Random(99 * number).randbytes(977 * number) for number in range(20)}
ALL = {**OBJECTS, **TEXTS, **SMALL}


class Scrubbing:
    """One node's scrub of a store."""

    def __init__(self, store: Flash, tmp_path: Path, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self.store = store
        self.cursor = tmp_path / "scrub.json"
        self.outcomes: list[Outcome] = []
        self.read_bytes = 0
        self.damages: Counter[str] = Counter()
        self.rate_bytes = 0
        self.grace_seconds = grace_seconds
        self.now = 1e9

    def scrubbed(self, read_bytes: int) -> None:
        self.read_bytes += read_bytes

    def damaged(self, kind: str) -> None:
        self.damages[kind] += 1

    async def run(self, *, repair: bool = False) -> ScrubProgress:
        progress = ScrubProgress()
        await self.made().scrub(repair, progress)
        return progress

    def made(self) -> WarmScrub:
        repairs = Repairs(self.store.targets, self.store.copies, self.outcomes.append)
        return WarmScrub(
            self.store.targets,
            self.store.copies,
            repairs,
            repacking_of(self.store),
            self,
            self.cursor,
            self.rate_bytes,
            grace_seconds=self.grace_seconds,
            wall_clock=lambda: self.now,
        )


def repacking_of(store: Flash) -> Repacking:
    writer = Writer(store.targets, store.geometry, zstd_level=1, staging=Staging(1 << 26), clock=time.time, rng=random.Random(5))
    return Repacking(store.targets, store.warm, writer, lambda written: store.copies.add(written.manifest))


async def fill(store: Flash) -> list[Manifest]:
    written = [await store.write(key, data) for key, data in {**OBJECTS, **TEXTS}.items()]
    return [*written, await store.write_pack(SMALL)]


def files_of(store: Flash) -> dict[str, bytes]:
    """Everything on all targets."""
    found = {}
    for target in store.targets.all:
        for path in sorted(Path(target.path).rglob("*")):
            if path.is_file():
                found[str(path)] = path.read_bytes()
    return found


def age(*paths: Path) -> None:
    for path in paths:
        status = path.stat()
        os.utime(path, (status.st_atime - OLD_SECONDS, status.st_mtime - OLD_SECONDS))


def paths_of(store: Flash, manifest: Manifest) -> list[Path]:
    shards = [store.shard(manifest, index) for index in range(store.geometry.shards_count)]
    return [*store.manifests(manifest), *(path for path in shards if path.exists())]


async def all_is_readable(store: Flash) -> None:
    node = store.another_node()
    await node.catalogues.refresh()
    for key, data in ALL.items():
        if data:
            assert await node.read(key, data) == data


async def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        written = await fill(store)
        before = files_of(store)
        scrubbing = Scrubbing(store, tmp_path)
        for repair in (False, True):
            scrubbing.read_bytes = 0
            progress = await scrubbing.run(repair=repair)
            assert (progress.found, progress.lines, progress.failures.count) == (Counter(), [], 0)
            assert progress.damaged_count == progress.repaired_count == 0
            assert progress.done_count == progress.total_count == len(written)
            assert progress.done_bytes == scrubbing.read_bytes == sum(6 * manifest.shard_bytes() for manifest in written)
        assert files_of(store) == before
        assert not scrubbing.cursor.exists()


def _damage(path: Path, rng: random.Random) -> str:
    """One bit, or the end."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        return "flip"
    path.write_bytes(data[: rng.randrange(len(data))])
    return "truncate"


@pytest.mark.parametrize("seed", range(4))
async def test_all_damage_is_found_and_mended(tmp_path: Path, seed: int) -> None:
    """At most m files of each copy, and at most m of its manifests."""
    rng = random.Random(seed)
    async with flash(tmp_path) as store:
        written = await fill(store)
        before = files_of(store)
        damaged: set[str] = set()
        for manifest in written:
            shards = [store.shard(manifest, index) for index in rng.sample(range(6), rng.randint(0, 2))]
            for path in [*shards, *rng.sample(store.manifests(manifest), rng.randint(0, 2))]:
                _damage(path, rng)
                damaged.add(str(path))
        scrubbing = Scrubbing(store, tmp_path)
        found = await scrubbing.run()
        assert {line.partition(": ")[2] for line in found.lines} == damaged
        assert found.damaged_count > 0
        assert found.repaired_count == 0
        mended = await scrubbing.run(repair=True)
        assert mended.found == found.found
        assert mended.repaired_count == mended.damaged_count == found.damaged_count
        assert files_of(store) == before
        assert (await scrubbing.run()).found == Counter()
        await all_is_readable(store)


async def test_missing_files_are_found_and_mended(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        written = await fill(store)
        before = files_of(store)
        for target in store.targets.all[2:4]:
            for name in ("shards", "manifests", "packs"):
                shutil.rmtree(Path(target.path, name), ignore_errors=True)
        missing_count = len(before) - len(files_of(store))
        scrubbing = Scrubbing(store, tmp_path)
        found = await scrubbing.run(repair=True)
        assert found.found["missing_shard"] == 2 * len(written)
        assert found.found.total() == missing_count
        assert found.repaired_count == found.damaged_count == len(written)
        assert files_of(store) == before
        await all_is_readable(store)


async def test_damage_of_m_targets_with_spare_ones(tmp_path: Path) -> None:
    async with flash(tmp_path, targets_count=9) as store:
        await fill(store)
        for target in store.targets.all[:2]:
            await _kill(target)
        scrubbing = Scrubbing(store, tmp_path)
        found = await scrubbing.run(repair=True)
        assert found.failures.count == 2
        assert found.repaired_count == found.damaged_count > 0
        again = await scrubbing.run(repair=True)
        assert again.found == Counter()
        await all_is_readable(store)


async def test_a_target_that_has_just_come_back_is_made_whole(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        await fill(store)
        before = files_of(store)
        target = store.targets.all[0]
        await _kill(target)
        assert target.state == "down"
        os.unlink(target.path)
        mended = await Scrubbing(store, tmp_path).run(repair=True)
        assert (target.state, mended.failures.count) == ("up", 0)
        assert mended.repaired_count == mended.damaged_count > 0
        assert files_of(store) == before


async def _kill(target: Target) -> None:
    shutil.rmtree(target.path)
    _write(Path(target.path), b"not a directory")
    await target.probe(target.identity)


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


async def test_a_further_generation_goes_when_it_is_old(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        data = OBJECTS["object/4"]
        old = await store.write("object/4", data, generation=1 << 20)
        new = await store.write("object/4", data, generation=2 << 20)
        scrubbing = Scrubbing(store, tmp_path)
        before = files_of(store)
        assert (await scrubbing.run(repair=True)).found == Counter()
        assert files_of(store) == before
        age(*paths_of(store, new))
        assert (await scrubbing.run()).found == Counter(superseded=1)
        assert files_of(store) == before
        superfluous = _all_paths(store, new)
        assert len(superfluous) == 9
        await scrubbing.run(repair=True)
        assert set(files_of(store)) == set(before) - set(map(str, superfluous))
        assert await store.another_node().read("object/4", data) == data
        assert len(paths_of(store, old)) == 9


def _all_paths(store: Flash, manifest: Manifest) -> list[Path]:
    name = copy_name(manifest.object_id, manifest.generation)
    return [path for target in store.targets.all for path in Path(target.path).rglob(f"{name}*")]


async def test_the_generation_that_can_be_read_stays(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        data = OBJECTS["object/4"]
        lost = await store.write("object/4", data, generation=1 << 20)
        good = await store.write("object/4", data, generation=2 << 20)
        for index in range(3):
            store.shard(lost, index).unlink()
        age(*paths_of(store, good))
        scrubbing = Scrubbing(store, tmp_path)
        found = await scrubbing.run(repair=True)
        assert found.found["lost"] == 1
        assert found.repaired_count == 0
        assert len(paths_of(store, lost)) == 6
        assert found.damaged_count == 1
        age(*paths_of(store, lost))
        removed = await scrubbing.run(repair=True)
        assert (removed.found["lost"], removed.damaged_count) == (1, 0)
        assert paths_of(store, lost) == []
        assert len(paths_of(store, good)) == 9
        assert await store.another_node().read("object/4", data) == data


async def test_a_pack_whose_members_are_all_in_an_older_one_goes(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        older = await store.write_pack(SMALL, generation=1 << 20, seed=1)
        subset = dict(list(SMALL.items())[3:8])
        newer = await store.write_pack(subset, generation=2 << 20, seed=2)
        more = await store.write_pack({**subset, "small/other": b"other"}, generation=3 << 20, seed=3)
        age(*paths_of(store, newer), *paths_of(store, more), *paths_of(store, older))
        found = await Scrubbing(store, tmp_path).run(repair=True)
        assert found.found == Counter(superseded=1, overlapping=1)
        assert [len(paths_of(store, pack)) for pack in (older, newer, more)] == [9, 0, 0]
        await store.catalogues.refresh()
        assert await store.read("small/other", b"other") == b"other"
        assert (await Scrubbing(store, tmp_path, grace_seconds=0.0).run(repair=True)).found == Counter()


async def test_a_pack_without_members_goes(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        empty = await store.write_pack({})
        age(*paths_of(store, empty))
        assert (await Scrubbing(store, tmp_path).run(repair=True)).found == Counter(superseded=1)
        assert paths_of(store, empty) == []


async def test_what_dead_writers_left_goes_when_it_is_old(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        await fill(store)
        before = files_of(store)
        manifest = await store.write("object/dead", b"x" * 200_000)
        for path in store.manifests(manifest):
            path.unlink()
        drafts = [_write(Path(target.path, "drafts", "left"), b"half") for target in store.targets.all[:2]]
        scrubbing = Scrubbing(store, tmp_path)
        assert (await scrubbing.run(repair=True)).found == Counter()
        left = [store.shard(manifest, index) for index in range(6)]
        assert all(path.exists() for path in [*left, *drafts])
        age(*left, *drafts)
        assert (await scrubbing.run()).found == Counter(unreferenced=6, old_draft=2)
        found = await scrubbing.run(repair=True)
        assert found.found == Counter(unreferenced=6, old_draft=2)
        assert found.damaged_count == 0
        assert files_of(store) == before


async def test_nothing_is_removed_while_a_target_does_not_answer(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        manifest = await store.write("object/dead", b"x" * 200_000)
        new = await store.write("object/4", OBJECTS["object/4"], generation=2 << 20)
        await store.write("object/4", OBJECTS["object/4"], generation=1 << 20)
        age(*(store.shard(manifest, index) for index in range(6)), *paths_of(store, new))
        for path in store.manifests(manifest):
            path.unlink()
        await _kill(store.targets.all[0])
        kept = set(files_of(store))
        found = await Scrubbing(store, tmp_path).run(repair=True)
        assert found.failures.count == 1
        assert set(files_of(store)) >= kept


async def test_duplicates_go_and_the_named_one_stays(tmp_path: Path) -> None:
    async with flash(tmp_path, targets_count=8) as store:
        manifest = await store.write("object/4", OBJECTS["object/4"])
        path = store.shard(manifest, 2)
        holders = {store.holder(manifest, index).path for index in range(6)}
        spare = next(target for target in store.targets.all if target.path not in holders)
        relative = shard_path(manifest.object_id, manifest.generation, 2)
        twin = _write(Path(spare.path, relative), path.read_bytes())
        scrubbing = Scrubbing(store, tmp_path)
        assert (await scrubbing.run(repair=True)).found == Counter(duplicate=1)
        assert twin.exists()
        age(twin)
        await scrubbing.run(repair=True)
        assert not twin.exists()
        assert path.exists()
        _write(twin, b"a bad twin")
        found = await scrubbing.run(repair=True)
        assert found.repaired_count == 1
        assert not twin.exists()
        assert (await scrubbing.run()).found == Counter()


async def test_files_of_others_are_reported_and_never_touched(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        await fill(store)
        root = Path(store.targets.all[1].path)
        identity = bytes(20).hex()
        header = encode_shard_header(ref_of("x", b"x").object_id, Generation(1), store.geometry, 0, is_pack=False)
        strange = [
            _write(root / "README", b"mine"),
            _write(root / "shards" / "notes.txt", b"mine"),
            _write(root / "shards" / "000" / "core.1234", b"mine"),
            _write(root / "shards" / "123" / f"{identity}.{1:016x}.00", header),  # belongs into 000
            _write(root / "manifests" / "000" / f"{identity}.{1:015x}", b"mine"),
            _write(root / "packs" / "index", b"mine"),
            _write(root / os.fsdecode(b"no text \xff"), b"mine"),
        ]
        age(*strange)
        before = files_of(store)
        found = await Scrubbing(store, tmp_path).run(repair=True)
        assert found.found == Counter(foreign=len(strange))
        assert {line.partition(": ")[2] for line in found.lines} == set(map(str, strange))
        assert files_of(store) == before


async def test_a_sole_copy_is_never_removed(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        store.is_sole = True
        lost = await store.write("object/4", OBJECTS["object/4"], generation=1 << 20)
        for index in range(3):
            store.shard(lost, index).unlink()
        age(*paths_of(store, lost))
        found = await Scrubbing(store, tmp_path).run(repair=True)
        assert found.found["lost"] == 1
        assert len(paths_of(store, lost)) == 6


async def test_manifests_that_are_all_bad_keep_their_shards(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        manifest = await store.write("object/4", OBJECTS["object/4"])
        for path in store.manifests(manifest):
            _write(path, b"noise")
        age(*paths_of(store, manifest))
        found = await Scrubbing(store, tmp_path).run(repair=True)
        assert found.found == Counter(bad_manifest=3)
        assert found.damaged_count == 1
        assert found.repaired_count == 0
        assert len(paths_of(store, manifest)) == 9


async def test_a_pass_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        written = await fill(store)
        _write(store.shard(sorted(written, key=lambda each: each.object_id)[0], 0), b"")
        scrubbing = Scrubbing(store, tmp_path)
        scrubbing.rate_bytes = 1 << 20
        progress = ScrubProgress()
        with trio.CancelScope() as scope:
            half = len(written) // 2

            def scrubbed(read_bytes: int) -> None:
                if progress.done_count > half:
                    scope.cancel()

            scrubbing.scrubbed = scrubbed  # type: ignore[method-assign]
            await scrubbing.made().scrub(False, progress)
        assert scope.cancelled_caught
        cursor = msgspec.json.decode(scrubbing.cursor.read_bytes(), type=Cursor)
        assert cursor.done_count == half
        scrubbing = Scrubbing(store, tmp_path)
        again = await scrubbing.run()
        assert again.done_count == len(written)
        assert again.found == Counter(truncated=1)
        assert not scrubbing.cursor.exists()

        _write(scrubbing.cursor, msgspec.json.encode(cursor))
        assert (await scrubbing.run(repair=True)).repaired_count == 1  # a pass that repairs is another one
        _write(scrubbing.cursor, b"{broken")
        assert (await scrubbing.run()).done_count == len(written)


async def test_the_rate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with flash(tmp_path) as store:
        await store.write("object/4", OBJECTS["object/4"])
        waits: list[float] = []

        async def sleep_until(due: float) -> None:
            waits.append(due)

        monkeypatch.setattr(trio, "sleep_until", sleep_until)
        scrubbing = Scrubbing(store, tmp_path)
        scrubbing.rate_bytes = 1000
        began = trio.current_time()
        await scrubbing.run()
        assert waits[-1] - began >= scrubbing.read_bytes / 1000
