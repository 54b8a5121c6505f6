"""What an operator does with a warm tier, on a real mount: evict, look, damage it, scrub, take a target away."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fuse.mount import Mount, Mounting
from tests.fuse.warm import KIB, MIB, Targets, a_mixed_dataset, read_all
from tests.servers.process import wait_until
from tests.tiers.mirrored import mirrored

SIZES = (100 * KIB, 3 * MIB, 10 * KIB, MIB, 5000)
COUNT = 5


def warm_mount(mounting: Mounting, tmp_path: Path) -> tuple[Mount, Targets, Path, list[Path]]:
    """A mounted directory of some files, which were read."""
    source = tmp_path / "source"
    paths = a_mixed_dataset(source, sum(SIZES), sizes_bytes=SIZES)
    targets = Targets(tmp_path / "warm", 2, 1)
    mount = mounting(f"file://{source}", options=targets.options)
    read_all(mount, source, paths, 1)
    return mount, targets, source, paths


def evict_all(mount: Mount) -> None:
    wait_until(lambda: mount.tiercache("evict", mount.root, "--json").json["counts"]["in_use"] == 0, "the end of open files")


def residency(mount: Mount, path: Path) -> list[str]:
    found: list[str] = mount.tiercache("where", path, "--json").json["files"][0]["residency"]
    return found


def state(mount: Mount, target: Path) -> str:
    rows = mount.tiercache("targets", "--json").json["targets"]
    return next(row["state"] for row in rows if row["path"] == str(target))


def test_evict_moves_files_to_the_warm_tier_and_status_tells(mounting: Mounting, tmp_path: Path) -> None:
    mount, targets, source, paths = warm_mount(mounting, tmp_path)
    one = mount.root / paths[0].relative_to(source)
    pinned = mount.root / paths[1].relative_to(source)
    mount.tiercache("pin", pinned, "--wait")
    demoted_count = 0

    def only_two_stay() -> bool:
        """The kernel tells of the end of an open file when it gets to it."""
        nonlocal demoted_count
        counts = mount.tiercache("evict", mount.root, "--json").json["counts"]
        demoted_count += counts["demoted"]
        return (counts["pinned"], counts["in_use"], counts["dropped"]) == (1, 1, 0)

    with one.open("rb"):
        wait_until(only_two_stay, "an eviction that leaves what is open and what is pinned")
        assert residency(mount, one) == ["hot", "cold"]
    assert demoted_count == COUNT - 2
    assert residency(mount, mount.root / paths[2].relative_to(source)) == ["warm", "cold"]
    wait_until(lambda: mount.tiercache("evict", one, "--json").json["counts"]["in_use"] == 0, "the end of the open file")
    assert residency(mount, one) == ["warm", "cold"]
    again = mount.tiercache("evict", one)
    assert (again.code, again.out) == (0, "nothing of it is hot\n")
    dropped = mount.tiercache("evict", pinned, mount.root / "none", "--to", "drop")
    assert dropped.code == 1
    assert "none does not exist" in dropped.err
    assert mount.tiercache("status", "--json").json["tiers"]["warm"]["state"] == "ok"
    read_all(mount, source, paths, 2)
    assert targets.files("shards")


def test_damage_is_found_and_repaired_by_a_scrub(mounting: Mounting, tmp_path: Path) -> None:
    mount, targets, source, paths = warm_mount(mounting, tmp_path)
    evict_all(mount)
    assert mount.tiercache("scrub").code == 0
    shards = targets.files("shards")
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-100] + bytes(100))
    foreign = targets.paths[1] / "notes.txt"
    foreign.write_text("not ours")
    found = mount.tiercache("scrub", "--tier", "warm")
    assert (found.code, "run it again with --repair" in found.err) == (1, True)
    assert "foreign" in found.out
    repaired = mount.tiercache("scrub", "--repair", "--json")
    assert repaired.code == 0, repaired.err
    assert (repaired.json["damaged_count"], repaired.json["repaired_count"]) == (1, 1)
    assert mount.tiercache("scrub").code == 0
    assert foreign.read_text() == "not ours"
    assert shards[0].read_bytes() == whole
    read_all(mount, source, paths, 2)


def test_a_target_that_is_taken_away_is_told_of_and_comes_back(mounting: Mounting, tmp_path: Path) -> None:
    mount, targets, source, paths = warm_mount(mounting, tmp_path)
    evict_all(mount)
    lost, aside = targets.paths[0], tmp_path / "aside"
    lost.rename(aside)
    lost.write_text("no directory")
    wait_until(lambda: state(mount, lost) == "down", "the end of a target")
    warm = mount.tiercache("status", "--json").json
    assert warm["tiers"]["warm"]["state"] == "degraded"
    assert any(f"warm target {lost} is down" in notice for notice in warm["notices"])
    rebuilt = mount.tiercache("rebuild-index")
    assert rebuilt.code == 1
    assert rebuilt.out.startswith("2 of 3 targets: ")
    read_all(mount, source, paths, 2)
    lost.unlink()
    aside.rename(lost)
    wait_until(lambda: state(mount, lost) == "up", "the return of a target", 30)
    assert mount.tiercache("rebuild-index").code == 0
    shutil.rmtree(targets.paths[2])
    wait_until((targets.paths[2] / "tiercache-target.json").exists, "a deleted target to be made again", 30)
    assert mount.tiercache("scrub", "--repair").code == 0
    assert mount.tiercache("scrub").code == 0


def test_an_upgrade_is_refused_while_a_target_hangs_and_readers_notice_nothing(mounting: Mounting, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"content")
    with mirrored(tmp_path / "mirror") as mirror:
        options = ["--ec", "1+1", "--warm-target", str(mirror.path / "t"), "--warm-target", str(tmp_path / "t")]
        mount = mounting(f"file://{source}", options=options)
        mirror.fail("hang")
        try:
            ran = mount.tiercache("upgrade", mount.point)
            assert ran.code == 1
            assert "does not answer" in ran.err
            assert (mount.root / "file").read_bytes() == b"content"
        finally:
            mirror.work()
        wait_until(lambda: mount.tiercache("upgrade", mount.point).code == 0, "an upgrade")
        assert (mount.root / "file").read_bytes() == b"content"
