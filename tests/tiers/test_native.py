"""What only the GETs in C have: places instead of buffers, files that they make, threads that outlive their readers.

Everything that both ways have in common runs in `test_s3*.py` and `test_conformance.py`, on both.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
import xxhash

from tests.servers.process import free_ports
from tests.servers.s3 import S3Account
from tests.servers.scripted import Answer, Asked, reply, running_scripted
from tests.tiers.disks import fill_up, tmpfs
from tests.tiers.s3_tier import open_s3, ref_of
from tests.tiers.stalling import stalling
from tests.tiers.test_hot import file_of, tier_at
from tiercache.core.backoff import Backoff
from tiercache.core.record import Listed, ObjectId
from tiercache.errors import BadResponse, HotFull, HotSick, TierError, Unavailable, VersionChanged
from tiercache.tiers.cold.s3 import S3Cold
from tiercache.tiers.hot import HotFile, hash_range
from tiercache.tiers.retrying import Retrying
from tiercache.tiers.sink import FileSink
from tiercache.tiers.tier import MemorySink, SinkClosed

native = pytest.importorskip("tiercache.tiers.cold.native")

MIB = 1 << 20
SMALL = random.Random(1).randbytes(100_000)
LARGE = random.Random(2).randbytes(3 * MIB + 5)
OID = ObjectId(bytes(range(20)))


@pytest.fixture(autouse=True)
def credentials() -> Iterator[None]:
    with S3Account("", "testkey", "testsecret").in_environment():
        yield


def listed(body: bytes, etag: str = "") -> Listed:
    return Listed("k", f"{etag or hashlib.md5(body).hexdigest()}:{len(body)}", len(body), 0)


def whole(body: bytes, etag: str = "") -> Answer:
    return reply(200, {"etag": f'"{etag or hashlib.md5(body).hexdigest()}"'}, body)


def answering(body: bytes, asked: Asked) -> Answer:
    """As a store does."""
    tag = hashlib.md5(body).hexdigest()
    if "range" not in asked.headers:
        return whole(body)
    first, last = (int(part) for part in asked.headers["range"].removeprefix("bytes=").split("-"))
    shown = {"etag": f'"{tag}"', "content-range": f"bytes {first}-{last}/{len(body)}"}
    return reply(206, shown, body[first : last + 1])


@asynccontextmanager
async def opened(server_url: str, *, threads: int = 4, read_seconds: float = 5.0) -> AsyncIterator[S3Cold]:
    async with open_s3(server_url, threads=trio.CapacityLimiter(threads), read_seconds=read_seconds) as tier:
        assert tier.fetching == "native"
        yield tier


def begun(root: Path, size_bytes: int) -> HotFile:
    return tier_at(root).begin(OID, size_bytes, 0)


async def fill(tier: S3Cold, file: HotFile, what: Listed, offset: int = 0, length: int | None = None) -> FileSink:
    length = what.size_bytes - offset if length is None else length
    sink = FileSink(file, offset, length)
    await tier.read(ref_of(tier, what), offset, length, sink)
    return sink


@pytest.mark.parametrize("body", [SMALL, LARGE, b"x", bytes(MIB), bytes(MIB + 1)], ids=len)
async def test_whole_object_into_a_file_that_is_made(body: bytes, tmp_path: Path) -> None:
    file = begun(tmp_path, len(body))
    with running_scripted(lambda _: whole(body)) as server:
        async with opened(server.endpoint_url) as tier:
            sink = await fill(tier, file, listed(body))
    assert sink.received_bytes == len(body)
    assert sink.digest == xxhash.xxh3_64_intdigest(body)
    path = file_of(tmp_path, OID)
    assert path.read_bytes() == body == os.pread(file.fd, len(body) + 1, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not os.get_inheritable(file.fd)


async def test_leftover_is_replaced_and_never_written(tmp_path: Path) -> None:
    path = file_of(tmp_path, OID)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"leftover")
    old_fd = os.open(path, os.O_RDONLY)
    with running_scripted(lambda _: whole(SMALL)) as server:
        async with opened(server.endpoint_url) as tier:
            await fill(tier, begun(tmp_path, len(SMALL)), listed(SMALL))
    assert os.read(old_fd, 100) == b"leftover"
    os.close(old_fd)
    assert path.read_bytes() == SMALL


async def test_ranges_of_one_new_file_at_once_make_it_once(tmp_path: Path) -> None:
    file = begun(tmp_path, len(LARGE))
    with running_scripted(lambda asked: answering(LARGE, asked)) as server:
        async with opened(server.endpoint_url) as tier, trio.open_nursery() as nursery:
            for offset in range(0, len(LARGE), MIB):
                nursery.start_soon(fill, tier, file, listed(LARGE), offset, min(MIB, len(LARGE) - offset))
    assert file_of(tmp_path, OID).read_bytes() == LARGE


async def test_large_range_is_told_of_as_it_comes(tmp_path: Path) -> None:
    reported: list[int] = []
    file = begun(tmp_path, len(LARGE))

    def check(received_bytes: int) -> None:
        reported.append(received_bytes)
        assert os.pread(file.fd, received_bytes, 0) == LARGE[:received_bytes]

    sink = FileSink(file, 0, len(LARGE), on_progress=check)
    with running_scripted(lambda _: Answer(whole(LARGE).raw[:-1000], "stall")) as server:
        async with opened(server.endpoint_url, read_seconds=0.3) as tier:
            with pytest.raises(Unavailable, match=r"silent for 0\.3 s"):
                await tier.read(ref_of(tier, listed(LARGE)), 0, len(LARGE), sink)
    assert len(reported) > 1
    assert reported == sorted(set(reported))
    assert reported[-1] == sink.received_bytes == len(LARGE) - 1000
    assert sink.digest is None


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=len)
async def test_retry_goes_on_where_the_answer_broke_off(body: bytes, tmp_path: Path) -> None:
    tag = hashlib.md5(body).hexdigest() + "-2"  # no MD5: what came of a small object counts too
    cut = Answer(whole(body, tag).raw[: -len(body) // 2], "close")
    kept = len(body) // 2

    def rest(asked: Asked) -> Answer:
        shown = {"etag": f'"{tag}"', "content-range": f"bytes {kept}-{len(body) - 1}/{len(body)}"}
        assert asked.headers["range"] == f"bytes={kept}-{len(body) - 1}"
        return reply(206, shown, body[kept:])

    answers = [lambda _: cut, rest]
    with running_scripted(lambda asked: answers.pop(0)(asked)) as server:
        async with opened(server.endpoint_url) as tier:
            policy = Backoff(first_seconds=0.001, ceiling_seconds=0.002, floor_seconds=0.0005, deadline_seconds=5.0)
            again = Retrying(tier, policy, rng=random.Random(1), on_retry=lambda *_: None)
            file = begun(tmp_path, len(body))
            sink = FileSink(file, 0, len(body))
            await again.read(ref_of(tier, listed(body, tag)), 0, len(body), sink)
    assert sink.received_bytes == len(body)
    assert sink.digest is None, "nobody has hashed all of it"
    assert hash_range(file, 0, len(body)) == xxhash.xxh3_64_intdigest(body)


@pytest.mark.parametrize(
    ("kind", "answer", "offset"),
    [
        (BadResponse, whole(SMALL[:-1] + b"?", hashlib.md5(SMALL).hexdigest()), 0),
        (VersionChanged, whole(SMALL, "other"), 0),
        (BadResponse, whole(SMALL), 5),
        (Unavailable, Answer(whole(SMALL).raw[:-5], "close"), 0),
    ],
    ids=["wrong md5", "other etag", "range ignored", "cut before its md5"],
)
async def test_bytes_of_a_wrong_answer_never_count(kind: type[TierError], answer: Answer, offset: int, tmp_path: Path) -> None:
    file = begun(tmp_path, len(SMALL))
    sink = FileSink(file, offset, len(SMALL) - offset)
    with running_scripted(lambda _: answer) as server:
        async with opened(server.endpoint_url) as tier:
            with pytest.raises(kind):
                await tier.read(ref_of(tier, listed(SMALL)), offset, len(SMALL) - offset, sink)
    assert sink.received_bytes == 0


async def test_store_that_ignores_ranges_writes_nothing(tmp_path: Path) -> None:
    file = tier_at(tmp_path).create(OID, len(LARGE), 0)
    with running_scripted(lambda _: whole(LARGE)) as server:
        async with opened(server.endpoint_url) as tier:
            with pytest.raises(BadResponse, match="status 200 for a range"):
                await fill(tier, file, listed(LARGE), 5, 2 * MIB)
    assert os.stat(file.fd).st_blocks == 0


async def test_port_without_tls_is_named_in_time() -> None:
    with running_scripted(lambda _: whole(SMALL)) as server:
        async with opened(server.endpoint_url.replace("http:", "https:")) as tier:
            with trio.fail_after(5), pytest.raises(Unavailable, match="does not speak TLS as expected") as caught:
                await tier.read(ref_of(tier, listed(SMALL)), 0, len(SMALL), MemorySink(len(SMALL)))
    assert "write http://" in caught.value.hint


async def test_port_that_nobody_listens_at_is_named() -> None:
    async with opened(f"http://127.0.0.1:{free_ports(1)[0]}") as tier:
        with pytest.raises(Unavailable, match="cannot be reached: Connection refused"):
            await tier.read(ref_of(tier, listed(SMALL)), 0, len(SMALL), MemorySink(len(SMALL)))


async def test_connect_that_hangs_ends_in_time_and_is_cancelled_at_once() -> None:
    """A listener whose backlog is full drops new connections, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as fillers:
        port = full.getsockname()[1]
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            with suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
        async with opened(f"http://127.0.0.1:{port}") as tier:
            with trio.fail_after(1), trio.move_on_after(0.2) as scope:
                await tier.read(ref_of(tier, listed(SMALL)), 0, len(SMALL), MemorySink(len(SMALL)))
            assert scope.cancelled_caught
            with trio.fail_after(8), pytest.raises(Unavailable, match="no answer within 2 s"):
                await tier.read(ref_of(tier, listed(SMALL)), 0, len(SMALL), MemorySink(len(SMALL)))


async def test_proxy_that_refuses_the_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_scripted(lambda _: reply(407)) as proxy:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
        async with opened("https://store.invalid") as tier:
            with pytest.raises(Unavailable, match=r"refuses a tunnel to store\.invalid:443: status 407"):
                await tier.read(ref_of(tier, listed(SMALL)), 0, len(SMALL), MemorySink(len(SMALL)))


async def test_refused_object_leaves_no_file(tmp_path: Path) -> None:
    with running_scripted(lambda _: reply(503)) as server:
        async with opened(server.endpoint_url) as tier:
            with pytest.raises(Unavailable):
                await fill(tier, begun(tmp_path, len(SMALL)), listed(SMALL))
    assert not file_of(tmp_path, OID).exists()


async def test_large_answer_in_another_version_is_broken_off(tmp_path: Path) -> None:
    file = begun(tmp_path, len(LARGE))
    sink = FileSink(file, 0, len(LARGE))
    with running_scripted(lambda _: Answer(whole(LARGE, "other").raw[:-1], "stall")) as server:
        async with opened(server.endpoint_url, read_seconds=20) as tier:
            with trio.fail_after(5), pytest.raises(VersionChanged):
                await tier.read(ref_of(tier, listed(LARGE)), 0, len(LARGE), sink)
    assert sink.received_bytes == 0


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=len)
async def test_full_disk_is_hot_full(body: bytes, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 4 * MIB) as disk, running_scripted(lambda _: whole(body)) as server:
        file = tier_at(disk).create(OID, len(body), 0)
        fill_up(disk)
        async with opened(server.endpoint_url) as tier:
            with pytest.raises(HotFull, match="No space left on device"):
                await fill(tier, file, listed(body))
        del file


async def test_file_that_takes_no_bytes_is_hot_sick(tmp_path: Path) -> None:
    tier_at(tmp_path).create(OID, len(SMALL), 0)
    path = file_of(tmp_path, OID)
    file = HotFile(os.open(path, os.O_RDONLY), OID, len(SMALL), 0, str(path))
    with running_scripted(lambda _: whole(SMALL)) as server:
        async with opened(server.endpoint_url) as tier:
            with pytest.raises(HotSick, match="cannot write"):
                await fill(tier, file, listed(SMALL))


async def test_directory_that_cannot_take_the_file_is_hot_sick(tmp_path: Path) -> None:
    file = begun(tmp_path, len(SMALL))
    file_of(tmp_path, OID).parent.write_bytes(b"in the way")
    with running_scripted(lambda _: whole(SMALL)) as server:
        async with opened(server.endpoint_url) as tier:
            with pytest.raises(HotSick, match=r"cannot create .*: Not a directory"):
                await fill(tier, file, listed(SMALL))
    assert file.fd < 0


async def test_closed_sink_breaks_a_running_order_off(tmp_path: Path) -> None:
    sink = FileSink(begun(tmp_path, len(LARGE)), 0, len(LARGE), on_progress=lambda _: sink.close())
    with running_scripted(lambda _: Answer(whole(LARGE).raw[:-1], "stall")) as server:
        async with opened(server.endpoint_url, read_seconds=20) as tier:
            with trio.fail_after(5), suppress(SinkClosed):
                await tier.read(ref_of(tier, listed(LARGE)), 0, len(LARGE), sink)
                raise AssertionError("the answer never ends")


async def test_threads_are_started_as_they_are_needed() -> None:
    meeting = threading.Barrier(3, timeout=10)
    is_crowded = False

    def script(_: Asked) -> Answer:
        if is_crowded:
            meeting.wait()
        return whole(SMALL)

    with running_scripted(script) as server:
        async with opened(server.endpoint_url, threads=3) as tier:
            pool = tier._fetcher._pool  # type: ignore[union-attr]
            for _ in range(5):
                await tier.read(ref_of(tier, listed(SMALL)), 0, len(SMALL), MemorySink(len(SMALL)))
            assert pool.thread_count == 1
            is_crowded = True
            async with trio.open_nursery() as nursery:
                for _ in range(9):
                    nursery.start_soon(tier.read, ref_of(tier, listed(SMALL)), 0, len(SMALL), MemorySink(len(SMALL)))
            assert pool.thread_count == 3
    assert server.connections == 3


async def test_many_orders_and_cancellations(tmp_path: Path) -> None:
    rng = random.Random(5)
    descriptors = len(os.listdir("/proc/self/fd"))
    complete = 0

    async def one(tier: S3Cold, number: int, seconds: float) -> None:
        nonlocal complete
        body = LARGE if number % 4 == 0 else SMALL
        oid = ObjectId(number.to_bytes(20, "big"))
        file = tier_at(tmp_path).begin(oid, len(body), 0)
        sink = FileSink(file, 0, len(body))
        with trio.move_on_after(seconds):
            await tier.read(ref_of(tier, listed(body)), 0, len(body), sink)
        if sink.received_bytes:
            assert os.pread(file.fd, sink.received_bytes, 0) == body[: sink.received_bytes]
        complete += sink.received_bytes == len(body)

    def script(asked: Asked) -> Answer:
        body = LARGE if hashlib.md5(LARGE).hexdigest() in asked.headers["if-match"] else SMALL
        return whole(body)

    with running_scripted(script) as server:
        async with opened(server.endpoint_url, threads=8) as tier:
            for turn in range(5):
                async with trio.open_nursery() as nursery:
                    for number in range(40):
                        seconds = rng.choice((0.0, 0.001, 0.01, 0.03, 60.0))
                        nursery.start_soon(one, tier, 40 * turn + number, seconds)
            for number in range(1000, 1004):
                await one(tier, number, 60.0)
    assert complete >= 4
    gc.collect()
    with trio.fail_after(5):
        while len(os.listdir("/proc/self/fd")) > descriptors + 4:  # noqa: ASYNC110 - threads end by themselves
            await trio.sleep(0.01)


class Stalled(NamedTuple):
    """What a `HotFile` needs of its hot directory."""

    fd: int


async def test_a_disk_that_hangs_is_told_from_a_store_that_does(tmp_path: Path) -> None:
    """The reader is let go after the grace; the thread ends when the disk comes back."""
    point = tmp_path / "mnt"
    point.mkdir()
    with stalling(point, {}) as disk, running_scripted(lambda _: whole(SMALL)) as server:
        home = Stalled(os.open(point, os.O_RDONLY | os.O_DIRECTORY))
        sink = FileSink(HotFile(-1, OID, len(SMALL), 0, str(point), home), 0, len(SMALL))  # type: ignore[arg-type]
        disk.stop()
        try:
            async with opened(server.endpoint_url) as tier:
                with trio.move_on_after(0.5) as scope:
                    await tier.read(ref_of(tier, listed(SMALL)), 0, len(SMALL), sink)
                assert scope.cancelled_caught
                assert sink.at_disk
        finally:
            disk.resume()
            os.close(home.fd)


_KILLED = """
import hashlib, sys, trio
from tests.servers.scripted import Answer, reply, running_scripted
from tests.tiers.s3_tier import open_s3, ref_of
from tiercache.core.record import Listed
from tiercache.tiers.tier import MemorySink

BODY = bytes(3 << 20)
TAG = hashlib.md5(BODY).hexdigest()

async def main(url):
    opening = open_s3(url)
    tier = await opening.__aenter__()
    listed = Listed("k", f"{TAG}:{len(BODY)}", len(BODY), 0)
    async def read():
        await tier.read(ref_of(tier, listed), 0, len(BODY), MemorySink(len(BODY)))
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(read)
        while len(server.asked) < 4:
            await trio.sleep(0.01)
        raise SystemExit(7)

with running_scripted(lambda _: Answer(reply(200, {"etag": f'"{TAG}"'}, BODY).raw[:-9], "stall")) as server:
    try:
        trio.run(main, server.endpoint_url, strict_exception_groups=False)
    except SystemExit as exit:
        sys.stdout.write("ended")
        sys.stdout.flush()
        if "quickly" in sys.argv:
            raise
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["quickly", "slowly"])
def test_process_ends_well_with_orders_running(how: str) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", _KILLED, how], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "ended"), done.stderr


def test_posting_to_a_closed_pool_is_refused() -> None:
    pool = native._fetch.Pool(
        url="http://127.0.0.1:1/", proxy="", proxy_header=None, authorities=None, authority_directory=None,
        connect_seconds=1.0, silence_seconds=1.0, max_idle_seconds=30.0, threads=2,
    )  # fmt: skip
    order = pool.post(None, b"/", b"host: x\r\n", 200, 10, True, False, memoryview(bytearray(10)))
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError):
        pool.post(None, b"/", b"host: x\r\n", 200, 10, True, False, memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="too small"):
        pool.post(None, b"/", b"host: x\r\n", 200, 10, True, False, memoryview(bytearray(9)))
    with pytest.raises(BufferError):
        pool.post(None, b"/", b"host: x\r\n", 200, 10, True, False, memoryview(bytes(10)))
    del order, pool
    gc.collect()
