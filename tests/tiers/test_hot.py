import gc
import os
import stat
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers.disks import ext4, fill_up, tmpfs
from tiercache.core.record import ObjectId, object_id
from tiercache.errors import HotFull, HotSick, NotHeld
from tiercache.tiers.hot import (
    HotDirectory,
    HotTier,
    hash_range,
    read,
    read_resident,
)
from tiercache.tiers.sink import FIRST_BUFFER_BYTES, BufferPool, FileSink
from tiercache.tiers.tier import SinkClosed

MIB = 1 << 20
KEY = object_id("store/bucket", "data/train-0001.tar", "etag:1")


def tier_at(path: Path) -> HotTier:
    return HotTier([HotDirectory(0, path)])


@pytest.fixture
def tier(tmp_path: Path) -> HotTier:
    return tier_at(tmp_path)


def file_of(root: Path, name: ObjectId) -> Path:
    return root / "objects" / name.hex()[:2] / name.hex()


def descriptors() -> set[str]:
    gc.collect()
    names = os.listdir("/proc/self/fd")
    return {name for name in names if os.path.lexists(f"/proc/self/fd/{name}")}  # without the one that listed them


def put(sink: FileSink, data: bytes, pieces: list[int] | None = None) -> None:
    """Send `data` as a tier does, at most `pieces[i]` bytes at a time."""
    sizes = iter(pieces or [])
    sent = 0
    while sent < len(data):
        room = sink.buffer(len(data) - sent)
        count = min(len(room), next(sizes, len(room)))
        room[:count] = data[sent : sent + count]
        sink.advance(count)
        sent += count


def create_many(tier: HotTier, count: int) -> None:
    for number in range(count):
        tier.create(object_id("s", str(number), "v"), 1, 0)


def noise(length: int, seed: int = 1) -> bytes:
    block = b"".join(xxhash.xxh3_128_digest(seed.to_bytes(4, "big") + i.to_bytes(4, "big")) for i in range(4096))
    return (block * (length // len(block) + 1))[:length]


# -- files


def test_a_new_file_has_the_objects_size_no_blocks_and_private_modes(tier: HotTier, tmp_path: Path) -> None:
    file = tier.create(KEY, 500 * MIB, 0)
    path = file_of(tmp_path, KEY)
    about = path.stat()
    assert (about.st_size, about.st_blocks) == (500 * MIB, 0)
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert {stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path.parent.parent)} == {0o700}
    assert (file.size_bytes, file.object_id, file.directory, file.path) == (500 * MIB, KEY, 0, str(path))


@pytest.mark.parametrize("size_bytes", [0, 1])
def test_case_16_zero_and_one_byte_objects(tier: HotTier, size_bytes: int) -> None:
    tier.create(KEY, size_bytes, 0)
    file = tier.open(KEY, size_bytes, 0)
    assert read(file, 0, size_bytes) == bytes(size_bytes)
    assert hash_range(file, 0, size_bytes) == xxhash.xxh3_64_intdigest(bytes(size_bytes))


def test_a_leftover_is_replaced_by_a_new_inode(tier: HotTier, tmp_path: Path) -> None:
    old = tier.create(KEY, 4, 0)
    os.pwrite(old.fd, b"old!", 0)
    new = tier.create(KEY, 4, 0)
    os.pwrite(old.fd, b"late", 0)
    assert read(new, 0, 4) == bytes(4)
    assert file_of(tmp_path, KEY).stat().st_ino == os.fstat(new.fd).st_ino != os.fstat(old.fd).st_ino


def test_a_symbolic_link_is_neither_followed_nor_written_through(tier: HotTier, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    path = file_of(tmp_path, KEY)
    path.parent.mkdir()
    path.symlink_to(precious)
    with pytest.raises(NotHeld):
        tier.open(KEY, 4, 0)
    file = tier.create(KEY, 4, 0)
    os.pwrite(file.fd, b"ours", 0)
    assert precious.read_bytes() == b"mine"


def test_open_finds_only_a_file_of_the_right_size(tier: HotTier, tmp_path: Path) -> None:
    with pytest.raises(NotHeld, match="missing"):
        tier.open(KEY, 5, 0)
    tier.create(KEY, 5, 0)
    assert tier.open(KEY, 5, 0).size_bytes == 5
    with pytest.raises(NotHeld, match="has 5 bytes instead of 6"):
        tier.open(KEY, 6, 0)
    tier.unlink(KEY, 0)
    os.mkfifo(file_of(tmp_path, KEY))
    with pytest.raises(NotHeld):
        tier.open(KEY, 0, 0)


def test_unlink_removes_the_name_and_readers_keep_their_bytes(tier: HotTier) -> None:
    file = tier.create(KEY, 3, 0)
    os.pwrite(file.fd, b"abc", 0)
    tier.unlink(KEY, 0)
    tier.unlink(KEY, 0)
    with pytest.raises(NotHeld):
        tier.open(KEY, 3, 0)
    assert read(file, 0, 3) == b"abc"


def test_the_descriptor_lives_as_long_as_the_last_reference(tier: HotTier) -> None:
    file = tier.create(KEY, 3, 0)
    before = descriptors()
    inside, leave = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def abandoned(held: object) -> None:
        inside.set()
        leave.wait(10)
        seen.append(read(held, 0, 3))  # type: ignore[arg-type]

    thread = threading.Thread(target=abandoned, args=(file,))
    thread.start()
    inside.wait(10)
    fd = str(file.fd)
    del file
    gc.collect()
    assert fd in descriptors()
    leave.set()
    thread.join(10)
    del thread
    gc.collect()
    assert seen == [bytes(3)]
    assert descriptors() == before - {fd}


def test_files_and_tier_leave_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    tier = tier_at(tmp_path)
    files = [tier.create(object_id("s", str(n), "v"), 10, 0) for n in range(20)]
    assert len(list(tier.walk(0))) == 20
    with pytest.raises(NotHeld):
        tier.open(KEY, 1, 0)
    assert len(descriptors()) == len(before) + 21
    del files, tier
    gc.collect()
    assert descriptors() == before


def test_walk_tells_every_object_and_nothing_else(tier: HotTier, tmp_path: Path) -> None:
    wanted = {}
    for number in range(300):
        name = object_id("s", str(number), "v")
        file = tier.create(name, number * 1000, 0)
        os.pwrite(file.fd, b"x" * min(number, 1), 0)
        wanted[name] = (number * 1000 or min(number, 1), os.fstat(file.fd).st_blocks * 512)
    objects = tmp_path / "objects"
    (objects / "zz").mkdir()
    (objects / "ab").mkdir(exist_ok=True)
    (objects / "zz" / ("z" * 40)).touch()
    (objects / "ab" / ("ab" + "F" * 38)).touch()
    (objects / "ab" / "short").touch()
    (objects / "stray").touch()
    assert {name: (size, held) for name, size, held in tier.walk(0)} == wanted


def test_walk_survives_evictions_under_it(tier: HotTier) -> None:
    names = [object_id("s", str(number), "v") for number in range(50)]
    for name in names:
        tier.create(name, 1, 0)
    walk = tier.walk(0)
    first = next(walk)[0]
    for name in names:
        tier.unlink(name, 0)
    assert first in names
    assert {name for name, _, _ in walk} <= set(names)


def test_two_directories_are_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tier = HotTier([HotDirectory(0, tmp_path / "a"), HotDirectory(1, tmp_path / "b")])
    tier.create(KEY, 7, 1)
    with pytest.raises(NotHeld):
        tier.open(KEY, 7, 0)
    assert tier.open(KEY, 7, 1).directory == 1
    for position in (0, 1):
        tier.syncfs(position)
        found = tier.filesystem(position)
        assert 0 < found.free_bytes <= found.total_bytes


# -- sinks


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, 300_000),
    length=st.integers(1, 700_000),
    pieces=st.lists(st.integers(0, 300_000), max_size=20),
    buffer_bytes=st.sampled_from([1, 4096, 65536, MIB]),
)
def test_a_sink_puts_every_byte_in_its_place(
    tier: HotTier, offset: int, length: int, pieces: list[int], buffer_bytes: int
) -> None:
    length = min(length, 200 * buffer_bytes)
    file = tier.create(KEY, 1_000_000, 0)
    progress: list[int] = []
    sink = FileSink(file, offset, length, on_progress=progress.append, pool=BufferPool(buffer_bytes))
    data = noise(length)
    put(sink, data, pieces)
    assert read(file, 0, 1_000_000) == bytes(offset) + data + bytes(1_000_000 - offset - length)
    assert sink.digest == xxhash.xxh3_64_intdigest(data) == hash_range(file, offset, length)
    assert sink.received_bytes == length == progress[-1]
    assert progress == sorted(progress)


def test_short_writes_are_carried_on(tier: HotTier, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tier.create(KEY, 5000, 0)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:999], offset))
    put(FileSink(file, 0, 5000), noise(5000))
    assert read(file, 0, 5000) == noise(5000)


def test_what_is_received_can_be_read_when_progress_is_told(tier: HotTier) -> None:
    file = tier.create(KEY, MIB, 0)
    data = noise(MIB)
    seen: list[bytes] = []
    sink = FileSink(file, 0, MIB, on_progress=lambda count: seen.append(read(file, 0, count)))
    put(sink, data, [1000, 100_000])
    assert len(seen) > 3
    assert all(data.startswith(each) for each in seen)


def test_the_first_buffer_is_small_and_the_next_ones_grow(tier: HotTier) -> None:
    sink = FileSink(tier.create(KEY, 10 * MIB, 0), 0, 10 * MIB)
    lent = []
    for _ in range(6):
        view = sink.buffer(10 * MIB)
        lent.append(len(view))
        sink.advance(len(view))
    assert lent == [FIRST_BUFFER_BYTES, 2 * FIRST_BUFFER_BYTES, 4 * FIRST_BUFFER_BYTES, MIB, MIB, MIB]


def test_a_closed_sink_refuses_and_keeps_what_it_has(tier: HotTier) -> None:
    file = tier.create(KEY, 10, 0)
    sink = FileSink(file, 0, 10)
    put(sink, b"abcd")
    view = sink.buffer(6)
    closer = threading.Thread(target=lambda: (sink.close(), sink.close()))
    closer.start()
    closer.join(10)
    view[:2] = b"ef"
    with pytest.raises(SinkClosed):
        sink.advance(2)
    with pytest.raises(SinkClosed):
        sink.buffer(1)
    assert sink.received_bytes == 4
    assert read(file, 0, 10) == b"abcd" + bytes(6)


def test_memory_of_an_abandoned_loan_is_never_lent_again(tier: HotTier) -> None:
    pool = BufferPool(4096)
    file = tier.create(KEY, 10_000, 0)
    sink = FileSink(file, 0, 10, pool=pool)
    abandoned = sink.buffer(10)
    sink.close()
    del sink
    gc.collect()
    other = FileSink(file, 100, 10, pool=pool)
    view = other.buffer(10)
    view[:] = b"0123456789"
    abandoned[:] = b"garbage!!!"
    other.advance(10)
    assert read(file, 100, 10) == b"0123456789"


def test_a_view_is_dead_after_its_advance(tier: HotTier) -> None:
    sink = FileSink(tier.create(KEY, 10, 0), 0, 10)
    view = sink.buffer(5)
    sink.advance(5)
    with pytest.raises(ValueError, match="released"):
        view[0] = 1


def test_a_tier_cannot_send_more_than_was_asked_for(tier: HotTier) -> None:
    sink = FileSink(tier.create(KEY, 10, 0), 0, 5)
    put(sink, b"12345")
    with pytest.raises(AssertionError, match="more bytes than were asked for"):
        sink.buffer(1)


def test_the_pool_reuses_buffers_and_keeps_few() -> None:
    pool = BufferPool(16, idle_count=2)
    taken = [pool.take() for _ in range(5)]
    for memory in taken:
        pool.give(memory)
    again = [pool.take() for _ in range(3)]
    assert [any(one is other for other in taken) for one in again] == [True, True, False]


# -- reading


def test_resident_bytes_are_read_at_once_and_others_are_not(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", 32 * MIB) as disk:
        file = tier_at(disk).create(KEY, 8 * MIB, 0)
        data = noise(8 * MIB)
        put(FileSink(file, 0, 8 * MIB), data)
        assert read_resident(file, 12345, 100_000) == data[12345:112345]
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)
        assert read_resident(file, 4 * MIB, 4096) is None
        assert read(file, 4 * MIB, 4096) == data[4 * MIB : 4 * MIB + 4096]
        assert read_resident(file, 4 * MIB, 4096) == data[4 * MIB : 4 * MIB + 4096]
        del file


def test_resident_read_over_the_end_is_no_answer(tier: HotTier) -> None:
    file = tier.create(KEY, 10, 0)
    assert read_resident(file, 5, 6) is None
    assert read_resident(file, 5, 5) == bytes(5)


def test_case_9_a_file_that_something_truncated_is_sick_not_short(tier: HotTier, tmp_path: Path) -> None:
    file = tier.create(KEY, 3 * MIB, 0)
    os.truncate(file_of(tmp_path, KEY), MIB + 5)
    with pytest.raises(HotSick, match=f"ends at byte {MIB + 5} of {3 * MIB}"):
        read(file, MIB, 10)
    with pytest.raises(HotSick, match=f"ends at byte {MIB + 5}"):
        hash_range(file, 0, 3 * MIB)


def test_hash_range_sees_one_flipped_bit(tier: HotTier) -> None:
    file = tier.create(KEY, 3 * MIB, 0)
    put(FileSink(file, 0, 3 * MIB), noise(3 * MIB))
    before = hash_range(file, MIB, 2 * MIB)
    (byte,) = os.pread(file.fd, 1, 2 * MIB)
    os.pwrite(file.fd, bytes([byte ^ 1]), 2 * MIB)
    assert hash_range(file, MIB, 2 * MIB) != before
    assert hash_range(file, 0, 2 * MIB) == xxhash.xxh3_64_intdigest(noise(2 * MIB))


# -- disks that are full, sick or gone


def test_case_7_a_full_disk_is_hot_full_for_sinks_and_new_files(tmp_path: Path) -> None:
    with ext4(tmp_path / "image", tmp_path / "disk", 16 * MIB) as disk:
        tier = tier_at(disk)
        file = tier.create(KEY, 16 * MIB, 0)
        put(FileSink(file, 0, 65536), noise(65536))
        fill_up(disk)
        sink = FileSink(file, MIB, 8 * MIB)
        with pytest.raises(HotFull, match="No space left on device") as refusal:
            put(sink, noise(8 * MIB))
        assert str(file_of(disk, KEY)) in refusal.value.line
        assert "free space" in refusal.value.hint
        assert sink.received_bytes == 0
        assert read(file, 0, 65536) == noise(65536)
        with pytest.raises(HotFull):
            create_many(tier, 5000)
        del file, sink, tier


def test_case_7_an_object_larger_than_the_file_system_allows_is_hot_full(tier: HotTier, tmp_path: Path) -> None:
    with pytest.raises(HotFull):
        tier.create(KEY, 1 << 62, 0)
    assert not file_of(tmp_path, KEY).exists()


def test_case_9_running_out_of_descriptors_is_overload_not_death(tier: HotTier) -> None:
    import resource

    tier.create(KEY, 1, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(HotFull, match="Too many open files") as refusal:
            tier.open(KEY, 1, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "LimitNOFILE" in refusal.value.hint


def test_case_9_a_lost_write_back_is_told_by_syncfs(tmp_path: Path) -> None:
    with (
        tmpfs(tmp_path / "backing", 12 * MIB) as backing,
        ext4(backing / "image", tmp_path / "disk", 64 * MIB) as disk,
    ):
        tier = tier_at(disk)
        tier.syncfs(0)
        file = tier.create(KEY, 24 * MIB, 0)
        put(FileSink(file, 0, 24 * MIB), noise(24 * MIB))
        with pytest.raises(HotSick, match="did not reach its disk"):
            tier.syncfs(0)
        del file, tier


def test_case_9_a_disk_that_fails_reads_is_hot_sick(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with ext4(image, tmp_path / "disk", 32 * MIB) as disk:
        tier = tier_at(disk)
        file = tier.create(KEY, 8 * MIB, 0)
        put(FileSink(file, 0, 8 * MIB), noise(8 * MIB))
        tier.syncfs(0)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.truncate(image, MIB)
        with pytest.raises(HotSick, match="Input/output error") as refusal:
            read(file, 4 * MIB, 4096)
        assert not isinstance(refusal.value, HotFull)
        with pytest.raises(HotSick, match="Input/output error"):
            hash_range(file, 0, 8 * MIB)
        os.truncate(image, 32 * MIB)
        del file, tier


def test_case_9_a_directory_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("in the way")
    with pytest.raises(HotSick, match=f"cannot open {tmp_path}/objects: Not a directory"):
        HotDirectory(0, tmp_path)


def test_a_cache_disk_that_is_unmounted_under_us_does_not_fill_the_file_system_below(tmp_path: Path) -> None:
    point = tmp_path / "disk"
    with tmpfs(point, 4 * MIB):
        tier = tier_at(point)
    tier.create(KEY, 1, 0)
    assert list(point.iterdir()) == []
