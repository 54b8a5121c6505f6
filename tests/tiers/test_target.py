"""One warm target: what its operations do on real file systems, sound, failing, hanging, full and read-only."""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio
import xxhash

from tests.tiers.disks import ext4, fill_up
from tests.tiers.mirrored import Mirrored, mirrored
from tests.tiers.warm_target import DEADLINE_SECONDS, SHORT, Seen, descriptors, hang, opened, recover, run, state, until
from tiercache.core.health import Usage
from tiercache.errors import Damaged, NotHeld, TargetFull, Unavailable
from tiercache.tiers.warm.files import DRAFTS, MARKER, Buffer
from tiercache.tiers.warm.marking import probe
from tiercache.tiers.warm.target import Deadlines, Target

DATA = random.Random(5).randbytes(300_000)


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    made = await opened(tmp_path / "target")
    yield made
    made.close()
    assert not descriptors(tmp_path)


# -- files


async def test_what_was_put_is_read_at_any_offset(target: Target) -> None:
    await target.put("shards/abc/name", DATA)
    rng = random.Random(3)
    for _ in range(20):
        offset = rng.randrange(len(DATA))
        length = rng.randint(1, len(DATA) - offset)
        expected = DATA[offset : offset + length]
        assert await target.read("shards/abc/name", offset, length, checksum=xxhash.xxh3_64_intdigest(expected)) == expected
        assert await target.read("shards/abc/name", offset, length) == expected
    assert await target.read_whole("shards/abc/name", len(DATA)) == DATA
    assert target.read_seconds(1 << 20) > 0
    assert target.errors_count == 0


async def test_bytes_that_are_not_what_was_written_are_damaged_and_the_target_stays_up(target: Target) -> None:
    await target.put("shards/abc/name", DATA)
    checksum = xxhash.xxh3_64_intdigest(DATA)
    for offset, length in ((len(DATA) - 10, 11), (len(DATA), 1), (len(DATA) + 5, 1)):
        with pytest.raises(Damaged, match="ends before"):
            await target.read("shards/abc/name", offset, length)
    with pytest.raises(Damaged, match="not what was written"):
        await target.read("shards/abc/name", 0, len(DATA) - 1, checksum=checksum)
    with pytest.raises(Damaged, match="more than"):
        await target.read_whole("shards/abc/name", len(DATA) - 1)
    assert (target.state, target.errors_count) == ("up", 5)


async def test_what_is_not_there_is_not_held(target: Target) -> None:
    for relative in ("shards/abc/none", "shards/none/none"):
        with pytest.raises(NotHeld, match="none"):
            await target.read(relative, 0, 1)
        with pytest.raises(NotHeld):
            await target.read_whole(relative, 10)
        await target.remove(relative)
    assert await target.names("shards/none") == []
    assert await target.scan("shards/none") == []
    assert (target.state, target.errors_count) == ("up", 0)


async def test_a_removed_file_is_gone(target: Target) -> None:
    await target.put("packs/name", DATA)
    await target.remove("packs/name")
    with pytest.raises(NotHeld):
        await target.read("packs/name", 0, 1)


async def test_links_are_never_followed(target: Target, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_bytes(DATA)
    shards = Path(target.path) / "shards"
    (shards / "abc").mkdir(parents=True)
    os.symlink(tmp_path / "secret" / "file", shards / "abc" / "file")
    os.symlink(tmp_path / "secret", shards / "abd")
    for relative in ("shards/abc/file", "shards/abd/file"):
        with pytest.raises(Damaged, match="not a regular file"):
            await target.read(relative, 0, 1)
    assert await target.names("shards/abd") == []
    with pytest.raises(Unavailable, match="directory"):
        await target.put("shards/abd/file", b"new")
    await target.put("shards/abc/file", b"new")  # in place of the link
    assert (tmp_path / "secret" / "file").read_bytes() == DATA
    assert await target.read_whole("shards/abc/file", 100) == b"new"
    assert state(target) == "up"


async def test_odd_things_in_place_of_files_are_damage_and_do_not_hang(target: Target) -> None:
    directory = Path(target.path) / "shards" / "abc"
    (directory / "directory").mkdir(parents=True)
    os.mkfifo(directory / "pipe")
    (Path(target.path) / "manifests").write_bytes(b"noise")
    with trio.fail_after(DEADLINE_SECONDS):
        for relative in ("shards/abc/directory", "shards/abc/pipe", "manifests/abc/name"):
            with pytest.raises(Damaged):
                await target.read(relative, 0, 1)
        with pytest.raises(Unavailable):
            await target.put("shards/abc/directory", b"new")
        with pytest.raises(Unavailable):
            await target.put("manifests/abc/name", b"new")
        with pytest.raises(Unavailable):
            await target.remove("shards/abc/directory")
    assert await target.names("manifests") == []
    assert state(target) == "up"
    assert os.listdir(Path(target.path) / DRAFTS) == []


async def test_names_that_are_not_text_break_nothing(target: Target) -> None:
    await target.put("packs/plain", DATA)
    raw = b"\xff\xfe odd \n"
    (Path(target.path) / "packs" / os.fsdecode(raw)).write_bytes(b"123")
    os.mkdir(Path(target.path) / "packs" / "sub")
    assert sorted(map(os.fsencode, await target.names("packs"))) == [b"plain", b"sub", raw]
    found = {os.fsencode(each.name): each for each in await target.scan("packs")}
    assert found[b"plain"].size_bytes == len(DATA)
    assert found[b"plain"].occupied_bytes >= len(DATA) // 2
    assert abs(found[b"plain"].mtime_seconds - await target.now_seconds()) < 60
    assert (found[raw].size_bytes, found[raw].is_regular, found[b"sub"].is_regular) == (3, True, False)
    name = next(each.name for each in await target.scan("packs") if os.fsencode(each.name) == raw)
    assert await target.read_whole(f"packs/{name}", 10) == b"123"
    await target.remove(f"packs/{name}")
    assert sorted(await target.names("packs")) == ["plain", "sub"]
    assert set(await target.names("")) == {MARKER, DRAFTS, "packs"}


async def test_operations_are_observed(tmp_path: Path) -> None:
    seen = Seen()
    target = await opened(tmp_path / "target", observe=seen)
    await target.put("packs/name", DATA)
    await target.read("packs/name", 0, 1000)
    with pytest.raises(NotHeld):
        await target.read("packs/none", 0, 1000)
    assert seen.calls == [("write", len(DATA), ""), ("read", 1000, ""), ("read", 0, "NotHeld")]


async def test_a_closed_target_refuses(target: Target) -> None:
    target.close()
    with pytest.raises(Unavailable, match="closed"):
        await target.names("")
    assert not target.probe_due()


# -- drafts


async def test_a_draft_is_seen_when_it_is_committed_and_not_before(target: Target) -> None:
    draft = await target.begin()
    pieces: list[Buffer] = [DATA[:10], bytearray(DATA[10:1000]), b"", memoryview(DATA)[1000:]]
    await draft.append(pieces)
    many = [bytes([number % 251]) for number in range(3000)]
    await draft.append(many)  # more than one writev takes
    assert draft.size_bytes == len(DATA) + 3000
    assert await target.names("shards/abc") == []
    await draft.commit("shards/abc/name")
    assert await target.read_whole("shards/abc/name", 1 << 20) == DATA + b"".join(many)
    assert os.listdir(Path(target.path) / DRAFTS) == []
    with pytest.raises(Unavailable, match="given up"):
        await draft.append([b"more"])
    await draft.abandon()
    assert await target.names("shards/abc") == ["name"]


async def test_short_writes_are_continued(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.writev
    rng = random.Random(8)

    def short(descriptor: int, views: list[memoryview]) -> int:
        count = rng.randint(1, max(1, sum(map(len, views)) // 2))
        kept: list[memoryview] = []
        for view in views:
            kept.append(view[: max(0, count - sum(map(len, kept)))])
        return write(descriptor, kept)

    monkeypatch.setattr(os, "writev", short)
    draft = await target.begin()
    await draft.append([DATA[at : at + 7777] for at in range(0, len(DATA), 7777)])
    await draft.commit("packs/name")
    assert await target.read_whole("packs/name", 1 << 20) == DATA


async def test_an_abandoned_draft_leaves_nothing(target: Target) -> None:
    draft = await target.begin()
    await draft.append([DATA])
    await draft.abandon()
    await draft.abandon()
    assert os.listdir(Path(target.path) / DRAFTS) == []
    assert not descriptors(Path(target.path))
    with pytest.raises(Unavailable, match="given up"):
        await draft.commit("packs/name")


async def test_a_draft_that_somebody_removed_cannot_be_committed(target: Target) -> None:
    draft = await target.begin()
    await draft.append([DATA])
    for name in os.listdir(Path(target.path) / DRAFTS):
        (Path(target.path) / DRAFTS / name).unlink()
    with pytest.raises(Unavailable, match="removed"):
        await draft.commit("packs/name")
    assert await target.names("packs") == []
    assert state(target) == "up"


async def test_everything_is_durable_before_commit_returns(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """File first, then the name, then its directory; directories that were made, in their parents."""
    log: list[str] = []
    fsync, rename, mkdir = os.fsync, os.rename, os.mkdir

    def place(descriptor: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), target.path)

    def logged_fsync(descriptor: int) -> None:
        log.append("file" if place(descriptor).startswith(DRAFTS) else f"fsync {place(descriptor)}")
        fsync(descriptor)

    def logged_rename(source: bytes, name: bytes, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        log.append("rename")
        rename(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def logged_mkdir(name: bytes, mode: int, *, dir_fd: int) -> None:
        log.append(f"mkdir {name.decode()}")
        mkdir(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    monkeypatch.setattr(os, "mkdir", logged_mkdir)
    draft = await target.begin()
    await draft.append([DATA])
    await draft.commit("shards/abc/name")
    assert log == ["mkdir shards", "fsync .", "mkdir abc", "fsync shards", "file", "rename", "fsync shards/abc"]


async def test_a_caller_that_leaves_takes_its_draft_along(tmp_path: Path) -> None:
    with mirrored(tmp_path / "target") as mirror:
        target = await opened(mirror.path)
        draft = await target.begin()
        mirror.fail("hang")
        with trio.move_on_after(0.05):
            await draft.append([DATA])
        mirror.work()
        await until(lambda: os.listdir(mirror.source / DRAFTS) == [] and not descriptors(mirror.path))
        assert state(target) == "up"


# -- file systems that fail


@contextmanager
def _mirror(tmp_path: Path) -> Iterator[Mirrored]:
    with mirrored(tmp_path / "target") as mirror:
        yield mirror


def _operations(target: Target) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: target.read("packs/name", 0, 10),
        lambda: target.read_whole("packs/name", 1 << 20),
        lambda: target.names("packs"),
        lambda: target.scan("packs"),
        lambda: target.put("packs/other", b"data"),
        lambda: target.remove("packs/none"),
        lambda: target.begin(),
        lambda: target.now_seconds(),
        lambda: target.filesystem(),
    ]


async def test_io_errors_make_it_suspect_then_down_and_it_recovers(tmp_path: Path) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        await target.put("packs/name", DATA)
        mirror.fail("EIO")
        for operation in _operations(target):
            with pytest.raises(Unavailable, match="Input/output error"):
                await operation()
        assert (target.state, target.detail) == ("suspect", "Input/output error")
        for state in ("suspect", "down"):
            await target.probe(target.identity)
            assert target.state == state
        for operation in _operations(target):
            with pytest.raises(Unavailable, match="is down: Input/output error"):
                await operation()
        mirror.work()
        await target.probe(target.identity)
        assert (target.state, target.detail) == ("up", "")
        assert await target.read("packs/name", 0, len(DATA)) == DATA


async def test_a_hanging_target_costs_one_deadline_and_few_threads(tmp_path: Path) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        await target.put("packs/name", DATA)
        hang(mirror, target)
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await trio.sleep(0.01)
                beats += 1

        async def refused(operation: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(Unavailable):
                await operation()

        with trio.fail_after(DEADLINE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(beat)
                async with trio.open_nursery() as callers:
                    for operation in _operations(target) * 12:
                        callers.start_soon(refused, operation)
                nursery.cancel_scope.cancel()
        assert beats > 3  # the loop went on
        assert state(target) == "suspect"
        assert target._patience.outstanding_count <= 16 + 4
        await recover(mirror, target)
        assert state(target) == "up"
        assert await target.read("packs/name", 0, len(DATA)) == DATA
    assert not descriptors(mirror.path)


async def test_probes_of_a_hanging_target_are_bounded_and_it_goes_down(tmp_path: Path) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        hang(mirror, target)
        for _ in range(20):
            await target.probe(target.identity)
        assert (target.state, target.detail) == ("down", "does not answer")
        assert target._patience.outstanding_count <= 8
        await recover(mirror, target)
        assert state(target) == "up"


async def test_slow_is_not_dead(tmp_path: Path) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        await target.put("packs/name", DATA)
        mirror.fail("hang")
        left = 0
        async with trio.open_nursery() as nursery:
            for _ in range(30):  # hedges that lost, readers that left

                async def leave() -> None:
                    nonlocal left
                    with trio.move_on_after(0.05):
                        await target.read("packs/name", 0, 10)
                    left += 1

                nursery.start_soon(leave)
        assert left == 30
        assert (target.state, target.errors_count) == ("up", 0)
        mirror.work()
        assert await target.read("packs/name", 0, 10) == DATA[:10]


async def test_a_draft_on_a_target_that_hangs_is_abandoned_without_waiting(tmp_path: Path) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        hung, idle = await target.begin(), await target.begin()
        hang(mirror, target)
        buffer = bytearray(DATA)
        with pytest.raises(Unavailable, match="did not answer"):
            await hung.append([buffer])
        began = time.monotonic()
        await hung.abandon()
        await idle.abandon()
        assert time.monotonic() - began < 0.5
        with pytest.raises(Unavailable, match="given up"):
            await hung.commit("packs/name")
        await recover(mirror, target)  # what was left behind is cleaned up as soon as it is up
        await until(lambda: os.listdir(mirror.source / DRAFTS) == [] and not descriptors(mirror.path))
        assert await target.names("packs") == []


async def test_a_commit_that_was_given_up_does_not_happen_later(tmp_path: Path) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        draft = await target.begin()
        await draft.append([DATA])
        hang(mirror, target)
        with pytest.raises(Unavailable, match="did not answer"):
            await draft.commit("packs/name")
        await recover(mirror, target)
        assert await target.names("packs") == []
        assert os.listdir(mirror.source / DRAFTS) == []


@pytest.mark.parametrize("fault", ["EROFS", "EACCES"])
async def test_a_read_only_target_can_be_read(tmp_path: Path, fault: str) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        await target.put("packs/name", DATA)
        mirror.fail(fault)
        with pytest.raises(Unavailable):
            await target.put("packs/other", b"data")
        with pytest.raises(Unavailable, match="cannot be written"):
            await target.begin()
        assert (target.state, target.is_writable) == ("suspect", False)
        for _ in range(3):
            await target.probe(target.identity)
            assert (target.state, target.is_writable) == ("suspect", False)
            assert await target.read("packs/name", 0, len(DATA)) == DATA
        mirror.work()
        await target.probe(target.identity)
        assert (target.state, target.is_writable) == ("up", True)


async def test_a_file_system_that_is_remounted_read_only_can_be_read(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "target", 16 << 20) as point:
        target = await opened(point)
        await target.put("packs/name", DATA)
        run("mount", "-o", "remount,ro", point)
        with pytest.raises(Unavailable, match="Read-only"):
            await target.begin()
        await target.probe(target.identity)
        assert (target.state, target.is_writable, target.detail) == ("suspect", False, "not writable: Read-only file system")
        assert await target.read("packs/name", 0, len(DATA)) == DATA
        run("mount", "-o", "remount,rw", point)
        await target.probe(target.identity)
        assert (target.state, target.is_writable) == ("up", True)
        await target.put("packs/name", b"new")


async def test_a_full_file_system_is_full_until_there_is_space(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "target", 16 << 20) as point:
        target = await opened(point)
        await target.put("packs/name", DATA)
        draft = await target.begin()
        await draft.append([DATA])
        fill_up(point)
        with pytest.raises(TargetFull):
            await draft.append([DATA] * 100)
        assert (target.state, target.is_full) == ("up", True)
        with pytest.raises(TargetFull, match="is full"):
            await target.begin()
        assert os.listdir(point / DRAFTS) == []
        await target.probe(target.identity)
        assert target.is_full
        assert await target.read("packs/name", 0, len(DATA)) == DATA
        (point / "ballast").unlink()
        await target.probe(target.identity)
        assert (target.is_full, target.detail) == (False, "")
        await (await target.begin()).abandon()


async def test_a_disk_that_is_gone(tmp_path: Path) -> None:
    """Unmounted under way: what lies beneath is never written to, and says nothing of what the target holds."""
    with ext4(tmp_path / "image", tmp_path / "target", 16 << 20) as point:
        target = await opened(point)
        await target.put("packs/name", DATA)
        draft = await target.begin()
        run("umount", "-l", point)
        before = os.listdir(point)
        with pytest.raises(Unavailable, match=MARKER) as caught:
            await target.read("packs/name", 0, 1)
        assert "mounted?" in caught.value.line
        assert state(target) == "down"
        target.health.wish_probe(time.monotonic())
        await target.probe(target.identity)
        assert (state(target), os.listdir(point)) == ("down", before)
        assert "not mounted" in target.detail
        await draft.abandon()
        run("mount", "-o", "loop", tmp_path / "image", point)
        await target.probe(target.identity)
        assert state(target) == "up"
        assert await target.read("packs/name", 0, len(DATA)) == DATA


async def test_nothing_but_not_held_without_a_marker_is_believed(target: Target) -> None:
    """A directory without a marker is no target, so that nothing is missing in it."""
    await target.put("packs/name", DATA)
    os.rename(target.path, target.path + "-away")
    os.mkdir(target.path)
    operations: list[Callable[[], Awaitable[object]]] = [
        lambda: target.read("packs/name", 0, 1),
        lambda: target.names("packs"),
        lambda: target.put("packs/other", b"x"),
        lambda: target.begin(),
        lambda: target.remove("packs/name"),
        lambda: target.filesystem(),
    ]
    for operation in operations:
        with pytest.raises(Unavailable):
            await operation()
        assert state(target) == "down"
        target.health.state = "up"
    assert os.listdir(target.path) == []


async def test_a_new_mount_is_tried_although_all_threads_hang_in_the_old_one(tmp_path: Path) -> None:
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        hang(mirror, target)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(Unavailable):
                    await target.read("packs/name", 0, 1)

            for _ in range(12):
                nursery.start_soon(read)
        later = time.monotonic() + 1000
        for _ in range(4):
            target.health.wish_probe(later)
            target.health.probe_at = 0.0
            assert not target.probe_due()
        assert state(target) == "down"
        target.deadlines = Deadlines()
        with mirrored_again(mirror):
            target.health.probe_at = 0.0
            assert target.probe_due()
            await target.probe(target.identity)
            assert state(target) == "up"
        mirror.work()


@contextmanager
def mirrored_again(mirror: Mirrored) -> Iterator[None]:
    """Something else over it: the same files, bound there."""
    run("mount", "--bind", mirror.source, mirror.path)
    try:
        yield
    finally:
        run("umount", mirror.path)


async def test_usage_is_that_of_the_file_system(target: Target) -> None:
    about = os.statvfs(target.path)
    usage = await target.filesystem()
    assert usage.total_bytes == about.f_blocks * about.f_frsize
    assert 0 < usage.free_bytes < usage.total_bytes
    assert target.usage == usage


async def test_probes_know_the_target_by_its_marker(target: Target) -> None:
    found = probe(target.path, None, may_write=True)
    assert target.identity is not None
    assert found.identity == target.identity
    assert (found.was_marked, found.writing) == (False, "done")
    assert isinstance(found.usage, Usage)


class Worker:
    """Writes files of random content by random ways, and remembers which of them it was told are durable."""

    def __init__(self, target: Target, number: int) -> None:
        self.target = target
        self.number = number
        self.rng = random.Random(number)
        self.durable: dict[str, bytes] = {}
        self.attempts_count = 0

    async def work(self) -> None:
        while True:
            with trio.move_on_after(self.rng.choice((0.01, 0.05, 10.0))):
                with suppress(Unavailable, TargetFull):
                    await self._one()
            await trio.lowlevel.checkpoint()

    async def _one(self) -> None:
        self.attempts_count += 1
        name = f"shards/{self.rng.randrange(16):03x}/{self.number}.{self.attempts_count}"
        data = self.rng.randbytes(self.rng.randint(1, 50_000))
        if self.rng.random() < 0.3:
            await self.target.put(name, data)
        elif self.durable and self.rng.random() < 0.5:
            known, expected = self.rng.choice(list(self.durable.items()))
            assert await self.target.read(known, 0, len(expected)) == expected
            return
        else:
            draft = await self.target.begin()
            await draft.append([data[:1000], data[1000:]])
            if self.rng.random() < 0.2:
                await draft.abandon()
                return
            await draft.commit(name)
        self.durable[name] = data


async def _until_more(count: Callable[[], int], wanted_count: int, target: Target) -> None:
    aim = count() + wanted_count
    while count() < aim:
        await target.probe(target.identity)
        await trio.sleep(0.01)


async def test_whatever_fails_what_was_committed_is_there_and_every_descriptor_is_closed(tmp_path: Path) -> None:
    rng = random.Random(21)
    with _mirror(tmp_path) as mirror:
        target = await opened(mirror.path)
        workers = [Worker(target, number) for number in range(6)]
        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(worker.work)
            for fault in rng.choices(["EIO", "hang", "ENOSPC", "EROFS", "EACCES"], k=12):
                target.deadlines = Deadlines()
                with trio.fail_after(DEADLINE_SECONDS):
                    await _until_more(lambda: sum(len(worker.durable) for worker in workers), 3, target)
                target.deadlines = SHORT
                mirror.fail(fault)
                with trio.move_on_after(0.2):  # enough attempts, or all of them hang
                    await _until_more(lambda: sum(worker.attempts_count for worker in workers), rng.randint(1, 40), target)
                mirror.work()
            nursery.cancel_scope.cancel()
        await recover(mirror, target)
        assert state(target) == "up"
        await until(lambda: not descriptors(mirror.path))
        for worker in workers:
            for name, data in worker.durable.items():
                assert await target.read_whole(name, 1 << 20) == data
