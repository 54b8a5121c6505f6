"""The S3 tier on a real server (SeaweedFS): versions, failures and first contact. The rest is in `conformance.py`."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
import trio

from tests.servers.process import free_ports
from tests.servers.weed import Weed, running_weed
from tests.tiers.s3_tier import BUCKET, open_s3, read, ref_of
from tiercache.errors import NotFound, SetupError, TierError, Unavailable, VersionChanged
from tiercache.tiers.cold import s3
from tiercache.tiers.tier import MemorySink

pytestmark = pytest.mark.usefixtures("fetching")

BLOB = random.Random(5).randbytes(5_000_011)


@pytest.fixture(scope="module")
def weed() -> Iterator[Weed]:
    with running_weed() as server:
        server.make_bucket(BUCKET)
        with server.in_environment():
            yield server


async def put(weed: Weed, key: str, body: bytes) -> None:
    await trio.to_thread.run_sync(weed.put, BUCKET, key, body)


async def test_case_1_same_size_overwrite_is_another_version_and_reads_fresh(weed: Weed) -> None:
    await put(weed, "one/file", b"old old")
    async with open_s3(weed.endpoint_url) as tier:
        old = ref_of(tier, await tier.head("one/file"))
        await put(weed, "one/file", b"new new")
        new = ref_of(tier, await tier.head("one/file"))
        assert new.version != old.version
        assert new.object_id != old.object_id
        assert await read(tier, new) == b"new new"
        for offset, length in ((0, 7), (2, 3)):
            with pytest.raises(VersionChanged):
                await read(tier, old, offset, length)


async def test_case_3_change_between_two_ranges_of_one_read(weed: Weed) -> None:
    await put(weed, "three", BLOB)
    async with open_s3(weed.endpoint_url) as tier:
        ref = ref_of(tier, await tier.head("three"))
        sink = MemorySink(ref.size_bytes)
        await tier.read(ref, 0, 2_000_000, sink)
        await put(weed, "three", BLOB[::-1])
        with pytest.raises(VersionChanged):
            await tier.read(ref, 2_000_000, ref.size_bytes - 2_000_000, sink)
        assert bytes(sink.view) == BLOB[:2_000_000]


async def test_case_16_zero_and_one_byte_objects(weed: Weed) -> None:
    await put(weed, "sixteen/empty", b"")
    await put(weed, "sixteen/one", b"1")
    async with open_s3(weed.endpoint_url) as tier:
        page = await tier.list("sixteen/")
        assert [(listed.key, listed.size_bytes) for listed in page.objects] == [("sixteen/empty", 0), ("sixteen/one", 1)]
        assert await tier.head("sixteen/empty") == page.objects[0]
        assert await read(tier, ref_of(tier, page.objects[1])) == b"1"


async def test_heads_of_missing_keys_keep_their_connection(weed: Weed) -> None:
    threads = trio.CapacityLimiter(1)
    async with open_s3(weed.endpoint_url, threads=threads) as tier:
        for number in range(5):
            with pytest.raises(NotFound):
                await tier.head(f"missing/{number}")
        assert threads.borrowed_tokens == 0
        assert tier.idle_connection_count == 1


async def test_keys_longer_than_s3_allows_do_not_exist(weed: Weed) -> None:
    async with open_s3(weed.endpoint_url) as tier:
        with pytest.raises(NotFound):
            await tier.head("é" * 513)
        assert (await tier.list("x" * 1025)).objects == ()


async def test_source_id_names_endpoint_and_bucket(weed: Weed) -> None:
    async with open_s3(weed.endpoint_url) as tier:
        assert tier.source_id == weed.endpoint_url.removeprefix("http://") + "/" + BUCKET


async def test_case_10_killed_server_is_unavailable_and_comes_back() -> None:
    with running_weed() as server, server.in_environment():
        server.make_bucket(BUCKET)
        server.put(BUCKET, "k", b"value")
        async with open_s3(server.endpoint_url) as tier:
            ref = ref_of(tier, await tier.head("k"))
            await trio.to_thread.run_sync(server.kill)
            for attempt in (lambda: read(tier, ref), lambda: tier.head("k"), lambda: tier.list("")):
                with pytest.raises(Unavailable):
                    await attempt()
            await trio.to_thread.run_sync(server.start)
            with trio.fail_after(20):
                while True:
                    try:
                        assert await read(tier, ref) == b"value"
                        break
                    except TierError:
                        await trio.sleep(0.05)


async def test_case_10_paused_server_is_unavailable_in_bounded_time(weed: Weed) -> None:
    await put(weed, "ten", b"value")
    async with open_s3(weed.endpoint_url, read_seconds=0.3) as tier:
        ref = ref_of(tier, await tier.head("ten"))
        weed.pause()
        try:
            with trio.fail_after(5), pytest.raises(Unavailable, match=r"silent for 0\.3 s"):
                await read(tier, ref)
        finally:
            weed.resume()


async def probe_error(url: str, **settings: object) -> SetupError:
    async with open_s3(url, **settings) as tier:  # type: ignore[arg-type]
        with trio.fail_after(6), pytest.raises(SetupError) as caught:
            await tier.probe()
    assert "\n" not in caught.value.line
    return caught.value


async def test_probe_passes_on_a_prefix_with_and_without_objects(weed: Weed) -> None:
    await put(weed, "probe/", b"")
    await put(weed, "probe/x", b"content")
    for prefix, holds in (("probe/", True), ("nothing/here/", False)):
        async with open_s3(weed.endpoint_url, prefix=prefix) as tier:
            assert await tier.probe() is holds


async def test_probe_names_a_missing_bucket(weed: Weed) -> None:
    error = await probe_error(weed.endpoint_url, bucket="no-such-bucket")
    assert "bucket 'no-such-bucket' does not exist" in error.line


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
async def test_probe_names_a_wrong_key(weed: Weed, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "wrong")
    error = await probe_error(weed.endpoint_url)
    assert "does not accept the credentials" in error.line
    assert "AWS_PROFILE" in error.hint


async def test_probe_names_missing_credentials(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = await probe_error(weed.endpoint_url)
    assert "no AWS credentials found" in error.line
    assert "--no-sign-request" in error.hint


async def test_probe_says_that_a_bucket_is_not_public(weed: Weed) -> None:
    await put(weed, "private", b"x")
    error = await probe_error(weed.endpoint_url, anonymous=True)
    assert "is not public" in error.line
    assert "--no-sign-request" in error.hint


async def test_probe_tells_https_from_http(weed: Weed) -> None:
    error = await probe_error(weed.endpoint_url.replace("http:", "https:"))
    assert "write http://" in error.hint


async def test_case_10_probe_names_an_unreachable_endpoint(weed: Weed) -> None:
    error = await probe_error(f"http://127.0.0.1:{free_ports(1)[0]}")
    assert "cannot be reached: Connection refused" in error.line


async def test_case_10_probe_names_an_unresolvable_host(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_name(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    error = await probe_error("http://store.invalid:9000")
    assert "host name 'store.invalid' cannot be resolved: Name or service not known" in error.line


async def test_probe_gives_up_on_a_paused_server(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PROBE_SECONDS", 0.5)
    weed.pause()
    try:
        error = await probe_error(weed.endpoint_url)
    finally:
        weed.resume()
    assert "gave no answer within 0.5 s" in error.line
