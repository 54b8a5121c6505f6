"""Which path hot reads take, and what becomes of opens, closes, evictions and errors on each. Each condition is made true."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fuse.mount import REPOSITORY, Mount, Mounting, detach
from tests.fuse.test_kills import await_all_closed, open_handles
from tests.servers.process import wait_until

MIB = 1 << 20
PASSTHROUGH, HAS_RESEND = 1 << 37, 1 << 39
BODY = random.Random(5).randbytes(3 * MIB + 11)
KEEPER_SECONDS = 5.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    for number in range(3):
        (directory / f"file{number}").write_bytes(BODY)
    return directory


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a daemon with `tests/native/faulty.c` in it."""
    library = tmp_path_factory.mktemp("faulty") / "faulty.so"
    source = REPOSITORY / "tests/native/faulty.c"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


@pytest.fixture
def overlay(can_mount: None, tmp_path: Path) -> Iterator[Path]:
    for name in ("lower", "upper", "work", "overlay"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    point = tmp_path / "overlay"
    if subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", point], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no overlayfs")
    yield point
    detach(point)


def on_passthrough(mount: Mount) -> Mount:
    path = mount.status()["path"]
    if path["kind"] != "passthrough":
        pytest.skip(f"no passthrough here: {path['reason']}")
    return mount


def become_hot(mount: Mount, *names: str) -> None:
    for name in names:
        assert (mount.root / name).read_bytes() == BODY
        wait_until(lambda name=name: os.getxattr(mount.root / name, "user.tiercache.residency") == b"hot,cold", "a hot copy")  # type: ignore[misc]


def reads_well(mount: Mount) -> None:
    """Cold, then hot, then together."""
    become_hot(mount, "file0")
    for _ in range(2):
        assert (mount.root / "file0").read_bytes() == BODY
    with ExitStack() as stack:
        files = [stack.enter_context(open(mount.root / "file0", "rb")) for _ in range(5)]
        assert all(file.read() == BODY for file in files)


# -- the conditions of the plain path


def test_a_cache_on_overlayfs_is_read_on_the_plain_path(mounting: Mounting, source: Path, overlay: Path) -> None:
    mount = mounting(f"file://{source}", hot=overlay / "hot")
    path = mount.status()["path"]
    assert path["kind"] == "plain"
    assert path["reason"] == "hot directory 0 is on a stacked file system (overlayfs)" or "through Python" in path["reason"]
    reads_well(mount)
    mount.umount()


def test_without_the_extension_all_goes_through_python(mounting: Mounting, source: Path, tmp_path: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text("import sys; sys.modules['tiercache.fuse._kernel'] = None\n")
    mount = mounting(f"file://{source}", extra={"PYTHONPATH": f"{tmp_path}/hook:{REPOSITORY}"})
    path = mount.status()["path"]
    assert (path["kind"], "the extension is not there" in path["reason"]) == ("plain", True)
    reads_well(mount)


@pytest.mark.parametrize("wanted", ["plain", "python"])
def test_the_configuration_may_want_less(mounting: Mounting, source: Path, wanted: str) -> None:
    mount = mounting(f"file://{source}", settings={"mount": {"read_path": wanted}})
    path = mount.status()["path"]
    assert (path["kind"], "as configured" in path["reason"]) == ("plain", True)
    reads_well(mount)


def test_a_kernel_that_does_not_offer_passthrough_is_served_by_threads(
    mounting: Mounting, source: Path, faulty: dict[str, str]
) -> None:
    mount = mounting(f"file://{source}", extra={**faulty, "FAULTY_INIT_MASK": f"{PASSTHROUGH:x}"})
    path = mount.status()["path"]
    assert (path["kind"], "does not offer passthrough" in path["reason"]) == ("plain", True)
    reads_well(mount)
    with open(mount.root / "file0", "rb") as file:
        assert open_handles(mount) == {"passthrough": 0, "native": 1, "python": 0, "backing": 0}
        assert file.read() == BODY
    await_all_closed(mount)


def test_without_resend_open_files_go_on_and_the_rest_fails_at_once(
    mounting: Mounting, source: Path, faulty: dict[str, str]
) -> None:
    mount = on_passthrough(mounting(f"file://{source}", extra={**faulty, "FAULTY_INIT_MASK": f"{HAS_RESEND:x}"}))
    become_hot(mount, "file0")
    with open(mount.root / "file0", "rb") as file:
        assert open_handles(mount)["passthrough"] == 1
        began = time.monotonic()
        os.kill(mount.pid, signal.SIGKILL)

        seen = set()

        def is_mounted_anew() -> bool:
            try:
                return (mount.root / "file1").read_bytes() == BODY
            except OSError as error:
                seen.add(error.errno)
                return False

        wait_until(is_mounted_anew, "a mount anew")
        assert time.monotonic() - began < KEEPER_SECONDS
        assert seen <= {errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT}  # the last: nothing is mounted for a moment
        assert file.read() == BODY
    status = mount.status()
    mount.pid = status["pid"]
    assert status["restarts_count"] == 1
    reads_well(mount)


def test_a_disk_that_fails_the_threads_is_python_s_business(
    mounting: Mounting, source: Path, faulty: dict[str, str], tmp_path: Path
) -> None:
    trigger = tmp_path / "trigger"
    extra = {**faulty, "FAULTY_READS": str(trigger)}
    mount = mounting(f"file://{source}", settings={"mount": {"read_path": "plain"}}, extra=extra)
    become_hot(mount, "file0")
    with open(mount.root / "file0", "rb", buffering=0) as file:
        assert open_handles(mount)["native"] == 1
        assert os.pread(file.fileno(), 4096, 0) == BODY[:4096]
        trigger.touch()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.read() == BODY
    trigger.unlink()
    reads_well(mount)
    await_all_closed(mount)


# -- on the passthrough path


def test_a_file_opened_cold_is_passed_through_from_its_next_open_after_the_last_close(mounting: Mounting, source: Path) -> None:
    mount = on_passthrough(mounting(f"file://{source}"))
    with open(mount.root / "file0", "rb") as first:
        assert first.read() == BODY
        wait_until(lambda: os.getxattr(mount.root / "file0", "user.tiercache.residency") == b"hot,cold", "a hot copy")
        with open(mount.root / "file0", "rb") as second:
            handles = open_handles(mount)
            modes = (handles["passthrough"], handles["native"] + handles["python"])
            assert modes in ((0, 2), (2, 0)), "one inode, one mode: passthrough if the file was whole at its open"
            assert second.read() == BODY
    await_all_closed(mount)
    with open(mount.root / "file0", "rb") as third, open(mount.root / "file0", "rb"):
        assert open_handles(mount) == {"passthrough": 2, "native": 0, "python": 0, "backing": 1}
        assert third.read() == BODY
    await_all_closed(mount)


def test_a_file_open_natively_is_not_evicted(mounting: Mounting, tmp_path: Path) -> None:
    directory = tmp_path / "source"
    directory.mkdir()
    for number in range(20):
        (directory / f"file{number}").write_bytes(BODY)
    mount = on_passthrough(mounting(f"file://{directory}", hot_size="40MB"))
    become_hot(mount, "file0")
    with open(mount.root / "file0", "rb") as file:
        assert open_handles(mount)["passthrough"] == 1

        for number in range(1, 20):  # more than there is room for
            assert (mount.root / f"file{number}").read_bytes() == BODY

        def evicts() -> bool:
            """One file alone is read again and again: the others are not fresh any more at some time."""
            cold = next(
                path for path in sorted(mount.root.iterdir()) if os.getxattr(path, "user.tiercache.residency") != b"hot,cold"
            )
            assert cold.read_bytes() == BODY
            return mount.metrics()["tiercache_evictions_total"] > 0

        wait_until(evicts, "evictions")
        assert os.getxattr(mount.root / "file0", "user.tiercache.residency") == b"hot,cold"
        assert file.read() == BODY
    await_all_closed(mount)


def test_nobody_may_write_not_even_root(mounting: Mounting, source: Path) -> None:
    mount = on_passthrough(mounting(f"file://{source}"))
    become_hot(mount, "file0")
    with open(mount.root / "file0", "rb") as file:
        assert open_handles(mount)["passthrough"] == 1
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_TRUNC):
            with pytest.raises(OSError, match="Read-only") as raised:
                os.open(mount.root / "file0", flags)
            assert raised.value.errno == errno.EROFS
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(file.fileno(), 1)
        assert file.read() == BODY
    assert next((mount.hot / "objects").glob("??/*")).read_bytes() == BODY
