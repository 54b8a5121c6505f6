"""Directories that must not become warm targets: refused in one line, and nothing in them is touched. Others draw a notice."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fuse.mount import Mount, Mounting, Ran, is_mounted
from tests.fuse.warm import MIB, evict_all
from tests.tiers.disks import ext4, tmpfs
from tests.warm.surveying import survey
from tiercache.tiers import claim
from tiercache.tiers.warm.files import MARKER

CONTENT = b"precious"


class Surroundings:
    """A mount of a directory that is about to be made, and what lies around it. Two sound targets beside each that is tried."""

    def __init__(self, mounting: Mounting, place: Path) -> None:
        self.place = place
        self.source, self.replica, self.other = place / "source", place / "replica", place / "other"
        for directory in (self.source, self.replica, self.other):
            directory.mkdir()
            (directory / "file").write_bytes(CONTENT)
        self.sound = [place / "sound0", place / "sound1"]
        self.mount: Mount = mounting(f"file://{self.source}", started=False)
        self.hot, self.point = self.mount.hot, self.mount.point

    def with_targets(self, *paths: Path, as_json: bool = True) -> Ran:
        given = [str(part) for path in paths for part in ("--warm-target", path)]
        where: list[str | Path] = [
            self.mount.source,
            self.point,
            "--hot",
            self.hot,
            "--hot-size",
            "1GB",
            "--replica",
            self.replica,
        ]
        more: list[str | Path] = ["--socket", self.mount.socket, *(["--json"] if as_json else [])]
        ran = self.mount.tiercache("mount", *where, *more, "--ec", "2+1", *given)
        if ran.code == 0:
            self.mount.pid = self.mount.status()["pid"]
        return ran


@pytest.fixture
def surroundings(mounting: Mounting, tmp_path: Path) -> Surroundings:
    return Surroundings(mounting, tmp_path)


def seen(*directories: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below them, with the times that every change leaves behind."""
    found: dict[str, tuple[Any, ...]] = {}
    for directory in directories:
        for path in [directory, *sorted(directory.rglob("*"))]:
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


def linked(around: Surroundings) -> Path:
    (around.place / "link").symlink_to(around.replica)
    return around.place / "link"


def damaged(around: Surroundings) -> Path:
    (around.other / "file").rename(around.other / MARKER)
    return around.other


def below_marker(around: Surroundings, marker: str) -> Path:
    (around.other / marker).write_bytes(b"{}")
    return around.other / "new"


PLACES: dict[str, tuple[Callable[[Surroundings], Path], str]] = {
    "not empty and not ours": (lambda around: around.other, "is not empty"),
    "a file": (lambda around: around.other / "file", "is not a directory"),
    "a damaged marker": (damaged, "damaged"),
    "the replica": (lambda around: around.replica, "--replica"),
    "a link to the replica": (linked, "is also the replica"),
    "in the source": (lambda around: around.source / "new", "lies inside"),
    "in the hot directory": (lambda around: around.hot / "new", "lies inside"),
    "around them": (lambda around: around.place, "inside --warm-target"),
    "in the mount point": (lambda around: around.point / "new", "inside MOUNTPOINT"),
    "in another target": (lambda around: around.sound[0] / "new", "lies inside --warm-target"),
    "in a cache directory": (lambda around: below_marker(around, claim.MARKER), "lies inside the cache directory"),
    "in somebody's target": (lambda around: below_marker(around, MARKER), "lies inside the warm target"),
    "twice the same": (lambda around: around.sound[0], "is --warm-target too"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_is_somebody_elses_is_refused(surroundings: Surroundings, name: str) -> None:
    choose, words = PLACES[name]
    chosen = choose(surroundings)
    kept = (surroundings.source, surroundings.replica, surroundings.other, surroundings.point)
    before = seen(*kept)
    refused(surroundings, surroundings.with_targets(*surroundings.sound, chosen), words)
    assert seen(*kept) == before
    assert chosen.name != "new" or not chosen.exists()


def refused(around: Surroundings, ran: Ran, words: str) -> None:
    assert ran.code in (1, 2), ran
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("tiercache: ")
    assert words in ran.err, ran.err
    assert ";" in ran.err, "the line says what to do"
    assert not is_mounted(around.point)


def test_memory_is_refused(surroundings: Surroundings, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "memory", 64 * MIB) as memory:
        refused(surroundings, surroundings.with_targets(*surroundings.sound, memory / "new"), "in memory (tmpfs)")
        assert os.listdir(memory) == []


def test_too_few_are_refused_with_both_numbers(surroundings: Surroundings) -> None:
    ran = surroundings.with_targets(*surroundings.sound)
    refused(surroundings, ran, "2 directories are named, and 2+1 shards need 3")
    assert not any(path.exists() for path in surroundings.sound)


def test_one_file_system_for_several_draws_a_notice(surroundings: Surroundings, tmp_path: Path) -> None:
    with ext4(tmp_path / "disk.img", tmp_path / "disk", 64 * MIB) as disk:
        ran = surroundings.with_targets(*surroundings.sound, disk, as_json=False)
        assert (ran.code, ran.err) == (0, "")
        [notice] = [line for line in ran.out.splitlines() if line.startswith("notice: warm targets")]
        assert all(str(path) in notice for path in surroundings.sound)
        assert str(disk) not in notice
        assert "one file system" in notice
        assert notice.removeprefix("notice: ") in surroundings.mount.status()["notices"]
        surroundings.mount.umount()


def test_a_disk_that_is_not_mounted_is_not_written_below_and_is_used_when_it_is(
    surroundings: Surroundings, tmp_path: Path
) -> None:
    image, point = tmp_path / "disk.img", tmp_path / "disk"
    targets = [*surroundings.sound, point]
    mount = surroundings.mount
    with ext4(image, point, 64 * MIB):
        assert surroundings.with_targets(*targets).code == 0
        mount.umount()
        marker = (point / MARKER).read_bytes()
        with taken_away(image, point):
            before = seen(point)
            assert surroundings.with_targets(*targets).code == 0
            assert any(str(point) in notice and "not mounted" in notice for notice in mount.status()["notices"])
            assert states(mount) == {str(path): "up" for path in surroundings.sound} | {str(point): "down"}
            assert (mount.root / "file").read_bytes() == CONTENT
            evict_all(mount)
            assert seen(point) == before
        scrubbed = mount.tiercache("scrub", "--tier", "warm", "--repair", "--json")
        assert scrubbed.code == 0, (scrubbed.out, scrubbed.err)
        assert states(mount)[str(point)] == "up"
        assert (point / MARKER).read_bytes() == marker
        mount.umount()


def test_a_broken_target_is_replaced_by_a_directory_with_another_path(surroundings: Surroundings, tmp_path: Path) -> None:
    broken, new = tmp_path / "broken", tmp_path / "new"
    mount = surroundings.mount
    assert surroundings.with_targets(*surroundings.sound, broken).code == 0
    assert (mount.root / "file").read_bytes() == CONTENT
    assert evict_all(mount)["demoted"] == 1
    mount.umount()
    shutil.rmtree(broken)
    targets = [*surroundings.sound, new]
    assert surroundings.with_targets(*targets).code == 0
    scrubbed = mount.tiercache("scrub", "--tier", "warm", "--repair", "--json")
    assert scrubbed.code == 0, (scrubbed.out, scrubbed.err)
    assert survey(targets).incomplete(len(targets)) == []
    assert list(survey(targets).contents().values()) == [CONTENT]
    mount.umount()


@contextmanager
def taken_away(image: Path, point: Path) -> Iterator[None]:
    """The disk is not mounted meanwhile."""
    _run("umount", point)
    try:
        yield
    finally:
        _run("mount", "-o", "loop", image, point)


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=30)


def states(mount: Mount) -> dict[str, str]:
    ran = mount.tiercache("targets", "--json")
    assert ran.code == 0, ran.err
    return {target["path"]: target["state"] for target in ran.json["targets"]}
