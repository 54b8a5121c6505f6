"""Packs with members in common: one scrub leaves each object in one pack, and gives up none of them."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.engines import KIB, content
from tests.engine.test_warm_scrubbing import SMALL, Scrubbing, files_of
from tests.tiers.warm_copies import flash
from tests.warm.nodes import ALL_IS_OLD_SECONDS, Node, node_on
from tests.warm.surveying import survey
from tests.warm.trouble import Life, Weather, living
from tiercache.core.record import ObjectRef
from tiercache.engine import warm_packing
from tiercache.errors import Unavailable
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.tier import Sink

TARGETS_COUNT = 7
CONTENTS = {letter: content(number, 5 * KIB + number) for number, letter in enumerate("abcdefghijklmnop")}
FIRST, SECOND = "abcdefghij", "ghijklmnop"


@pytest.fixture(autouse=True)
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    made = Weather()
    made.attach(monkeypatch)
    return made


def targets_in(home: Path) -> list[Path]:
    paths = [home / f"target{number}" for number in range(TARGETS_COUNT)]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    return paths


@asynccontextmanager
async def node_in(home: Path, name: str) -> AsyncIterator[Node]:
    store = MemoryCold()
    for key, data in CONTENTS.items():
        store.put(key, data)
    async with node_on(home / name, targets_in(home), store) as node:
        yield node


async def pack(node: Node, keys: Iterable[str]) -> None:
    """As a node does it that has not seen what others packed meanwhile."""
    for key in keys:
        assert await node.mount.cat(key) == CONTENTS[key]
    await node.mount.settled()
    await node.write_again()
    await node.forget_hot()


async def two_packs(home: Path) -> None:
    async with node_in(home, "one") as one, node_in(home, "other") as other:
        await pack(one, FIRST)
        await pack(other, SECOND)


def members_on(home: Path) -> Counter[str]:
    """In how many packs each object is."""
    return Counter(member.key for seen in survey(targets_in(home)).copies.values() for member in seen.manifest.members)


async def assert_each_is_in_one_pack(home: Path, node: Node, keys: Iterable[str] = CONTENTS) -> None:
    assert members_on(home) == Counter(dict.fromkeys(keys, 1))
    assert survey(targets_in(home)).incomplete(TARGETS_COUNT) == []
    await assert_readable(node, keys)


async def assert_readable(node: Node, keys: Iterable[str]) -> None:
    node.faults.is_down = True
    for key in keys:
        assert await node.mount.cat(key) == CONTENTS[key], key
    await node.forget_hot()
    node.faults.is_down = False


async def test_what_two_nodes_packed_at_once_is_in_one_pack_after_a_scrub(tmp_path: Path) -> None:
    async with node_in(tmp_path, "one") as one, node_in(tmp_path, "other") as other:
        await pack(one, FIRST)
        await pack(other, SECOND)
        (older, younger) = sorted(survey(targets_in(tmp_path)).copies, key=lambda name: name[1])
        assert (await one.scrub(repair=False, grace_seconds=ALL_IS_OLD_SECONDS)).found == Counter(overlapping=1)
        assert (await one.scrub(repair=True, grace_seconds=3600.0)).found == Counter()
        assert set(survey(targets_in(tmp_path)).copies) == {older, younger}
        await other.warm.catalogues.refresh()
        await assert_readable(other, CONTENTS)  # it knows both packs from now on
        mended = await one.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
        assert (mended.found, mended.failures.count, mended.damaged_count) == (Counter(overlapping=1), 0, 0)
        assert mended.lines == [f"overlapping: packs/{younger[0].hex()}.{younger[1]:016x}"]
        copies = survey(targets_in(tmp_path)).copies
        assert older in copies
        assert younger not in copies
        for node in (one, other):  # the other one has not heard of the new pack
            await assert_each_is_in_one_pack(tmp_path, node)
        assert (await other.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)).found == Counter()


@pytest.mark.parametrize("seed", range(3))
async def test_one_pass_is_enough_for_many_packs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with node_in(tmp_path, "node") as node:
        packed: set[str] = set()
        for _ in range(6):
            keys = rng.sample(sorted(CONTENTS), 6)
            await pack(node, keys)
            packed.update(keys)
        assert (await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)).failures.count == 0
        await assert_each_is_in_one_pack(tmp_path, node, packed)


async def test_what_a_node_leaves_that_dies_meanwhile_the_next_scrub_finishes(tmp_path: Path) -> None:
    await two_packs(tmp_path / "template")
    life = Life()
    shutil.copytree(tmp_path / "template", tmp_path / "whole")
    life.left_count = 1_000_000
    async with node_in(tmp_path / "whole", "scrubbing") as node:
        with living(life):
            await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
    calls_count = 1_000_000 - life.left_count
    both_count, step = 0, calls_count // 16
    points = [left for offset in range(4) for left in range(calls_count // 3 + offset * step // 4, calls_count, step)]
    for number, left_count in enumerate(points):
        if both_count and number >= len(points) // 4:
            break
        home = tmp_path / f"point{number}"
        shutil.copytree(tmp_path / "template", home)
        life = Life()
        async with node_in(home, "dying") as node:
            with living(life):
                life.dies_after(left_count)
                await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
        both_count += len(survey(targets_in(home)).copies) == 3
        async with node_in(home, "next") as node:
            await assert_readable(node, CONTENTS)
            await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
            await assert_each_is_in_one_pack(home, node)
            assert (await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)).found == Counter()
    assert both_count, "none died between the new pack and the removal of the old one"


@pytest.mark.parametrize("failing", ["g", "k", "p"])
async def test_a_pack_stays_when_what_else_is_in_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(warm_packing, "BATCH_BYTES", 10 * KIB)  # so that other batches are written by then
    await two_packs(tmp_path)
    before = set(survey(targets_in(tmp_path)).copies)
    async with node_in(tmp_path, "node") as node:
        reads = node.warm.reads
        read = reads.read

        async def failing_read(ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
            if ref.key == failing:
                raise Unavailable(f"{ref.key} did not come")
            await read(ref, offset, length, sink)

        with monkeypatch.context() as patched:
            patched.setattr(reads, "read", failing_read)
            found = await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
        is_needed = failing not in FIRST  # those in the older pack are not read
        assert (found.found, found.failures.count) == (Counter(overlapping=1), int(is_needed))
        seen = survey(targets_in(tmp_path))
        assert (set(seen.copies) == before) is is_needed
        assert (seen.unreferenced, seen.drafts) == ([], [])
        await assert_readable(node, CONTENTS)
        await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
        await assert_each_is_in_one_pack(tmp_path, node)


async def test_a_pack_stays_when_too_few_targets_take_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await two_packs(tmp_path)
    before = set(survey(targets_in(tmp_path)).copies)
    async with node_in(tmp_path, "node") as node:
        full = node.warm.targets.all[:2]
        with monkeypatch.context() as patched:
            patched.setattr(node.warm.targets, "lacks_room", lambda target: target in full)
            found = await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
        assert (found.found, found.failures.count) == (Counter(overlapping=1), 1)
        seen = survey(targets_in(tmp_path))
        assert set(seen.copies) == before
        assert (seen.unreferenced, seen.drafts) == ([], [])
        await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)
        await assert_each_is_in_one_pack(tmp_path, node)


async def test_members_of_an_older_pack_that_cannot_be_read_are_kept(tmp_path: Path) -> None:
    await two_packs(tmp_path)
    seen = survey(targets_in(tmp_path))
    older, younger = sorted(seen.copies, key=lambda name: name[1])
    for index in range(3):
        seen.copies[older].shards[index][0].unlink()
    async with node_in(tmp_path, "node") as node:
        found = (await node.scrub(repair=True, grace_seconds=ALL_IS_OLD_SECONDS)).found
        assert (found["lost"], found["overlapping"]) == (1, 0)
        assert set(survey(targets_in(tmp_path)).copies) == {younger}
        await assert_each_is_in_one_pack(tmp_path, node, SECOND)


async def test_a_pack_that_existed_nowhere_else_stays_as_it_is(tmp_path: Path) -> None:
    async with flash(tmp_path) as store:
        keys = list(SMALL)
        await store.write_pack({key: SMALL[key] for key in keys[:8]}, generation=1 << 20, seed=1)
        store.is_sole = True
        await store.write_pack({key: SMALL[key] for key in keys[4:]}, generation=2 << 20, seed=2)
        before = files_of(store)
        found = await Scrubbing(store, tmp_path, grace_seconds=ALL_IS_OLD_SECONDS).run(repair=True)
        assert found.found == Counter(overlapping=1)
        assert files_of(store) == before
