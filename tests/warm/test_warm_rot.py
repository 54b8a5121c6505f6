"""Random bit flips and truncations over all shards, manifests and packs: all found, none served, all mended."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.engines import content
from tests.warm.nodes import CHUNK_BYTES, PACKED_BYTES, Unreadable, node_on
from tests.warm.rot import Rot
from tests.warm.surveying import survey
from tests.warm.unsynced import Unsynced
from tiercache.engine.demotion import Outcome
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.warm import files

TARGETS_COUNT = 7


def objects(count: int) -> dict[str, bytes]:
    """Of up to twelve chunks; every third small enough for a pack, every fifth a text."""
    rng = random.Random(1)
    found = {}
    for number in range(count):
        size_bytes = rng.randint(1, PACKED_BYTES if number % 3 == 0 else 12 * CHUNK_BYTES)
        text = f"line {number} of a text that says nothing new, over and over\n".encode() * (size_bytes // 50 + 1)
        found[f"d{number % 7}/{number}"] = text[:size_bytes] if number % 5 == 0 else content(number, size_bytes)
    return found


def bytes_of(targets: list[Path]) -> dict[Path, bytes]:
    return {path: path.read_bytes() for target in targets for path in target.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("damages_count", "objects_count"), [(100, 24), pytest.param(1000, 150, marks=pytest.mark.soak)], ids=["100", "1000"]
)
async def test_rot_is_found_and_mended_and_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damages_count: int, objects_count: int
) -> None:
    monkeypatch.setattr(files, "os", Unsynced())
    targets = [tmp_path / f"target{number}" for number in range(TARGETS_COUNT)]
    contents = objects(objects_count)
    store = MemoryCold()
    for key, data in contents.items():
        store.put(key, data)
    async with node_on(tmp_path / "one", targets, store) as node:
        for key, data in contents.items():
            assert await node.mount.cat(key) == data
        assert set((await node.demote()).values()) == {Outcome.WRITTEN}
    before = bytes_of(targets)
    assert survey(targets).incomplete(TARGETS_COUNT) == []

    rot = Rot(targets, random.Random(damages_count))
    rot.strike(damages_count)
    assert {path for path, data in bytes_of(targets).items() if data != before[path]} == rot.files
    assert {what.partition(":")[0] for what in rot.counts} == {"shard", "manifest", "pack"}

    faults = Unreadable(is_down=True)
    async with node_on(tmp_path / "other", targets, store, faults=faults) as node:
        found = await node.scrub(repair=False)
        assert found.found.total() == len(rot.files), found.found
        assert {Path(line.partition(": ")[2]) for line in found.lines} <= rot.files
        assert (found.failures.count, found.repaired_count) == (0, 0)
        for key, data in contents.items():
            assert await node.mount.cat(key) == data, key
        mended = await node.scrub(repair=True)
        assert mended.damaged_count == mended.repaired_count
        assert mended.failures.count == 0
        assert (await node.scrub(repair=False)).found.total() == 0
    assert survey(targets).incomplete(TARGETS_COUNT) == []
    after = bytes_of(targets)
    assert {path: data for path, data in after.items() if "shards" in path.parts} == {
        path: data for path, data in before.items() if "shards" in path.parts
    }
