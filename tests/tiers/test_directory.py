from __future__ import annotations

import os
import random
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.tiers.conformance import pages, read, ref_of
from tests.tiers.stalling import stalling
from tiercache.core.record import ObjectRef
from tiercache.errors import AccessDenied, NotFound, SetupError, TierError, Unavailable, VersionChanged
from tiercache.tiers.cold.directory import Directory
from tiercache.tiers.tier import MemorySink

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount or to change user")


def _over(path: Path) -> Directory:
    return Directory(path, dataset="data", threads=trio.CapacityLimiter(4))


async def _ref(cold: Directory, key: str) -> ObjectRef:
    return ref_of(cold, await cold.head(key))


async def _keys(cold: Directory, prefix: str = "") -> list[str]:
    return [found.key for page in await pages(cold, prefix, delimiter=False, limit=3) for found in page.objects]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source directory with a file, beside something that is none of its business."""
    (tmp_path / "secret").write_text("secret")
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "file").write_text("inside")
    return source


ODD_KEYS = ("../secret", "a/../../secret", "/a/file", "a//file", "./a/file", "a/./file", "a/file/", "a/", "", "a\0", ".", "..")


@pytest.mark.parametrize("key", ODD_KEYS)
async def test_case_15_odd_keys_never_escape_and_are_not_found(tree: Path, key: str) -> None:
    cold = _over(tree)
    real = await _ref(cold, "a/file")
    with pytest.raises(NotFound):
        await cold.head(key)
    with pytest.raises(NotFound):
        await read(cold, ObjectRef("data", key, real.version, 6, 0, real.object_id), 0, 6)


@pytest.mark.parametrize("prefix", ["../", "/", "a/../", "a//", "./", "../se", "a/file/", "\0/"])
async def test_case_15_odd_prefixes_list_nothing(tree: Path, prefix: str) -> None:
    assert await _keys(_over(tree), prefix) == []


async def test_overlong_names_are_not_found(tree: Path) -> None:
    cold = _over(tree)
    for key in ("x" * 300, "a/" * 3000 + "x"):
        with pytest.raises(NotFound):
            await cold.head(key)


async def test_links_are_followed_to_files_inside_only(tree: Path) -> None:
    links = {
        "a/near": "file",
        "up": "a/../a/file",
        "absolute": str(tree / "a" / "file"),
        "twice": "up",
        "out": "../secret",
        "out-absolute": str(tree.parent / "secret"),
        "beside": str(tree) + "-other/x",
        "loop": "loop",
        "dangling": "nothing",
        "to-directory": "a",
        "to-root": ".",
        "through-link": "to-directory/file",
    }
    for name, target in links.items():
        (tree / name).symlink_to(target)
    cold = _over(tree)
    assert await _keys(cold) == ["a/file", "a/near", "absolute", "twice", "up"]
    page = await cold.list("")
    assert ([found.key for found in page.objects], page.prefixes) == (["absolute", "twice", "up"], ("a/",))
    for key in ("a/near", "up", "absolute", "twice"):
        assert await read(cold, await _ref(cold, key), 0, 6) == b"inside"
    for key in ("out", "out-absolute", "beside", "loop", "dangling", "to-directory", "to-directory/file", "through-link"):
        with pytest.raises(NotFound):
            await cold.head(key)


async def test_what_is_not_a_file_is_neither_listed_nor_found(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tree / "socket"))
        cold = _over(tree)
        real = await _ref(cold, "a/file")
        assert await _keys(cold) == ["a/file"]
        for key in ("pipe", "socket", "a"):
            with pytest.raises(NotFound):
                await cold.head(key)
            with pytest.raises(NotFound):
                await read(cold, ObjectRef("data", key, real.version, 6, 0, real.object_id), 0, 6)


async def test_names_that_are_not_utf8_survive(tree: Path) -> None:
    names = [b"\xff\xfe", b"new\nline", b" spaces ", b"\xc3\xa9", b"e\xcc\x81", b"a%2fb", b"-\x01"]
    for name in names:
        (tree / "a" / os.fsdecode(name)).write_bytes(name)
    cold = _over(tree)
    keys = await _keys(cold, "a/")
    assert [key.encode("utf-8", "surrogateescape") for key in keys] == sorted([b"a/" + name for name in names] + [b"a/file"])
    for key in keys[:-1]:
        ref = await _ref(cold, key)
        if key != "a/file":
            raw = key.encode("utf-8", "surrogateescape")[2:]
            assert await read(cold, ref, 0, ref.size_bytes) == raw


async def test_version_is_size_and_times_and_mtime_is_in_whole_seconds(tree: Path) -> None:
    os.utime(tree / "a" / "file", ns=(0, -1))
    found = os.stat(tree / "a" / "file")
    listed = await _over(tree).head("a/file")
    assert listed.version == f"6--1-{found.st_ctime_ns}"
    assert listed.mtime_seconds == -1


async def test_case_1_same_size_overwrite_with_its_time_put_back_is_noticed(tree: Path) -> None:
    cold = _over(tree)
    path = tree / "a" / "file"
    ref = await _ref(cold, "a/file")
    before = os.stat(path)
    path.write_text("INSIDE")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    sink = MemorySink(6)
    with pytest.raises(VersionChanged):
        await cold.read(ref, 0, 6, sink)
    assert sink.received_bytes == 0


class Meddling(MemorySink):
    """Takes small pieces, and does something to the file after the first."""

    def __init__(self, capacity_bytes: int, act: Callable[[], object]) -> None:
        super().__init__(capacity_bytes)
        self._act = act

    def buffer(self, wanted_bytes: int) -> memoryview:
        return super().buffer(min(wanted_bytes, 1000))

    def advance(self, count: int) -> None:
        super().advance(count)
        if self.received_bytes == count:
            self._act()


@pytest.mark.parametrize("change", ["overwritten", "grown", "truncated", "replaced", "deleted"])
async def test_case_3_change_during_a_read_never_gives_a_mixture(tree: Path, change: str) -> None:
    path = tree / "a" / "big"
    path.write_bytes(b"a" * 5000)
    cold = _over(tree)
    ref = await _ref(cold, "a/big")
    replacement = tree / "replacement"
    replacement.write_bytes(b"b" * 5000)
    acts: dict[str, Callable[[], object]] = {
        "overwritten": lambda: path.write_bytes(b"b" * 5000),
        "grown": lambda: path.write_bytes(b"a" * 6000),
        "truncated": lambda: os.truncate(path, 1500),
        "replaced": lambda: os.rename(replacement, path),
        "deleted": lambda: os.unlink(path),
    }
    sink = Meddling(5000, acts[change])
    with pytest.raises(VersionChanged):  # a lost link changes the ctime: even the open file is no longer that version
        await cold.read(ref, 0, 5000, sink)
    assert bytes(sink.view) == b"a" * 1000
    with pytest.raises((VersionChanged, NotFound)):
        await read(cold, ref, 0, 5000)


async def test_case_5_vanished_or_exchanged_source_is_unavailable_until_it_is_back(tree: Path) -> None:
    cold = _over(tree)
    await cold.probe()
    ref = await _ref(cold, "a/file")

    async def all_fail() -> None:
        for call in (lambda: cold.list(""), lambda: cold.list("a/"), lambda: cold.head("a/file"), lambda: read(cold, ref, 0, 6)):
            with pytest.raises(Unavailable, match="source"):
                await call()

    away = tree.parent / "away"
    os.rename(tree, away)
    await all_fail()
    os.mkdir(tree)
    await all_fail()
    os.rmdir(tree)
    os.rename(away, tree)
    assert await read(cold, ref, 0, 6) == b"inside"


@contextmanager
def _tmpfs(path: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@needs_root
async def test_case_5_unmounted_source_is_unavailable_and_comes_back_by_itself(tmp_path: Path) -> None:
    cold = _over(tmp_path)
    with _tmpfs(tmp_path):
        (tmp_path / "file").write_text("first")
        await cold.probe()
        assert await _keys(cold) == ["file"]
    for call in (lambda: cold.list(""), lambda: cold.head("file")):
        with pytest.raises(Unavailable, match="not the directory that it was"):
            await call()
    with _tmpfs(tmp_path):
        (tmp_path / "file").write_text("second")
        assert await read(cold, await _ref(cold, "file"), 0, 6) == b"second"


async def test_probe_names_what_is_wrong(tree: Path) -> None:
    await _over(tree).probe()
    with pytest.raises(SetupError, match="does not exist"):
        await _over(tree / "nowhere").probe()
    with pytest.raises(SetupError, match="is not a directory"):
        await _over(tree / "a" / "file").probe()


@needs_root
async def test_missing_permission_is_access_denied_and_never_an_empty_listing() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        os.chmod(path, 0o755)
        for directory in ("open", "shut"):
            (path / directory).mkdir()
            (path / directory / "file").write_text("x")
        cold = _over(path)
        ref = await _ref(cold, "shut/file")
        (path / "shut").chmod(0o700)
        (path / "open" / "file").chmod(0o600)
        open_ref = await _ref(cold, "open/file")
        os.seteuid(65534)
        try:
            for call in (lambda: cold.list("shut/"), lambda: cold.list("", delimiter=False), lambda: cold.head("shut/file"),
                         lambda: read(cold, ref, 0, 1), lambda: read(cold, open_ref, 0, 1)):  # fmt: skip
                with pytest.raises(AccessDenied):
                    await call()
            with pytest.raises(SetupError, match="cannot be read"):
                await _over(path / "shut").probe()
        finally:
            os.seteuid(0)


async def test_random_trees_list_as_a_walk_sees_them(tmp_path: Path) -> None:
    rng = random.Random(6)
    wanted = set()
    for _ in range(150):
        parts = [
            "".join(rng.choice("ab-.0") + rng.choice("xy") for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(1, 4))
        ]
        path = tmp_path.joinpath(*parts)
        if any((tmp_path.joinpath(*parts[:depth])).is_file() for depth in range(1, len(parts))) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        wanted.add("/".join(parts))
    cold = _over(tmp_path)
    tops = sorted({key[: rng.randint(1, len(key))] for key in rng.sample(sorted(wanted), 20)} | {""})
    for prefix in tops:
        below = sorted((key for key in wanted if key.startswith(prefix)), key=str.encode)
        for limit in (1, 5, 1000):
            deep = await pages(cold, prefix, delimiter=False, limit=limit)
            assert [found.key for page in deep for found in page.objects] == below
            level = await pages(cold, prefix, delimiter=True, limit=limit)
            folded = {prefix + key[len(prefix) :].partition("/")[0] + "/" for key in below if "/" in key[len(prefix) :]}
            plain = [key for key in below if "/" not in key[len(prefix) :]]
            assert [found.key for page in level for found in page.objects] == plain
            assert [name for page in level for name in page.prefixes] == sorted(folded, key=str.encode)


async def test_new_files_show_in_the_next_listing_at_once(tree: Path) -> None:
    cold = _over(tree)
    for number in range(60):
        (tree / "a" / f"new{number:02}").touch()
        assert len((await cold.list("a/")).objects) == number + 2
        if number % 3 == 0:
            assert (await cold.list(f"a/new{number:02}", limit=16)).objects[0].size_bytes == 0


async def test_files_that_vanish_between_pages_are_left_out(tree: Path) -> None:
    for number in range(10):
        (tree / "a" / f"n{number}").touch()
    cold = _over(tree)
    first = await cold.list("a/", limit=4)
    (tree / "a" / "n5").unlink()
    second = await cold.list("a/", token=first.token)
    assert [found.key for found in second.objects] == ["a/n3", "a/n4", "a/n6", "a/n7", "a/n8", "a/n9"]
    assert second.token == ""


async def test_empty_directories_are_prefixes_and_empty_inside(tree: Path) -> None:
    (tree / "empty").mkdir()
    cold = _over(tree)
    assert (await cold.list("")).prefixes == ("a/", "empty/")
    assert await _keys(cold, "empty/") == []


async def test_case_10_reader_of_a_hung_source_can_leave(tmp_path: Path) -> None:
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    with stalling(mountpoint, {"file": b"x" * 100_000}) as source:
        cold = _over(mountpoint)
        ref = await _ref(cold, "file")
        assert await read(cold, ref, 0, 100_000) == b"x" * 100_000
        source.stop()
        for call in (lambda: read(cold, ref, 0, 1000), lambda: cold.head("file"), lambda: cold.list("")):
            with trio.fail_after(5), trio.move_on_after(0.2) as scope:
                await call()
            assert scope.cancelled_caught
        source.resume()
        with trio.fail_after(10):
            assert await read(cold, ref, 10, 1000) == b"x" * 1000


async def test_closing_ends_a_running_read(tree: Path) -> None:
    path = tree / "a" / "big"
    path.write_bytes(b"a" * 5000)
    cold = _over(tree)
    ref = await _ref(cold, "a/big")
    token = trio.lowlevel.current_trio_token()
    sink = Meddling(5000, lambda: trio.from_thread.run(cold.aclose, trio_token=token))
    with pytest.raises(TierError) as caught:
        await cold.read(ref, 0, 5000, sink)
    assert isinstance(caught.value, Unavailable)
    assert sink.received_bytes == 1000
