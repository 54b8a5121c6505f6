"""The store fails, the network fails, the daemon dies: bounded waits, the right errno, hot data served, and an end to it."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from tests.fuse.bucket import Bucket, new_bucket
from tests.fuse.mount import Mount, Mounting, is_mounted
from tests.servers.moto import Moto
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy, Seen
from tests.servers.scripted import error_reply

MIB = 1 << 20
DEADLINE_SECONDS = 2.0
PATIENT = {"cold": {"deadline": f"{DEADLINE_SECONDS:g}s"}, "policy": {"read_ahead": "8MiB"}}


def errno_of(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def drop_pages(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def filled(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> tuple[Mount, bytes]:
    body = random.Random(7).randbytes(5 * MIB)
    for key in ("dir/hot", "dir/cold", "dir/cold2", "other/unknown"):
        bucket.put(key, body)
    mount = mounting(bucket, via=proxy, settings=PATIENT)
    assert sorted(os.listdir(mount.root / "dir")) == ["cold", "cold2", "hot"]
    assert (mount.root / "dir/hot").read_bytes() == body
    wait_until(lambda: os.getxattr(mount.root / "dir/hot", "user.tiercache.residency") == b"hot,cold", "a hot copy")
    return mount, body


def test_case_10_with_the_server_gone_hot_files_read_and_cold_ones_fail_in_time(
    bucket: Bucket, proxy: Proxy, mounting: Mounting
) -> None:
    mount, body = filled(bucket, proxy, mounting)
    proxy.stop()
    drop_pages(mount.root / "dir/hot")
    with bounded(2.0):
        assert (mount.root / "dir/hot").read_bytes() == body
        assert sorted(os.listdir(mount.root / "dir")) == ["cold", "cold2", "hot"]
    with bounded(DEADLINE_SECONDS + 2.0):
        assert errno_of((mount.root / "dir/cold").read_bytes) == "EIO"
    with bounded(DEADLINE_SECONDS + 2.0):
        assert errno_of((mount.root / "other/unknown").stat) == "EIO"
    assert mount.status()["tiers"]["cold"]["state"] == "down"
    proxy.start()
    for key in ("dir/cold", "dir/hot", "other/unknown"):
        assert (mount.root / key).read_bytes() == body
    assert mount.status()["tiers"]["cold"]["state"] == "ok"


def test_case_10_a_server_that_accepts_and_says_nothing_is_a_bounded_wait(
    bucket: Bucket, proxy: Proxy, mounting: Mounting
) -> None:
    mount, body = filled(bucket, proxy, mounting)
    released = threading.Event()

    def wait(_: Seen) -> None:
        released.wait(60)

    proxy.before = wait
    try:
        with bounded(DEADLINE_SECONDS + 2.0):
            assert errno_of((mount.root / "dir/cold").read_bytes) == "EIO"
        drop_pages(mount.root / "dir/hot")
        waiting = threading.Thread(target=lambda: errno_of((mount.root / "dir/cold2").read_bytes))
        waiting.start()
        with bounded(2.0):
            assert (mount.root / "dir/hot").read_bytes() == body  # while another reader waits
            assert (mount.root / "dir/cold2").stat().st_size == len(body)
        waiting.join()
    finally:
        released.set()
    assert (mount.root / "dir/cold").read_bytes() == body


def test_case_11_slowdown_backs_off_and_is_never_an_error_to_the_reader(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    body = random.Random(11).randbytes(MIB)
    bucket.put("file", body)
    mount = mounting(bucket, via=proxy, settings={"cold": {"deadline": "20s"}})
    asked_at: list[float] = []
    refusals = [error_reply(503, "SlowDown", {"retry-after": "1"}).raw, error_reply(429, "TooManyRequests").raw]
    refusals += [error_reply(500, "InternalError").raw, b""]

    def refuse(seen: Seen) -> bytes | None:
        if seen.is_list:
            return None
        asked_at.append(time.monotonic())
        return refusals.pop(0) if refusals else None

    proxy.intercept = refuse
    assert (mount.root / "file").read_bytes() == body
    assert len(asked_at) == 5
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    assert gaps[0] >= 1.0, "Retry-After is obeyed"
    assert min(gaps[1:3]) > 0.01, "no immediate retry"


def test_case_11_a_throttled_lookup_is_retried_and_not_taken_for_absence(
    bucket: Bucket, proxy: Proxy, mounting: Mounting
) -> None:
    bucket.put("dir/file", b"content")
    mount = mounting(bucket, via=proxy)
    refusals = [error_reply(503, "SlowDown").raw] * 2
    proxy.intercept = lambda seen: refusals.pop() if refusals and seen.is_list else None
    assert (mount.root / "dir/file").read_bytes() == b"content"
    assert refusals == []


def test_broken_connections_are_resumed_where_they_broke(bucket: Bucket, proxy: Proxy, mounting: Mounting) -> None:
    body = random.Random(12).randbytes(40 * MIB)
    bucket.put("file", body)
    mount = mounting(bucket, via=proxy)
    proxy.cut_after_bytes = 3 * MIB
    with proxy.recording() as seen:
        assert (mount.root / "file").read_bytes() == body
    assert len(body) <= seen.object_bytes <= len(body) * 1.2


def test_case_13_a_dead_daemon_is_healed_by_the_next_mount(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket)
    assert (mount.root / "file").read_bytes() == b"content"
    with open(mount.root / "file", "rb"):  # somebody still holds a file of the dead mount
        mount.kill()
        assert errno_of(lambda: os.statvfs(mount.root)) in ("ENOTCONN", "ECONNABORTED")
        mount.start()
        assert (mount.root / "file").read_bytes() == b"content"
    assert sum(str(mount.point) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()) == 1


def test_case_13_mount_and_umount_are_idempotent(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket)
    again = mount.mount()
    assert (again.code, again.json["already_mounted"], again.json["status"]["pid"]) == (0, True, mount.pid)
    mount.umount()
    assert not is_mounted(mount.point)
    ran = mount.tiercache("umount", mount.point, "--json")
    assert (ran.code, ran.json["was_mounted"]) == (0, False)
    mount.start()
    mount.kill()
    ran = mount.tiercache("umount", mount.point, "--json")
    assert (ran.code, ran.json["was_mounted"], ran.json["healed"]) == (0, True, True)
    assert not is_mounted(mount.point)


def test_a_mount_in_use_is_not_taken_away(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket)
    with open(mount.root / "file", "rb") as file:
        ran = mount.tiercache("umount", mount.point)
        assert ran.code == 1
        assert "in use" in ran.err
        assert f"pid {os.getpid()}" in ran.err
        assert file.read() == b"content"
    mount.umount()


def test_two_mounts_at_once_do_not_disturb_each_other(bucket: Bucket, mounting: Mounting) -> None:
    body = random.Random(2).randbytes(3 * MIB)
    bucket.put("file", body)
    first, second = mounting(bucket), mounting(bucket)
    for mount in (first, second, first):
        assert (mount.root / "file").read_bytes() == body
    first.kill()
    assert (second.root / "file").read_bytes() == body
    first.start()  # the kernel still remembers the attributes of the dead mount: it must be healed all the same
    second.umount()
    assert (first.root / "file").read_bytes() == body


def test_case_17_an_archived_object_says_restore_and_reads_once_restored(moto: Moto, mounting: Mounting) -> None:
    bucket = new_bucket(moto)
    moto.put(bucket.name, "deep", b"frozen", StorageClass="GLACIER")
    bucket.put("warm", b"thawed")
    mount = mounting(bucket)
    assert sorted(os.listdir(mount.root)) == ["deep", "warm"]
    assert (mount.root / "deep").stat().st_size == 6
    assert errno_of((mount.root / "deep").read_bytes) == "EREMOTEIO"
    assert (mount.root / "warm").read_bytes() == b"thawed"
    moto.client.restore_object(Bucket=bucket.name, Key="deep", RestoreRequest={"Days": 1})
    ran = mount.tiercache("refresh", mount.root)
    assert ran.code == 0, ran.err
    assert (mount.root / "deep").read_bytes() == b"frozen"
