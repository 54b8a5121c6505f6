"""Small cold files: fetched ahead where they are read in order, each once, whoever dies or is in a hurry meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting
from tests.fuse.test_kills import await_all_closed
from tests.fuse.test_successors import another
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy, Seen

COUNT = 300
READERS = 12
WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    rng = random.Random(12)
    return {f"d/{number:05}.bin": rng.randbytes(rng.choice([1, 4000, 20_000, 100_000])) for number in range(COUNT)}


def fill(bucket: Bucket, contents: dict[str, bytes]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: bucket.put(*item), contents.items()))


def read(mount: Mount, name: str) -> bytes:
    return (mount.root / name).read_bytes()


@pytest.mark.parametrize("readers_count", [1, 16])
@pytest.mark.parametrize("read_path", ["auto", "python"])
def test_each_is_fetched_once_and_most_before_they_are_opened(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, contents: dict[str, bytes], readers_count: int, read_path: str
) -> None:
    fill(bucket, contents)
    mount = mounting(bucket, via=proxy, settings={"mount": {"read_path": read_path}})
    names = sorted(os.listdir(mount.root / "d"))
    assert names == sorted(name.removeprefix("d/") for name in contents)
    with proxy.recording() as record, ThreadPoolExecutor(readers_count) as pool:
        found = dict(zip(contents, pool.map(lambda name: read(mount, name), contents), strict=True))
    assert found == contents
    assert len(record.gets) == COUNT
    assert mount.metrics()["tiercache_read_ahead_bytes_total"] > 0.5 * sum(map(len, contents.values()))
    assert mount.status()["datasets"][0]["opens_count"] == COUNT
    with proxy.recording() as again:
        assert {name: read(mount, name) for name in contents} == contents
    assert again.gets == []


def test_a_daemon_that_is_killed_meanwhile_costs_nobody_a_byte(
    bucket: Bucket, mounting: Mounting, contents: dict[str, bytes]
) -> None:
    fill(bucket, contents)
    mount = mounting(bucket)
    wrong: list[str] = []
    done: list[str] = []

    def check(name: str) -> None:
        if read(mount, name) != contents[name]:
            wrong.append(name)
        done.append(name)

    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(check, name) for name in contents]
        for part in (1, 2, 3):
            wait_until(lambda part=part: len(done) >= part * COUNT // 5, "some are read")  # type: ignore[misc]
            pid = mount.pid
            os.kill(pid, signal.SIGKILL)
            another(mount, pid)
        for each in reading:
            each.result()
    assert wrong == []
    assert len(done) == COUNT


def test_a_reader_that_is_killed_while_it_waits_leaves_nothing_open(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, contents: dict[str, bytes]
) -> None:
    fill(bucket, contents)
    mount = mounting(bucket, via=proxy)
    names = sorted(os.listdir(mount.root / "d"))
    waiting, goes_on = threading.Semaphore(0), threading.Event()

    def hold(seen: Seen) -> None:
        if not seen.is_list:
            waiting.release()
            goes_on.wait(WAIT_SECONDS)

    proxy.before = hold
    readers = [subprocess.Popen(["cat", str(mount.root / "d" / name)], stdout=subprocess.DEVNULL) for name in names[:READERS]]
    for _ in readers:
        assert waiting.acquire(timeout=WAIT_SECONDS)
    for reader in readers:
        reader.kill()
    for reader in readers:
        reader.wait(WAIT_SECONDS)
    goes_on.set()
    assert {name: read(mount, name) for name in contents} == contents
    await_all_closed(mount)
