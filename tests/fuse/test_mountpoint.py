"""Checks before a mount, on real mounts: a FUSE connection that nobody serves hangs, one that is closed is stale."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tiercache.errors import SetupError
from tiercache.fuse import mountpoint
from tiercache.fuse.mountpoint import check_fuse, is_mounted, mount_at, prepare_mount_point, unmount
from tiercache.mountinfo import mounts, parse

NOBODY = 65534
as_root_with_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="makes real mounts: needs root and /dev/fuse"
)


def _mount(source: str, target: Path, fstype: str, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), os.fsencode(target), fstype.encode(), 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mounting {fstype} on {target}")


def _detach_all(target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.umount2(os.fsencode(target), 2) == 0:
        pass


@contextmanager
def silent_fuse(target: Path) -> Iterator[Callable[[], None]]:
    """A FUSE mount whose requests nobody answers; the function that is yielded lets its daemon 'die'."""
    with ExitStack() as stack:
        connection = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(_detach_all, target)
        closing = stack.enter_context(ExitStack())
        closing.callback(os.close, connection)
        _mount("silent", target, "fuse.silent", f"fd={connection},rootmode=40000,user_id=0,group_id=0")
        yield closing.close


@contextmanager
def tmpfs(target: Path) -> Iterator[None]:
    _mount("tmpfs", target, "tmpfs")
    try:
        yield
    finally:
        _detach_all(target)


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def point(tmp_path: Path) -> Path:
    directory = tmp_path / "mnt"
    directory.mkdir()
    return directory


def test_mountinfo_lines_are_decoded() -> None:
    line = (
        rb"36 35 98:0 /mnt1 /mnt/with\040blank\134and\011tab\043 rw,noatime shared:1 master:2 - fuse.x s3://b\040c rw,user_id=0"
    )
    (mount,) = parse(line)
    assert (mount.mount_id, mount.parent_id, mount.device) == (36, 35, "98:0")
    assert mount.path == "/mnt/with blank\\and\ttab#"
    assert (mount.fstype, mount.source, mount.options) == ("fuse.x", "s3://b c", "rw,noatime")


def test_mountinfo_without_optional_fields_and_with_bytes_that_are_no_utf8() -> None:
    (mount,) = parse(b"21 1 0:5 / /\xff ro - tmpfs none rw")
    assert os.fsencode(mount.path) == b"/\xff"
    assert (mount.fstype, mount.source) == ("tmpfs", "none")


def test_the_root_is_mounted_and_a_plain_directory_is_not(point: Path) -> None:
    assert any(mount.path == "/proc" for mount in mounts())
    assert is_mounted("/proc")
    assert not is_mounted(os.fspath(point))
    assert not is_mounted(os.fspath(point / "missing"))


def test_an_empty_directory_is_ready_and_links_are_resolved(point: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(point)
    ready = prepare_mount_point(os.fspath(tmp_path / "link"))
    assert ready.path == os.path.realpath(point)
    assert ready.healed_count == 0


def test_a_missing_mount_point_names_the_command_that_makes_it(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(SetupError, match="does not exist") as caught:
        prepare_mount_point(os.fspath(missing))
    assert str(missing) in str(caught.value)
    assert caught.value.hint == f"run: mkdir -p {missing}"
    assert not missing.exists()


def test_a_file_is_no_mount_point(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SetupError, match=f"{file}: is not a directory"):
        prepare_mount_point(os.fspath(file))


def test_a_directory_with_files_is_refused(point: Path) -> None:
    (point / ".hidden").touch()
    with pytest.raises(SetupError, match="is not empty"):
        prepare_mount_point(os.fspath(point))
    assert (point / ".hidden").exists()


@as_root_with_fuse
def test_odd_names_of_mount_points_are_found(tmp_path: Path) -> None:
    point = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a b\\c\td\r\xff#"))
    point.mkdir()
    with tmpfs(point):
        assert is_mounted(os.fspath(point))
        unmount(os.fspath(point))
        assert not is_mounted(os.fspath(point))


@as_root_with_fuse
@pytest.mark.skipif(shutil.which("fusermount3") is None, reason="needs fusermount3")
def test_case_13_an_unprivileged_user_heals_a_stale_mount_of_theirs() -> None:
    with _open_directory() as directory:
        point = directory / "mnt"
        point.mkdir()
        os.chown(point, NOBODY, NOBODY)

        def die_and_heal() -> None:
            _mount_with_fusermount(point)
            mount = mount_at(os.fspath(point))
            assert mount is not None
            assert mount.fstype == "fuse"
            assert prepare_mount_point(os.fspath(point)).healed_count == 1
            assert not is_mounted(os.fspath(point))

        assert _complaint_to(NOBODY, die_and_heal) == ""


def _mount_with_fusermount(point: Path) -> None:
    """What libfuse does: the device comes through a socket. It is closed at once, as if its daemon had died."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno())}
    subprocess.run(["fusermount3", "--", point], env=environment, pass_fds=[theirs.fileno()], check=True)
    os.close(socket.recv_fds(ours, 1, 1)[1][0])


@as_root_with_fuse
def test_something_else_that_is_mounted_is_refused_and_stays(point: Path) -> None:
    with tmpfs(point):
        with pytest.raises(SetupError, match="is already a mount point \\(tmpfs, tmpfs\\)"):
            prepare_mount_point(os.fspath(point))
        assert is_mounted(os.fspath(point))


@as_root_with_fuse
def test_case_13_stale_mounts_are_detached_and_the_mount_point_is_used_again(point: Path) -> None:
    with silent_fuse(point) as die:
        die()
        with pytest.raises(OSError, match="not connected") as caught:
            os.stat(point)
        assert caught.value.errno == errno.ENOTCONN
        with silent_fuse(point) as die_again:
            die_again()
            ready = prepare_mount_point(os.fspath(point))
        assert ready.healed_count == 2
        assert os.listdir(point) == []
        assert mount_at(os.fspath(point)) is None


@as_root_with_fuse
def test_case_13_a_mount_that_hangs_is_refused_in_time(point: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountpoint, "ANSWER_SECONDS", 0.3)
    with silent_fuse(point):
        before = time.monotonic()
        assert is_mounted(os.fspath(point))
        with pytest.raises(SetupError, match="does not answer within") as caught:
            prepare_mount_point(os.fspath(point))
        with pytest.raises(SetupError, match="does not answer within"):
            prepare_mount_point(os.fspath(point / "below"))
        assert time.monotonic() - before < 3
        assert "umount -l" in caught.value.hint


@as_root_with_fuse
def test_a_hidden_mount_does_not_count(point: Path) -> None:
    inner = point / "inner"
    inner.mkdir()
    with tmpfs(inner):
        assert is_mounted(os.fspath(inner))
        with tmpfs(point):
            inner.mkdir()
            assert not is_mounted(os.fspath(inner))
            with tmpfs(inner):
                assert is_mounted(os.fspath(inner))
        assert is_mounted(os.fspath(inner))


@as_root_with_fuse
def test_case_13_a_busy_mount_is_reported_and_lazily_unmounted_and_twice_is_no_error(point: Path) -> None:
    with tmpfs(point), ExitStack() as stack:
        descriptor = os.open(point, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        with pytest.raises(SetupError, match="are in use") as caught:
            unmount(os.fspath(point))
        assert f"fuser -vm {point}" in caught.value.hint
        assert is_mounted(os.fspath(point))
        unmount(os.fspath(point), lazy=True)
        assert not is_mounted(os.fspath(point))
        unmount(os.fspath(point))
        unmount(os.fspath(point), lazy=True)


@as_root_with_fuse
def test_an_unprivileged_user_learns_who_can_unmount(point: Path) -> None:
    with tmpfs(point):
        line = _complaint_to(NOBODY, lambda: unmount(os.fspath(point)))
        assert is_mounted(os.fspath(point))
    assert "cannot be unmounted" in line
    assert "have root run: umount -l" in line


def _complaint_to(uid: int, act: Callable[[], None]) -> str:
    """What goes wrong for a process of that user ('' if nothing): a child, because fusermount3 goes by the real user.

    It has a mount namespace of its own, which ends with it, and in it a /dev/fuse for everybody, as udev makes it.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _share_fuse_in_own_namespace()
            os.setresuid(uid, uid, uid)
            act()
        except SetupError as error:
            os.write(sending, error.line.encode())
        except (OSError, AssertionError, subprocess.CalledProcessError) as error:
            os.write(sending, repr(error).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with open(receiving, encoding="utf-8") as answer:
        line = answer.read()
    os.waitpid(child, 0)
    return line


def _share_fuse_in_own_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive, private, bind = 0x20000, 0x4000, 1 << 18, 0x1000
    assert libc.unshare(new_namespace) == 0
    assert libc.mount(b"none", b"/", None, recursive | private, None) == 0
    with _open_directory() as directory:
        assert libc.mount(os.fsencode(directory / "fuse"), b"/dev/fuse", None, bind, None) == 0


@as_root_with_fuse
def test_this_machine_can_mount() -> None:
    check_fuse(allow_other=True)


@pytest.mark.parametrize(
    ("kind", "complaint", "fix"),
    [
        ("missing", "does not exist", "modprobe fuse"),
        ("file", "is not a character device", "--device /dev/fuse"),
    ],
)
def test_a_missing_or_wrong_device_names_the_fix(tmp_path: Path, kind: str, complaint: str, fix: str) -> None:
    device = tmp_path / "fuse"
    if kind == "file":
        device.touch()
    with pytest.raises(SetupError, match=complaint) as caught:
        check_fuse(allow_other=False, device=os.fspath(device))
    assert fix in caught.value.hint
    assert "\n" not in caught.value.line


@as_root_with_fuse
def test_a_device_without_driver_names_the_fix(tmp_path: Path) -> None:
    device = tmp_path / "fuse"
    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(10, 254))
    with pytest.raises(SetupError, match="cannot be opened") as caught:
        check_fuse(allow_other=False, device=os.fspath(device))
    assert "--device /dev/fuse" in caught.value.hint


@contextmanager
def _open_directory() -> Iterator[Path]:
    """A directory that every user can reach (pytest's own are 0700), with a FUSE device for everybody."""
    made = tempfile.mkdtemp()
    os.chmod(made, 0o755)
    try:
        node = os.path.join(made, "fuse")
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(10, 229))
        os.chmod(node, 0o666)
        yield Path(made)
    finally:
        shutil.rmtree(made)


@as_root_with_fuse
def test_other_users_need_the_right_to_the_device() -> None:
    with _open_directory() as directory:
        device = directory / "fuse"
        device.chmod(0o600)
        with as_user(NOBODY), pytest.raises(SetupError, match="Permission denied") as caught:
            check_fuse(allow_other=False, device=os.fspath(device))
    assert f"chmod 666 {device}" in caught.value.hint


@as_root_with_fuse
def test_other_users_need_fusermount3(monkeypatch: pytest.MonkeyPatch) -> None:
    with _open_directory() as directory:
        monkeypatch.setenv("PATH", os.fspath(directory))
        with as_user(NOBODY), pytest.raises(SetupError, match="fusermount3 is not installed") as caught:
            check_fuse(allow_other=False, device=os.fspath(directory / "fuse"))
    assert "apt-get install fuse3" in caught.value.hint


@as_root_with_fuse
def test_fusermount3_must_be_setuid_root(monkeypatch: pytest.MonkeyPatch) -> None:
    with _open_directory() as directory:
        copy = directory / "fusermount3"
        copy.write_text("#!/bin/sh\n")
        copy.chmod(0o755)
        monkeypatch.setenv("PATH", os.fspath(directory))
        with as_user(NOBODY), pytest.raises(SetupError, match="is not setuid root") as caught:
            check_fuse(allow_other=False, device=os.fspath(directory / "fuse"))
        assert f"chmod u+s {copy}" in caught.value.hint
        copy.chmod(0o4755)
        with as_user(NOBODY):
            check_fuse(allow_other=False, device=os.fspath(directory / "fuse"))


@as_root_with_fuse
@pytest.mark.skipif(shutil.which("fusermount3") is None, reason="needs fusermount3")
def test_allow_other_for_other_users_needs_the_line_in_fuse_conf() -> None:
    with _open_directory() as directory:
        conf, device = directory / "fuse.conf", os.fspath(directory / "fuse")
        for text, allowed in [(None, False), ("#user_allow_other\n", False), ("mount_max = 9\n user_allow_other # ours\n", True)]:
            if text is not None:
                conf.write_text(text)
                conf.chmod(0o644)
            with as_user(NOBODY):
                check_fuse(allow_other=False, device=device, conf=os.fspath(conf))
                if allowed:
                    check_fuse(allow_other=True, device=device, conf=os.fspath(conf))
                else:
                    with pytest.raises(SetupError, match=f"user_allow_other in {conf}"):
                        check_fuse(allow_other=True, device=device, conf=os.fspath(conf))


@as_root_with_fuse
def test_other_users_need_a_mount_point_of_their_own() -> None:
    with _open_directory() as directory:
        point = directory / "mnt"
        point.mkdir(mode=0o755)
        with as_user(NOBODY), pytest.raises(SetupError, match="only on directories that you may write to"):
            prepare_mount_point(os.fspath(point))
        point.chmod(0o1777)
        with as_user(NOBODY), pytest.raises(SetupError, match="sticky"):
            prepare_mount_point(os.fspath(point))
        os.chown(point, NOBODY, NOBODY)
        with as_user(NOBODY):
            assert prepare_mount_point(os.fspath(point)).path == os.fspath(point)


@as_root_with_fuse
def test_root_without_the_capability_is_told_so() -> None:
    program = (
        "import ctypes, os\n"
        "from tiercache.errors import SetupError\n"
        "from tiercache.fuse.mountpoint import check_fuse\n"
        "libc = ctypes.CDLL(None)\n"
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
        "data = (ctypes.c_uint32 * 6)()\n"
        "assert libc.capget(header, data) == 0\n"
        "data[0] &= ~(1 << 21)\n"
        "assert libc.capset(header, data) == 0\n"
        "try:\n    check_fuse(allow_other=True)\nexcept SetupError as error:\n    print(error.line)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert "CAP_SYS_ADMIN" in done.stdout
    assert "--cap-add SYS_ADMIN" in done.stdout
