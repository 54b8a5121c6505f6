"""Files that are read while they are fetched: the threads of the extension read what Python finds for them."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuse.mount import Mount, Mounting, drop_caches
from tests.fuse.test_kills import await_all_closed, open_handles
from tests.fuse.test_read_paths import faulty  # noqa: F401  # a fixture
from tests.fuse.test_successors import another, handed_over
from tests.servers.process import wait_until

MIB = 1 << 20
SIZE_BYTES = 40 * MIB + 4321
BODY = random.Random(9).randbytes(SIZE_BYTES)
OTHER = random.Random(10).randbytes(SIZE_BYTES)
NAMES = [f"file{number}" for number in range(4)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    for name in NAMES:
        (directory / name).write_bytes(BODY)
    return directory


def in_order(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        position = 0
        while piece := file.read(MIB + 4096):
            assert piece == BODY[position : position + len(piece)]
            position += len(piece)
        assert position == SIZE_BYTES


def anywhere(path: Path) -> None:
    rng = random.Random(1)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for _ in range(60):
            offset, length = rng.randrange(SIZE_BYTES), rng.choice((4096, 100_000, 3 * MIB))
            assert os.pread(file.fileno(), length, offset) == BODY[offset : offset + length]


def mapped(path: Path) -> None:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        for begin in range(30 * MIB, 0, -3 * MIB):
            assert memory[begin : begin + MIB] == BODY[begin : begin + MIB]
        assert memory[:] == BODY


def past_the_end(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)  # the kernel cuts nothing off then
    try:
        for begin in (SIZE_BYTES - 100_000, SIZE_BYTES - 1, SIZE_BYTES, SIZE_BYTES + MIB):
            assert os.pread(fd, MIB, begin) == BODY[begin:]
    finally:
        os.close(fd)


@pytest.mark.parametrize("read", [in_order, anywhere, mapped, past_the_end])
@pytest.mark.parametrize("read_path", ["auto", "plain", "python"])
def test_every_byte_is_right_while_it_is_fetched(
    mounting: Mounting, source: Path, read: Callable[[Path], None], read_path: str
) -> None:
    mount = mounting(f"file://{source}", settings={"mount": {"read_path": read_path}})
    for name in NAMES[:2]:
        read(mount.root / name)
    if read_path != "python":
        await_all_closed(mount)


def compared(source: Path, mount: Mount) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen(["cmp", source / name, mount.root / name]) for name in NAMES for _ in range(2)]


def test_several_readers_of_several_files_at_once(mounting: Mounting, source: Path) -> None:
    mount = mounting(f"file://{source}")
    assert [reader.wait(120) for reader in compared(source, mount)] == [0] * 2 * len(NAMES)
    await_all_closed(mount)


def test_bytes_that_are_not_in_the_page_cache_after_all_are_read_by_python(
    mounting: Mounting,
    source: Path,
    tmp_path: Path,
    faulty: dict[str, str],  # noqa: F811
) -> None:
    shortage = tmp_path / "shortage"
    shortage.touch()
    mount = handed_over(mounting(f"file://{source}", extra={**faulty, "FAULTY_RESIDENT": str(shortage)}))
    in_order(mount.root / NAMES[0])
    assert shortage.stat().st_size > 0, "nothing was left to the threads"
    shortage.unlink()
    in_order(mount.root / NAMES[1])
    await_all_closed(mount)


def test_a_file_that_is_overwritten_while_it_is_read_gives_no_byte_of_the_next(mounting: Mounting, source: Path) -> None:
    mount = mounting(f"file://{source}")
    with open(mount.root / NAMES[0], "rb", buffering=0) as file:
        assert file.read(MIB) == BODY[:MIB]
        (source / "next").write_bytes(OTHER)
        (source / "next").rename(source / NAMES[0])
        try:
            for begin in range(MIB, SIZE_BYTES, MIB):
                assert os.pread(file.fileno(), MIB, begin) == BODY[begin : begin + MIB]
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise


@pytest.mark.parametrize("way", ["kill", "upgrade"])
def test_readers_of_files_on_their_way_do_not_notice_a_successor(mounting: Mounting, source: Path, way: str) -> None:
    mount = handed_over(mounting(f"file://{source}"))
    readers = compared(source, mount)
    wait_until(lambda: sum(open_handles(mount).values()) > 0, "a file to be open")
    pid = mount.pid
    if way == "kill":
        os.kill(pid, signal.SIGKILL)
        another(mount, pid)
    else:
        assert mount.tiercache("upgrade", mount.point).code == 0
    assert [reader.wait(120) for reader in readers] == [0] * len(readers)
    drop_caches()
    in_order(mount.root / NAMES[0])
    await_all_closed(mount)
