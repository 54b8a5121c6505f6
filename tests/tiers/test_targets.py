"""All warm targets of a mount: what becomes one, what is refused, what is remembered, and in which order they are used."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import trio

from tests.tiers.disks import ext4, tmpfs
from tests.tiers.mirrored import mirrored
from tests.tiers.warm_target import run, state, until
from tiercache.core.health import Usage
from tiercache.errors import SetupError, Unavailable
from tiercache.tiers.claim import claim
from tiercache.tiers.warm import marking, targets
from tiercache.tiers.warm.files import DRAFTS, MARKER, Vanished
from tiercache.tiers.warm.target import Deadlines, Target
from tiercache.tiers.warm.targets import Targets, open_targets


class Place:
    """A node: its hot directory, and directories for targets beside it."""

    def __init__(self, path: Path, node: str = "hot") -> None:
        self.path = path
        self.hot = path / node
        self.hot.mkdir()
        self.memory = self.hot / "warm.json"

    def paths(self, *names: str) -> list[str]:
        return [str(self.path / name) for name in names]

    async def open(self, *names: str, deadlines: Deadlines | None = None) -> Targets:
        others = [("hot directory", self.hot), ("replica", self.path / "replica")]
        return await open_targets(
            self.paths(*names), self.memory, self.path / "mnt", others, deadlines=deadlines, rng=random.Random(1)
        )

    async def refused(self, *names: str) -> str:
        with pytest.raises(SetupError) as caught:
            await self.open(*names)
        return caught.value.line


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# -- what becomes a target


async def test_new_and_empty_directories_become_targets_and_are_the_same_for_every_node(place: Place) -> None:
    (place.path / "b").mkdir()
    (place.path / "b" / "lost+found").mkdir()
    first = await place.open("a", "b")
    assert [target.state for target in first.all] == ["up", "up"]
    assert len({target.uuid for target in first.all}) == 2
    about = os.statvfs(place.path)
    assert {target.weight_bytes for target in first.all} == {about.f_blocks * about.f_frsize}
    other = await Place(place.path, "hot2").open("b", "a")
    assert [target.uuid for target in other.all] == [target.uuid for target in reversed(first.all)]
    assert first.by_uuid.keys() == other.by_uuid.keys()
    await first.all[0].put("packs/x", b"data")
    assert await other.all[1].read_whole("packs/x", 10) == b"data"
    marker = msgspec.json.decode((place.path / "a" / MARKER).read_bytes())
    assert marker.keys() == {"format", "uuid", "weight_bytes"}
    assert os.stat(place.path / "a").st_mode & 0o777 == 0o700


async def test_two_nodes_that_mark_at_once_agree(place: Place) -> None:
    nodes = [Place(place.path, f"node{number}") for number in range(8)]
    found: list[bytes] = []

    async def one(node: Place) -> None:
        found.append((await node.open("shared")).all[0].uuid)

    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(one, node)
    assert len(set(found)) == 1
    assert set(os.listdir(place.path / "shared")) == {MARKER, DRAFTS}


async def test_a_marker_that_comes_while_the_directory_is_looked_at_is_believed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = (await place.open("shared")).all[0].uuid
    read, answers = marking._read_marker, [None]
    monkeypatch.setattr(marking, "_read_marker", lambda root: answers.pop() if answers else read(root))
    assert (await Place(place.path, "hot2").open("shared")).all[0].uuid == uuid


async def test_what_is_not_ours_is_refused_and_stays_as_it_was(place: Place) -> None:
    directory = place.path / "full"
    directory.mkdir()
    (directory / "thesis.tex").write_bytes(b"precious")
    line = await place.refused("full")
    assert "full" in line
    assert "thesis.tex" in line
    assert os.listdir(directory) == ["thesis.tex"]
    (place.path / "file").write_bytes(b"")
    assert "not a directory" in await place.refused("file")
    (place.path / "odd").mkdir()
    (place.path / "odd" / MARKER).write_bytes(b"{")
    assert "damaged" in await place.refused("odd")
    (place.path / "odd" / MARKER).write_bytes(msgspec.json.encode(marking.Marker(2, "0" * 32, 1)))
    assert "has format 2, this program knows 1" in await place.refused("odd")
    (place.path / "odd" / MARKER).write_bytes(b'{"format": 2, "uuid": "in another form", "more": 1}')
    assert "has format 2, this program knows 1" in await place.refused("odd")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mnt", "is also the mount point"),
        ("mnt/below", "lies inside the mount point"),
        ("hot", "is also the hot directory"),
        ("hot/below", "lies inside the hot directory"),
        ("replica/below", "lies inside the replica"),
        ("", "contains the mount point"),
    ],
)
async def test_places_of_others_are_refused(place: Place, name: str, what: str) -> None:
    line = await place.refused("sound", name)
    assert what in line
    assert "--warm-target" in line
    assert not (place.path / "sound").exists()


async def test_targets_in_each_other_or_in_caches_are_refused(place: Place) -> None:
    assert "contains the warm target" in await place.refused("a/b", "a")
    assert "is also the warm target" in await place.refused("a", "../" + place.path.name + "/a")
    await place.open("a")
    assert "lies inside the warm target" in await place.refused("a/b")
    with claim(place.path / "cache", mountpoint=place.path / "elsewhere"):
        assert "lies inside the cache directory" in await place.refused("cache/below")
        assert "not empty" in await place.refused("cache")


async def test_memory_is_no_target(place: Place) -> None:
    with tmpfs(place.path / "shm", 1 << 20):
        assert "in memory (tmpfs)" in await place.refused("shm/target")
    assert "stores nothing" in await place.refused("/proc/target")


async def test_a_copy_of_a_target_is_refused(place: Place) -> None:
    opened = await place.open("a", "b")
    shutil.copytree(place.path / "a", place.path / "c")
    assert "have the same uuid" in await place.refused("a", "c")
    shutil.rmtree(place.path / "b")
    shutil.copytree(place.path / "a", place.path / "b")
    await opened.probe(opened.all[1])
    assert state(opened.all[1]) == "down"
    assert "is a copy of" in opened.all[1].detail
    assert opened.by_uuid[opened.all[0].uuid] is opened.all[0]


async def test_targets_on_one_file_system_are_told_of(place: Place) -> None:
    opened = await place.open("a", "b")
    assert len(opened.notices) == 1
    assert "one file system" in opened.notices[0]
    with ext4(place.path / "image", place.path / "disk", 16 << 20):
        assert (await place.open("a", "disk")).notices == []


# -- what is remembered


async def _probe(opened: Targets, number: int = 0) -> Target:
    target = opened.all[number]
    await opened.probe(target)
    return target


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("loss", ["emptied", "deleted", "marker lost", "noise", "drafts lost"])
async def test_an_emptied_target_becomes_the_same_one_again(place: Place, loss: str, running: bool) -> None:
    opened = await place.open("a")
    before = opened.all[0].identity
    assert before is not None
    await opened.all[0].put("shards/abc/x", b"data")
    home = place.path / "a"
    if loss == "emptied":
        for path in home.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
    elif loss == "deleted":
        shutil.rmtree(home)
    elif loss == "marker lost":
        (home / MARKER).unlink()
    elif loss == "noise":
        (home / MARKER).write_bytes(random.Random(4).randbytes(100))
    else:
        shutil.rmtree(home / DRAFTS)
    if not running:
        opened = await place.open("a")
    else:
        if loss != "noise":
            with pytest.raises(Unavailable):
                await opened.all[0].begin()
            assert state(opened.all[0]) == "down"
        await _probe(opened)
    target = opened.all[0]
    assert (state(target), target.identity) == ("up", before)
    await target.put("shards/abc/y", b"data")
    draft = await target.begin()
    await draft.commit("shards/abc/z")
    assert msgspec.json.decode((home / MARKER).read_bytes())["weight_bytes"] == before.weight_bytes


async def test_somebodys_files_in_place_of_a_target_are_left_alone(place: Place) -> None:
    opened = await place.open("a")
    shutil.rmtree(place.path / "a")
    (place.path / "a").mkdir()
    (place.path / "a" / "thesis.tex").write_bytes(b"precious")
    target = await _probe(opened)
    assert state(target) == "down"
    assert "thesis.tex" in target.detail
    assert os.listdir(place.path / "a") == ["thesis.tex"]
    assert "thesis.tex" in await place.refused("a")


async def test_what_is_not_mounted_is_never_written_to(place: Place) -> None:
    with ext4(place.path / "image", place.path / "a", 16 << 20) as point:
        opened = await place.open("a")
        uuid = opened.all[0].uuid
        assert opened.all[0].usage.total_bytes < 16 << 20
    assert os.listdir(point) == []
    target = await _probe(opened)
    assert state(target) == "down"
    again = await place.open("a")
    assert (state(again.all[0]), again.all[0].uuid) == ("down", uuid)
    assert "not mounted" in again.notices[0]
    assert os.listdir(point) == []
    os.rmdir(point)
    target = await _probe(again)
    assert "not mounted" in target.detail
    assert not point.exists()
    assert [each.uuid for each in again.ordered(b"x" * 20)] == [uuid]  # manifests know where they would be
    point.mkdir()
    run("mount", "-o", "loop", place.path / "image", point)
    try:
        await _probe(again)
        assert state(target) == "up"
    finally:
        run("umount", point)


async def test_a_target_below_a_directory_that_is_not_there_joins_later(place: Place) -> None:
    opened = await place.open("a", "missing/b")
    late = opened.all[1]
    assert (state(late), late.uuid) == ("down", b"")
    assert "missing" in opened.notices[0]
    assert opened.ordered(b"x" * 20) == [opened.all[0]]
    (place.path / "missing").mkdir()
    await _probe(opened, 1)
    assert state(late) == "up"
    assert len(opened.ordered(b"x" * 20)) == 2


async def test_another_target_in_its_place_is_taken_for_what_it_is(place: Place) -> None:
    opened = await place.open("a")
    (place.path / "other").mkdir()
    other = await Place(place.path, "hot2").open("other")
    shutil.rmtree(place.path / "a")
    (place.path / "other").rename(place.path / "a")
    target = await _probe(opened)
    assert (state(target), target.uuid) == ("up", other.all[0].uuid)
    assert set(opened.by_uuid) == {other.all[0].uuid}


async def test_a_memory_that_is_damaged_or_cannot_be_written_stops_nothing(place: Place) -> None:
    first = await place.open("a")
    place.memory.write_bytes(b"\xff{")
    again = await place.open("a")
    assert again.all[0].uuid == first.all[0].uuid
    place.memory.unlink()
    place.memory.mkdir()
    assert "cannot be read" in await place.refused("a")
    shutil.rmtree(place.hot)
    assert (await place.open("a")).all[0].uuid == first.all[0].uuid


async def test_paths_need_not_be_text(place: Place) -> None:
    name = os.fsdecode(b"t\xff")
    opened = await place.open(name)
    assert state(opened.all[0]) == "up"
    uuid = opened.all[0].uuid
    shutil.rmtree(place.path / name)
    assert (await place.open(name)).all[0].uuid == uuid


async def test_without_hard_links_the_marker_is_renamed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    opened = await place.open("a")
    assert state(opened.all[0]) == "up"
    assert set(os.listdir(place.path / "a")) == {MARKER, DRAFTS}


# -- a file system that is not local


async def test_network_file_systems_may_be_targets_and_are_known_by_their_source(place: Place) -> None:
    with mirrored(place.path / "a") as mirror:
        opened = await place.open("a")
        target = opened.all[0]
        assert state(target) == "up"
        assert target.identity is not None
        assert target.identity.filesystem == "fuse mirrored"
        shutil.rmtree(mirror.source)
        mirror.source.mkdir()
        await _probe(opened)
        assert state(target) == "up"
    await _probe(opened)
    assert state(target) == "down"
    assert os.listdir(place.path / "a") == []


async def test_a_target_that_hangs_at_the_start_is_down_and_joins_when_it_answers(place: Place) -> None:
    with mirrored(place.path / "a") as mirror, mirrored(place.path / "b") as other:
        known = (await place.open("a", "b", "c")).all[0].uuid
        mirror.fail("hang")
        other.fail("EIO")
        with trio.fail_after(5):
            opened = await place.open("a", "b", "c", deadlines=Deadlines(probe_seconds=0.5))
        assert [target.state for target in opened.all] == ["down", "down", "up"]
        assert "does not answer" in opened.notices[0]
        assert "Input/output error" in opened.notices[1]
        assert opened.all[0].uuid == known
        assert len(opened.ordered(b"x" * 20)) == 3
        assert opened.for_shards(b"x" * 20, 3) == [opened.all[2]]
        mirror.work()
        other.work()
        for target in opened.all:
            target.deadlines = Deadlines()
        await until(lambda: opened.all[0]._patience.outstanding_count == 0)
        for number in (0, 1):
            await _probe(opened, number)
        assert [target.state for target in opened.all] == ["up", "up", "up"]


async def test_probes_run_in_the_background(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "TICK_SECONDS", 0.005)
    opened = await place.open("a", "b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(opened.run)
        (place.path / "a" / MARKER).unlink()
        with pytest.raises(Unavailable):
            await opened.all[0].read("packs/none", 0, 1)
        assert state(opened.all[0]) == "down"
        await until(lambda: state(opened.all[0]) == "up")
        nursery.cancel_scope.cancel()
    await opened.aclose()
    with pytest.raises(Unavailable, match="closed"):
        await opened.all[1].names("")


# -- order


async def test_manifests_follow_the_weights_alone_and_shards_what_is_fit(place: Place) -> None:
    opened = await place.open("a", "b", "c", "d")
    rng = random.Random(11)
    ids = [rng.randbytes(20) for _ in range(2000)]
    before = [opened.ordered(each) for each in ids]
    assert all(len(set(order)) == 4 for order in before)
    a, b, c, d = opened.all
    for target in opened.all:
        target.usage = Usage(50 << 30, 100 << 30)
    assert all(len(set(opened.for_shards(each, 3))) == 3 for each in ids)

    def firsts() -> Counter[Target]:
        return Counter(opened.for_shards(each, 2)[0] for each in ids)

    even = firsts()
    assert all(400 < even[target] < 600 for target in opened.all)
    a.health.failed(0.0, "x")
    b.health.is_full = True
    c.usage = Usage(9 << 30, 100 << 30)  # less than a tenth is free
    assert firsts() == {d: 2000}
    assert opened.for_shards(ids[0], 4) == [d]
    c.usage = Usage(20 << 30, 100 << 30)
    uneven = firsts()
    assert 400 < uneven[c] < 750  # 20 of 70
    c.usage = d.usage
    for target, seconds in ((c, 0.004), (d, 0.0001)):  # noise
        target.estimate.add(seconds, 0.0, 0)
    assert 900 < firsts()[c] < 1100
    assert [opened.ordered(each) for each in ids] == before


@pytest.mark.parametrize("kind", ["reads", "writes"])
async def test_a_target_that_is_much_slower_gets_fewer_shards(place: Place, kind: str) -> None:
    opened = await place.open("a", "b", "c", "d", "e")
    for target in opened.all:
        target.usage = Usage(50 << 30, 100 << 30)
        target.estimate.add(0.002, 0.0, 0)
        target.create_estimate.add(0.020, 0.0, 0)
    slow = opened.all[0]
    estimate = slow.estimate if kind == "reads" else slow.create_estimate
    for _ in range(200):
        estimate.add(0.1 if kind == "reads" else 0.4, 0.0, 0)
    rng = random.Random(12)
    firsts = Counter(opened.for_shards(rng.randbytes(20), 1)[0] for _ in range(2000))
    assert 10 < firsts[slow] < 120  # a tenth of the weight of each of the others
    assert set(firsts) == set(opened.all)


async def test_a_directory_that_another_node_makes_while_it_is_looked_for_is_used(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, vanished = marking.open_root, [True]

    def made_meanwhile(path: str) -> int:
        if vanished and vanished.pop():
            os.mkdir(path)
            raise Vanished(path)
        return look(path)

    monkeypatch.setattr(marking, "open_root", made_meanwhile)
    assert (await place.open("shared")).all[0].state == "up"
