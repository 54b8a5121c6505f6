from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.tiers.stalling import stalling
from tiercache.core.backoff import Backoff
from tiercache.core.record import ObjectRef, object_id
from tiercache.errors import NotHeld, Unavailable
from tiercache.tiers.cold.directory import version_tag
from tiercache.tiers.tier import MemorySink, SinkClosed
from tiercache.tiers.warm.patience import Patience
from tiercache.tiers.warm.replica import Replica
from tiercache.tiers.warm.verify import HasMd5, HasMtime, Verdicts, proof_of

DATA = random.Random(2).randbytes(3_000_000)
MTIME = 1_600_000_000
DEADLINE_SECONDS = 10.0


def _ref(key: str, data: bytes, *, version: str | None = None, mtime_seconds: int = MTIME) -> ObjectRef:
    etag = version if version is not None else f"{hashlib.md5(data).hexdigest()}:{len(data)}"
    return ObjectRef("data", key, etag, len(data), mtime_seconds, object_id("source", key, etag))


async def _read(replica: Replica, ref: ObjectRef, offset: int = 0, length: int | None = None) -> bytes:
    wanted = ref.size_bytes - offset if length is None else length
    sink = MemorySink(wanted)
    await replica.read(ref, offset, wanted, sink)
    return bytes(sink.view)


async def _refused(replica: Replica, ref: ObjectRef, reason: str) -> None:
    before = replica.ignored[reason]
    sink = MemorySink(ref.size_bytes)
    with pytest.raises(NotHeld, match=reason):
        await replica.read(ref, 0, ref.size_bytes, sink)
    assert replica.ignored[reason] == before + 1
    assert sink.received_bytes == 0


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - threads and processes make it true
            await trio.sleep(0.005)


@pytest.fixture
async def replica(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Replica]:
    (tmp_path / "copy" / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(DATA)
    (tmp_path / "copy" / "sub" / "file").write_bytes(DATA)
    made = Replica(tmp_path / "copy", "pre/", nursery=nursery)
    yield made
    await made.aclose()


REF = _ref("pre/sub/file", DATA)


async def test_verified_file_is_read_at_any_offset(replica: Replica) -> None:
    assert await _read(replica, REF) == DATA
    rng = random.Random(3)
    for _ in range(20):
        offset = rng.randrange(len(DATA))
        length = rng.randint(1, len(DATA) - offset)
        assert await _read(replica, REF, offset, length) == DATA[offset : offset + length]
    assert await replica.holds(REF)
    assert not replica.ignored


async def test_same_size_but_other_content_is_never_used(replica: Replica) -> None:
    other = _ref("pre/sub/file", DATA[:-1] + b"?")
    for _ in range(3):
        await _refused(replica, other, "differs")
    assert not await replica.holds(other)


async def test_other_size_or_absent_is_not_held(replica: Replica) -> None:
    await _refused(replica, _ref("pre/sub/file", DATA[:-1]), "size")
    await _refused(replica, _ref("pre/sub/none", DATA), "missing")
    await _refused(replica, _ref("pre/sub/file/below", DATA), "missing")
    await _refused(replica, _ref("pre/sub", DATA), "irregular")


@pytest.mark.parametrize(
    "key", ["pre/../secret", "pre//sub/file", "pre/sub//file", "pre/./sub/file", "pre/", "pre/sub/file/", "pre/\0", "other/file",
            "pre/" + "x" * 300]
)  # fmt: skip
async def test_case_15_odd_keys_never_leave_the_directory(replica: Replica, key: str) -> None:
    await _refused(replica, _ref(key, DATA), "outside")


async def test_links_out_of_the_directory_are_not_followed(replica: Replica, tmp_path: Path) -> None:
    links = {"out": "../secret", "absolute": str(tmp_path / "secret"), "loop": "loop", "inside": "sub/file", "directory": ".."}
    for name, target in links.items():
        os.symlink(target, tmp_path / "copy" / name)
    for name in ("out", "absolute", "loop"):
        await _refused(replica, _ref(f"pre/{name}", DATA), "outside")
    await _refused(replica, _ref("pre/directory/secret", DATA), "missing")
    assert await _read(replica, _ref("pre/inside", DATA)) == DATA


async def test_pipe_does_not_hang(replica: Replica, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "copy" / "pipe")
    with trio.fail_after(DEADLINE_SECONDS):
        await _refused(replica, _ref("pre/pipe", DATA), "irregular")


async def test_multipart_etag_proves_nothing_unless_the_operator_trusts_times(
    replica: Replica, tmp_path: Path, nursery: trio.Nursery
) -> None:
    version = f"{'a' * 32}-3:{len(DATA)}"
    multipart = _ref("pre/sub/file", DATA, version=version)
    await _refused(replica, multipart, "unverifiable")
    trusting = Replica(tmp_path / "copy", "pre/", nursery=nursery, trust="mtime")
    await _refused(trusting, multipart, "mtime")
    os.utime(tmp_path / "copy" / "sub" / "file", ns=(0, MTIME * 10**9 + 123))
    assert await _read(trusting, multipart) == DATA
    await _refused(trusting, _ref("pre/sub/file", DATA, version=version, mtime_seconds=MTIME + 1), "mtime")


async def test_copy_of_a_directory_is_proved_by_equal_nanoseconds(replica: Replica, tmp_path: Path) -> None:
    path = tmp_path / "copy" / "sub" / "file"
    original = tmp_path / "original"
    original.write_bytes(DATA)
    ref = _ref("pre/sub/file", DATA, version=version_tag(os.stat(original)))
    await _refused(replica, ref, "mtime")
    os.utime(path, ns=(0, os.stat(original).st_mtime_ns))
    assert await _read(replica, ref) == DATA


@pytest.mark.parametrize(
    ("version", "proof"),
    [
        ("0123456789abcdef0123456789abcdef:5", HasMd5("0123456789abcdef0123456789abcdef")),
        ("0123456789abcdef0123456789abcdef-2:5", None),
        ("W/0123456789abcdef0123456789abcde:5", None),
        ("5-100-200", HasMtime(100)),
        ("5--100--200", HasMtime(-100)),
        ("", None),
    ],
)
def test_proof_follows_from_the_version_tag(version: str, proof: HasMd5 | HasMtime | None) -> None:
    assert proof_of(_ref("k", b"12345", version=version)) == proof


async def test_changed_file_is_verified_again(replica: Replica, tmp_path: Path) -> None:
    path = tmp_path / "copy" / "sub" / "file"
    assert await _read(replica, REF) == DATA
    before = os.stat(path)
    path.write_bytes(bytes(len(DATA)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await _refused(replica, REF, "differs")
    path.write_bytes(DATA)
    assert await _read(replica, REF) == DATA


class Meddling(MemorySink):
    def __init__(self, capacity_bytes: int, act: Callable[[], object]) -> None:
        super().__init__(capacity_bytes)
        self._act = act

    def advance(self, count: int) -> None:
        super().advance(count)
        if self.received_bytes == count:
            self._act()


async def test_case_3_change_during_a_read_never_gives_a_mixture(replica: Replica, tmp_path: Path) -> None:
    path = tmp_path / "copy" / "sub" / "file"
    sink = Meddling(len(DATA), lambda: path.write_bytes(bytes(len(DATA))))
    with pytest.raises(NotHeld, match="changed"):
        await replica.read(REF, 0, len(DATA), sink)
    assert 0 < sink.received_bytes < len(DATA)
    assert bytes(sink.view) == DATA[: sink.received_bytes]


async def test_large_files_are_verified_in_the_background_one_at_a_time(tmp_path: Path, nursery: trio.Nursery) -> None:
    refs = [_ref(f"file{number}", DATA) for number in range(5)]
    for ref in refs:
        (tmp_path / ref.key).write_bytes(DATA)
    replica = Replica(tmp_path, "", nursery=nursery, inline_bytes=1000)
    served: set[str] = set()

    async def read_until_served(ref: ObjectRef) -> None:
        while ref.key not in served:
            assert len(nursery.child_tasks) <= 1
            try:
                assert await _read(replica, ref) == DATA
                served.add(ref.key)
            except NotHeld:
                await trio.lowlevel.checkpoint()

    await _refused(replica, refs[0], "verifying")
    with trio.fail_after(DEADLINE_SECONDS):
        async with trio.open_nursery() as readers:
            for ref in refs:
                readers.start_soon(read_until_served, ref)
    assert len(served) == 5
    assert set(replica.ignored) == {"verifying"}
    assert all([await replica.holds(ref) for ref in refs])


async def test_background_verification_survives_the_files_disappearance(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "a"
    path.write_bytes(DATA)
    replica = Replica(tmp_path, "", nursery=nursery, inline_bytes=1000)
    await _refused(replica, _ref("a", DATA), "verifying")
    os.truncate(path, 0)
    await _until(lambda: not nursery.child_tasks)
    await _refused(replica, _ref("a", DATA), "size")


async def test_verdicts_are_bounded_and_can_be_kept(replica: Replica) -> None:
    kept = []
    verdicts = Verdicts(2, lambda *verdict: kept.append(verdict))
    identity = (1, 2, 3, 4, 5)
    refs = [_ref(f"k{number}", b"x") for number in range(3)]
    for ref in refs:
        verdicts.put(ref.object_id, identity, True)
    assert [verdicts.get(ref.object_id, identity) for ref in refs] == [None, True, True]
    assert verdicts.get(refs[2].object_id, (1, 2, 3, 4, 6)) is None
    again = Verdicts(10)
    for object_identity, file_identity, trusted in kept:
        again.restore(object_identity, file_identity, trusted)
    assert again.get(refs[0].object_id, identity) is True


async def test_missing_directory_is_unavailable(tmp_path: Path, nursery: trio.Nursery) -> None:
    replica = Replica(tmp_path / "nowhere", "", nursery=nursery)
    with pytest.raises(Unavailable, match="nowhere"):
        await _read(replica, _ref("a", DATA))


async def test_a_look_at_a_directory_that_hangs_ends(tmp_path: Path) -> None:
    async with _hanging(tmp_path) as (replica, stop, _):
        stop()
        with trio.fail_after(DEADLINE_SECONDS):
            await replica.look()
        assert replica.trouble == "does not answer"


async def test_closed_sink_ends_the_read_quietly(replica: Replica) -> None:
    sink = MemorySink(len(DATA))
    sink.close()
    with pytest.raises(SinkClosed):
        await replica.read(REF, 0, len(DATA), sink)


async def test_closing_is_idempotent_and_final(replica: Replica) -> None:
    await replica.aclose()
    await replica.aclose()
    with pytest.raises(Unavailable, match="closed"):
        await _read(replica, REF)


def _descriptors(under: Path) -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(under))
        except FileNotFoundError:
            continue
    return count


@asynccontextmanager
async def _hanging(tmp_path: Path) -> AsyncIterator[tuple[Replica, Callable[[], None], Callable[[], None]]]:
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    with stalling(mountpoint, {"file": DATA}) as filesystem:
        async with trio.open_nursery() as nursery:
            replica = Replica(
                mountpoint, "", nursery=nursery, open_seconds=0.1, read_seconds=0.2, abandoned_limit=2, rng=random.Random(1)
            )
            try:
                yield replica, filesystem.stop, filesystem.resume
            finally:
                filesystem.resume()
                nursery.cancel_scope.cancel()


async def test_case_9_hung_replica_falls_through_becomes_suspect_and_recovers(tmp_path: Path) -> None:
    ref = _ref("file", DATA)
    async with _hanging(tmp_path) as (replica, stop, resume):
        assert await _read(replica, ref) == DATA
        stop()
        for _ in range(2):
            with trio.fail_after(DEADLINE_SECONDS), pytest.raises(Unavailable, match=r"did not answer within 0\.1 s"):
                await _read(replica, ref)
        assert replica.is_suspect
        began = trio.current_time()
        for _ in range(20):
            await _refused(replica, ref, "suspect")
        assert trio.current_time() - began < 0.1 * 20
        resume()
        await _until(lambda: not replica.is_suspect)
        assert await _read(replica, ref) == DATA
    assert _descriptors(tmp_path) == 0


class Stopping(MemorySink):
    """Stops the filesystem after the first piece; fails if anything writes to it after it was left."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(len(DATA))
        self._stop = stop

    def advance(self, count: int) -> None:
        super().advance(count)
        self._stop()


async def test_case_9_hang_in_the_middle_of_a_read_leaves_a_sink_that_others_may_go_on_with(tmp_path: Path) -> None:
    ref = _ref("file", DATA)
    async with _hanging(tmp_path) as (replica, stop, resume):
        assert await _read(replica, ref, 0, 1) == DATA[:1]
        sink = Stopping(stop)
        with trio.fail_after(DEADLINE_SECONDS), pytest.raises(Unavailable, match=r"did not answer within 0\.2 s"):
            await replica.read(ref, 0, len(DATA), sink)
        received = sink.received_bytes
        assert 0 < received < len(DATA)
        rest = sink.buffer(len(DATA) - received)
        rest[:] = DATA[received:]
        resume()
        with trio.fail_after(DEADLINE_SECONDS):
            assert await _read(replica, ref) == DATA
        assert sink.received_bytes == received
        MemorySink.advance(sink, len(rest))
        assert bytes(sink.view) == DATA


class Blocker:
    """A job that blocks until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self) -> str:
        assert self.go.wait(DEADLINE_SECONDS)
        return "back"


def _patience(clock: Callable[[], float] = trio.current_time) -> Patience:
    policy = Backoff(first_seconds=1.0, ceiling_seconds=8.0, floor_seconds=1.0)
    return Patience("disk", threads_count=4, abandoned_limit=2, policy=policy, rng=random.Random(1), clock=clock)


async def _hang(patience: Patience, blocker: Blocker) -> None:
    with pytest.raises(Unavailable, match="disk did not answer"):
        await patience.run(blocker, 0.01)


async def test_threads_given_up_are_bounded_and_counted() -> None:
    now = 0.0
    patience = _patience(lambda: now)
    blocker = Blocker()
    try:
        for _ in range(2):
            assert not patience.is_suspect
            await _hang(patience, blocker)
        assert patience.is_suspect
        assert not patience.wants_probe  # not before the back-off has passed
        now = 10.0
        assert patience.wants_probe
        await patience.probe(blocker, 0.01)  # hangs as well: one more thread, and a longer wait
        assert (patience.outstanding_count, patience.wants_probe) == (3, False)
        now = 20.0
        await patience.probe(lambda: None, 1.0)
        assert not patience.is_suspect  # on trial
        await _hang(patience, blocker)
        assert patience.is_suspect
        now = 1000.0
        assert (patience.outstanding_count, patience.wants_probe) == (4, False)  # at most twice the limit
    finally:
        blocker.go.set()
    await _until(lambda: patience.outstanding_count == 0)
    assert not patience.is_suspect


async def test_probe_that_fails_is_not_a_recovery() -> None:
    patience = _patience(lambda: 0.0)
    blocker = Blocker()
    try:
        for _ in range(2):
            await _hang(patience, blocker)

        def broken() -> None:
            raise OSError(5, "Input/output error")

        await patience.probe(broken, 1.0)
        assert patience.is_suspect
    finally:
        blocker.go.set()
    await _until(lambda: patience.outstanding_count == 0)


async def test_a_reader_that_leaves_does_not_make_the_disk_suspect_for_good() -> None:
    patience = _patience()
    blocker = Blocker()
    try:
        for _ in range(2):
            with trio.move_on_after(0.01):
                await patience.run(blocker, 5.0)
        assert patience.outstanding_count == 2
    finally:
        blocker.go.set()
    await _until(lambda: not patience.is_suspect)
    assert await patience.run(blocker, 5.0) == "back"


async def test_overload_is_not_taken_for_a_hang() -> None:
    """Calls that queue for a thread longer than their deadline still succeed."""
    patience = _patience()
    done: list[str] = []

    def brief() -> str:
        threading.Event().wait(0.05)
        return "done"

    async def one() -> None:
        done.append(await patience.run(brief, 0.5))

    async with trio.open_nursery() as nursery:
        for _ in range(60):
            nursery.start_soon(one)
    assert len(done) == 60
    assert patience.outstanding_count == 0
