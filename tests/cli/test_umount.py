"""`umount` on real FUSE mounts: stale ones, busy ones, other people's, and a daemon that takes its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.admin.fake import FakeControl, busy, serving
from tiercache import mountinfo
from tiercache.admin import socket as sockets
from tiercache.cli import unmounting
from tiercache.cli.main import main
from tiercache.fuse.mountpoint import mount_at, unmount
from tiercache.mountinfo import Mount

pytestmark = pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="needs /dev/fuse and root, to mount without fusermount3"
)

FILESYSTEM = """
import errno, stat, sys
import pyfuse3, trio

class OneFile(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = (stat.S_IFDIR | 0o755) if inode == 1 else (stat.S_IFREG | 0o444)
        return entry
    async def lookup(self, parent, name, ctx=None):
        if name != b"file":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(2)
    async def open(self, inode, flags, ctx=None):
        return pyfuse3.FileInfo(fh=inode)
    async def read(self, fh, offset, length):
        return b""

pyfuse3.init(OneFile(), sys.argv[1], {"fsname=test", "subtype=tiercache"})
print("mounted", flush=True)
trio.run(pyfuse3.main)
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(sockets, "ROOT_DIRECTORY", directory)
    monkeypatch.delenv("TIERCACHE_SOCKET", raising=False)
    return directory


class Mounted:
    def __init__(self, point: str, process: subprocess.Popen[bytes]) -> None:
        self.point = point
        self.process = process

    @property
    def is_mounted(self) -> bool:
        return mount_at(self.point) is not None

    def die(self) -> None:
        """What is left is a stale mount."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    point = os.path.realpath(tmp_path / "mnt")
    os.mkdir(point)
    process = subprocess.Popen([sys.executable, "-c", FILESYSTEM, point], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"mounted\n"
        yield Mounted(point, process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if mount_at(point) is not None:
            unmount(point, lazy=True)


@contextmanager
def holding(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has `path` open."""
    code = f"file = open({path!r}); print('open', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_case_13_a_stale_mount_is_healed(mounted: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    mounted.die()
    with pytest.raises(OSError, match="Transport endpoint is not connected"):
        os.listdir(mounted.point)
    assert main(["umount", mounted.point, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"mountpoint": mounted.point, "was_mounted": True, "healed": True}
    assert os.listdir(mounted.point) == []
    assert main(["umount", mounted.point]) == 0
    assert capsys.readouterr().out == f"{mounted.point}: not mounted\n"


def test_case_13_a_stale_mount_in_which_processes_stand_is_healed(mounted: Mounted) -> None:
    with holding(f"{mounted.point}/file"):
        mounted.die()
        assert main(["umount", mounted.point]) == 0
        assert os.listdir(mounted.point) == []


def test_a_mount_in_use_is_left_alone_and_its_users_are_named(mounted: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    with holding(f"{mounted.point}/file") as process:
        assert main(["umount", mounted.point]) == 1
        err = capsys.readouterr().err
        assert f"{mounted.point} is in use by " in err
        assert f"(pid {process.pid})" in err
        assert os.path.exists(f"{mounted.point}/file")
    assert main(["umount", mounted.point]) == 0
    assert not mounted.is_mounted


def test_a_daemon_that_says_busy_is_left_alone(mounted: Mounted, runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control = FakeControl(mounted.point)
    control.refuse_stop = busy(mounted.point)
    with serving(control, runtime / "a.sock"), holding(f"{mounted.point}/file") as process:
        assert main(["umount", mounted.point, "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert f"(pid {process.pid})" in document["error"]
        assert mounted.is_mounted
        assert not control.stopped.is_set()


def test_umount_waits_for_the_mount_and_the_daemon(mounted: Mounted, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon here is a thread of this very process, hence watched by its socket."""
    monkeypatch.setattr(sockets, "peer_pid", lambda path: None)
    control = FakeControl(mounted.point)
    address = runtime / "a.sock"

    def end_slowly() -> None:
        control.stopped.wait()
        threading.Event().wait(0.3)
        unmount(mounted.point)

    ending = threading.Thread(target=end_slowly)
    with serving(control, address):
        ending.start()
        assert main(["umount", mounted.point]) == 0
        assert not mounted.is_mounted
        assert sockets.answer_of(address) is sockets.Answer.DEAD
        ending.join()


def test_a_mount_elsewhere_that_got_the_same_id_is_not_waited_for(
    mounted: Mounted, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "peer_pid", lambda path: None)
    mine = mount_at(mounted.point)
    assert mine is not None
    control = FakeControl(mounted.point)
    real_mounts = mountinfo.mounts

    def with_the_id_given_away() -> list[Mount]:
        table = real_mounts()
        taken = any(mount.mount_id == mine.mount_id for mount in table)
        return table if taken else [*table, mine._replace(path="/elsewhere")]

    def end() -> None:
        control.stopped.wait()
        unmount(mounted.point)

    ending = threading.Thread(target=end)
    with serving(control, runtime / "a.sock"):
        monkeypatch.setattr(mountinfo, "mounts", with_the_id_given_away)
        ending.start()
        assert main(["umount", mounted.point]) == 0
        ending.join()


def test_umount_does_not_wait_for_ever(
    mounted: Mounted, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unmounting, "GONE_SECONDS", 0.2)
    with serving(FakeControl(mounted.point), runtime / "a.sock"):
        assert main(["umount", mounted.point]) == 1
    assert f"{mounted.point}: still mounted after 0 s" in capsys.readouterr().err


def test_the_daemon_of_another_mount_is_not_stopped(mounted: Mounted, runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control = FakeControl("/mnt/other")
    with serving(control, runtime / "a.sock"):
        assert main(["umount", mounted.point, "--socket", str(runtime / "a.sock")]) == 2
        assert "serves /mnt/other" in capsys.readouterr().err
        assert not control.stopped.is_set()


def test_a_mount_that_is_not_ours_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = os.path.realpath(tmp_path / "tmpfs")
    os.mkdir(point)
    subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)
    try:
        assert main(["umount", point]) == 1
        assert "not of tiercache" in capsys.readouterr().err
        assert mount_at(point) is not None
    finally:
        subprocess.run(["umount", point], check=True)


def test_not_mounted_is_fine_even_where_nothing_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["umount", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.endswith("/none: not mounted\n")


def test_a_link_to_the_mount_point_will_do(mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(mounted.point)
    assert main(["umount", str(tmp_path / "link")]) == 0
    assert not mounted.is_mounted
