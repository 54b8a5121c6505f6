"""What the model and the kills have found once."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.engine.engines import content
from tests.warm.damage import flip
from tests.warm.nodes import CHUNK_BYTES, Node, node_on
from tests.warm.surveying import Seen, Survey, survey
from tests.warm.trouble import HASTY, Weather
from tiercache.engine.demotion import Outcome
from tiercache.tiers.memory import MemoryCold

LARGE = content(1, 2 * CHUNK_BYTES + 5)


@pytest.fixture(autouse=True)
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    made = Weather()
    made.attach(monkeypatch)
    return made


def targets_in(home: Path, count: int) -> list[Path]:
    paths = [home / f"target{number}" for number in range(count)]
    for path in paths:
        path.mkdir(exist_ok=True)
    return paths


def store_with(**contents: bytes) -> MemoryCold:
    store = MemoryCold()
    for key, data in contents.items():
        store.put(key, data)
    return store


async def demoted(node: Node, *keys: str) -> None:
    """Read, demoted, evicted."""
    for key in keys:
        await node.mount.cat(key)
    assert set((await node.demote()).values()) == {Outcome.WRITTEN}
    await node.forget_hot()


def only(seen: Survey) -> Seen:
    (copy,) = seen.copies.values()
    return copy


def twin_of(path: Path, targets: list[Path]) -> Path:
    """The shard on a target that has none of the copy."""
    target = path.parents[2]
    homes = {found.parents[2] for other in targets for found in other.glob("shards/*/*")}
    twin = next(other for other in targets if other not in homes) / path.relative_to(target)
    twin.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, twin)
    return twin


async def test_of_two_bad_files_of_a_shard_one_is_mended_and_the_other_goes(tmp_path: Path) -> None:
    targets = targets_in(tmp_path, 7)
    async with node_on(tmp_path / "node", targets, store_with(large=LARGE)) as node:
        await demoted(node, "large")
        bad = only(survey(targets)).shards[4][0]
        flip(bad, random.Random(1))
        twin_of(bad, targets)
        await node.scrub(repair=True)
        assert survey(targets).incomplete(7) == []


@pytest.mark.parametrize("data", [LARGE, LARGE[:1000]], ids=["of its own", "in a pack"])
async def test_a_lost_copy_is_read_as_soon_as_what_it_lacks_has_come_back(tmp_path: Path, data: bytes) -> None:
    targets = targets_in(tmp_path, 3)
    async with node_on(tmp_path / "node", targets, store_with(key=data), "2+1") as node:
        await demoted(node, "key")
        named = next(target for target in targets if [*target.glob("manifests/*/*"), *target.glob("packs/*")])
        away = [target for target in targets if target is not named]
        for target in away:
            target.rename(target.with_name(f"{target.name} away"))
        await node.probe()
        assert (await node.scrub(repair=False)).found["lost"] == 1
        for target in away:
            shutil.rmtree(target)
            target.with_name(f"{target.name} away").rename(target)
        node.faults.is_down = True
        assert await node.mount.cat("key") == data


async def test_a_copy_that_was_replaced_is_found_though_a_piece_of_the_old_one_hangs(tmp_path: Path, weather: Weather) -> None:
    targets = targets_in(tmp_path, 5)
    store = store_with(key=LARGE)
    async with (
        node_on(tmp_path / "one", targets, store, "2+1") as one,
        node_on(tmp_path / "other", targets, store, "2+1") as other,
    ):
        await demoted(one, "key")
        assert await other.mount.cat("key") == LARGE  # it knows the copy from now on
        await other.forget_hot()
        copy = only(survey(targets))
        named = {target for target in targets if [*target.glob("manifests/*/*")]}
        holders = [paths[0].parents[2] for paths in copy.shards.values()]
        hanging = next((target for target in holders if target not in named), holders[0])
        weather.begin(str(hanging), "hanging")
        for node in (one, other):
            for target in node.warm.targets.all:
                target.deadlines = HASTY if target.path == str(hanging) else target.deadlines
        await one.warm.room.make_room(1 << 30)
        await demoted(one, "key")
        other.faults.is_down = True
        assert await other.mount.cat("key") == LARGE
        weather.end_all()
