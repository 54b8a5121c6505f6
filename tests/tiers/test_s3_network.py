"""Connections of the S3 tier: kept, stale, broken off, through TLS and proxies."""

from __future__ import annotations

import base64
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from tests.servers.certificate import make_certificate
from tests.servers.s3 import S3Account
from tests.servers.scripted import Answer, Asked, Then, in_order, reply, running_scripted
from tests.tiers.s3_tier import open_s3, read, ref_of
from tiercache.core.record import Listed
from tiercache.errors import SetupError, Unavailable
from tiercache.tiers.cold.endpoint import Endpoint
from tiercache.tiers.tier import MemorySink

pytestmark = pytest.mark.usefixtures("fetching")

BODY = random.Random(9).randbytes(4_000_037)
ETAG = hashlib.md5(BODY).hexdigest()
LISTED = Listed("k", f"{ETAG}:{len(BODY)}", len(BODY), 1714979289)
HEADERS = {"etag": f'"{ETAG}"', "last-modified": "Mon, 06 May 2024 07:08:09 GMT"}
WHOLE = reply(200, HEADERS, BODY)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with S3Account("", "testkey", "testsecret").in_environment():
        yield


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - the other side is a thread, or trio's own book-keeping
            await trio.sleep(0.005)


async def test_connections_are_kept_and_their_number_is_bounded() -> None:
    with running_scripted(lambda _: WHOLE) as server:
        async with open_s3(server.endpoint_url, threads=trio.CapacityLimiter(3)) as tier:
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(read, tier, ref_of(tier, LISTED))
            assert 1 <= tier.idle_connection_count <= 3
    assert len(server.asked) == 12
    assert server.connections <= 3


@pytest.mark.parametrize("then", ["close", "reset"])
async def test_kept_connection_that_the_server_ended_is_replaced_at_once(then: Then) -> None:
    ending = Answer(WHOLE.raw, then)
    with running_scripted(in_order([ending, ending, WHOLE])) as server:
        async with open_s3(server.endpoint_url, threads=trio.CapacityLimiter(1)) as tier:
            for _ in range(3):
                assert await read(tier, ref_of(tier, LISTED)) == BODY
    assert [asked.connection for asked in server.asked] == [0, 1, 2]


async def test_connection_is_not_kept_when_the_server_says_close() -> None:
    with running_scripted(lambda _: reply(200, {**HEADERS, "connection": "close"}, BODY)) as server:
        async with open_s3(server.endpoint_url) as tier:
            assert await read(tier, ref_of(tier, LISTED)) == BODY
            assert tier.idle_connection_count == 0


async def test_new_connection_that_gives_no_answer_is_not_tried_again() -> None:
    with running_scripted(lambda _: Answer(b"", "close")) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(Unavailable, match="closed the connection without an answer"):
                await read(tier, ref_of(tier, LISTED))
    assert len(server.asked) == 1


async def test_old_kept_connections_are_not_trusted(monkeypatch: pytest.MonkeyPatch, fetching: str) -> None:
    if fetching == "native":
        pytest.skip("libcurl counts whole seconds")
    monkeypatch.setattr("tiercache.tiers.cold.http.MAX_IDLE_SECONDS", 0.0)
    with running_scripted(lambda _: WHOLE) as server:
        async with open_s3(server.endpoint_url) as tier:
            for _ in range(2):
                assert await read(tier, ref_of(tier, LISTED)) == BODY
    assert [asked.connection for asked in server.asked] == [0, 1]


@pytest.mark.parametrize("answer", [Answer(b"", "stall"), Answer(WHOLE.raw[:100_000], "stall")])
async def test_cancelled_read_ends_at_once_and_leaves_no_thread(answer: Answer) -> None:
    threads = trio.CapacityLimiter(2)
    with running_scripted(lambda _: answer) as server:
        async with open_s3(server.endpoint_url, threads=threads) as tier:
            sink = MemorySink(len(BODY))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tier.read, ref_of(tier, LISTED), 0, len(BODY), sink)
                expected = max(0, len(answer.raw) - 1000)
                await until(lambda: bool(server.asked) and sink.received_bytes >= expected)
                started = time.monotonic()
                nursery.cancel_scope.cancel()
            assert time.monotonic() - started < 0.5
            await until(lambda: threads.borrowed_tokens == 0)
            assert tier.idle_connection_count == 0


async def test_cancelled_before_it_has_a_thread() -> None:
    threads = trio.CapacityLimiter(1)
    with running_scripted(lambda _: WHOLE) as server:
        async with open_s3(server.endpoint_url, threads=threads) as tier:
            async with threads:
                started = time.monotonic()
                with trio.move_on_after(0.01) as scope:
                    await read(tier, ref_of(tier, LISTED))
            assert scope.cancelled_caught
            assert time.monotonic() - started < 0.5
            assert await read(tier, ref_of(tier, LISTED)) == BODY
    assert len(server.asked) == 1


async def test_closing_the_tier_ends_running_reads() -> None:
    with running_scripted(lambda _: Answer(b"", "stall")) as server:
        async with open_s3(server.endpoint_url) as tier:
            failures: list[Unavailable] = []

            async def reader() -> None:
                with pytest.raises(Unavailable) as caught:
                    await read(tier, ref_of(tier, LISTED))
                failures.append(caught.value)

            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reader)
                    await until(lambda: bool(server.asked))
                    await tier.aclose()
            assert len(failures) == 1
            with pytest.raises(Unavailable, match="closed"):
                await tier.head("k")


async def test_connect_that_hangs_is_cancelled_at_once() -> None:
    """A listener whose backlog is full drops new connections, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                with suppress(BlockingIOError):
                    filler.connect(("127.0.0.1", port))
            threads = trio.CapacityLimiter(1)
            async with open_s3(f"http://127.0.0.1:{port}", threads=threads) as tier:
                started = time.monotonic()
                with trio.move_on_after(0.3) as scope:
                    await tier.head("k")
                assert scope.cancelled_caught
                assert time.monotonic() - started < 1.9  # not the two seconds that connecting may take
                await until(lambda: threads.borrowed_tokens == 0)
                with trio.fail_after(5), pytest.raises(Unavailable, match="no answer within 2 s"):
                    await tier.head("k")
        finally:
            for filler in fillers:
                filler.close()


async def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = make_certificate(tmp_path)
    with running_scripted(lambda _: WHOLE, tls=context) as server:
        async with open_s3(server.endpoint_url) as tier:
            with pytest.raises(Unavailable, match=r"certificate .* is not trusted") as caught:
                await read(tier, ref_of(tier, LISTED))
            assert "AWS_CA_BUNDLE" in caught.value.hint
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        async with open_s3(server.endpoint_url) as tier:
            for _ in range(2):
                assert await read(tier, ref_of(tier, LISTED)) == BODY
            assert [asked.connection for asked in server.asked] == [1, 1]


async def test_cancelled_and_silent_reads_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = make_certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    threads = trio.CapacityLimiter(1)
    with running_scripted(lambda _: Answer(WHOLE.raw[:100_000], "stall"), tls=context) as server:
        async with open_s3(server.endpoint_url, threads=threads, read_seconds=0.4) as tier:
            with trio.fail_after(1.5), pytest.raises(Unavailable, match=r"silent for 0\.4 s"):
                await read(tier, ref_of(tier, LISTED))
        async with open_s3(server.endpoint_url, threads=threads) as tier:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, tier, ref_of(tier, LISTED))
                await until(lambda: len(server.asked) == 2)
                nursery.cancel_scope.cancel()
            await until(lambda: threads.borrowed_tokens == 0)


async def test_unreadable_certificate_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nonexistent/bundle.pem")
    with pytest.raises(SetupError, match=r"/nonexistent/bundle\.pem"):
        async with open_s3("https://store.example"):
            pass


async def test_plain_http_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_scripted(lambda _: WHOLE) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:p%40ss@127.0.0.1:{proxy.port}")
        async with open_s3("http://store.invalid:9000") as tier:
            assert await read(tier, ref_of(tier, LISTED)) == BODY
            assert tier.source_id == "store.invalid:9000/bucket"
        asked = proxy.asked[0]
        assert asked.target == "http://store.invalid:9000/bucket/k"
        assert asked.headers["host"] == "store.invalid:9000"
        assert asked.headers["proxy-authorization"] == "Basic " + base64.b64encode(b"user:p@ss").decode()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with running_scripted(lambda _: WHOLE) as direct:
            async with open_s3(direct.endpoint_url) as tier:
                assert await read(tier, ref_of(tier, LISTED)) == BODY


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def running_tunnel() -> Iterator[tuple[int, list[str]]]:
    """An HTTP proxy that understands CONNECT, once. Its port, and the first lines that it got."""
    lines: list[str] = []

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(1)
            lines.extend(head.decode().split("\r\n"))
            host, port = lines[0].split(" ")[1].rsplit(":", 1)
            with socket.create_connection((host, int(port))) as store:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_pump, args=(store, client))
                back.start()
                _pump(client, store)
                back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], lines
        finally:
            thread.join()


async def test_tls_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = make_certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with running_scripted(lambda _: WHOLE, tls=context) as server, running_tunnel() as (port, lines):
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        async with open_s3(server.endpoint_url) as tier:
            assert await read(tier, ref_of(tier, LISTED)) == BODY
    assert lines[0] == f"CONNECT 127.0.0.1:{server.port} HTTP/1.1"


async def test_proxy_that_refuses_the_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(asked: Asked) -> Answer:
        assert asked.method == "CONNECT"
        return reply(407)

    with running_scripted(script) as proxy:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
        async with open_s3("https://store.invalid") as tier:
            with pytest.raises(Unavailable, match=r"refuses a tunnel to store\.invalid:443: .*407"):
                await tier.head("k")


def test_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5://user:secret@127.0.0.1:1080")
    with pytest.raises(SetupError, match="socks5:// proxy in https_proxy is not supported") as caught:
        Endpoint("https://store.invalid").route("bucket")
    assert "secret" not in caught.value.line


@pytest.mark.parametrize(
    "url", ["store:9000", "ftp://store", "http://", "http://[::1", "http://host:port", "http://h/?x=1", "http://u:p@h"]
)
def test_malformed_endpoint_url(url: str) -> None:
    with pytest.raises(SetupError) as caught:
        Endpoint(url)
    assert "--endpoint-url http://HOST:PORT" in caught.value.hint


def test_unknown_profile() -> None:
    with pytest.raises(SetupError, match="nobody"):
        Endpoint(profile="nobody")


@pytest.mark.parametrize(
    ("settings", "bucket", "authority", "base_path", "region"),
    [
        ({"region": "us-west-2"}, "bucket", "bucket.s3.us-west-2.amazonaws.com", "", "us-west-2"),
        ({"region": "us-west-2"}, "dotted.bucket", "s3.us-west-2.amazonaws.com", "/dotted.bucket", "us-west-2"),
        ({"url": "https://minio.example:9000"}, "bucket", "minio.example:9000", "/bucket", "us-east-1"),
        ({"url": "http://store.example/base/"}, "bucket", "store.example", "/base/bucket", "us-east-1"),
        ({"url": "http://[::1]:9000"}, "bucket", "[::1]:9000", "/bucket", "us-east-1"),
    ],
)
def test_address_is_boto3s(settings: dict[str, str], bucket: str, authority: str, base_path: str, region: str) -> None:
    route = Endpoint(**settings).route(bucket)  # type: ignore[arg-type]
    assert (route.authority, route.base_path, route.region) == (authority, base_path, region)


def test_settings_of_boto3s_configuration_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = tmp_path / "config"
    configuration.write_text(
        "[profile lab]\nregion = eu-west-1\nendpoint_url = http://lab.example:81\ns3 =\n  addressing_style = virtual\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(configuration))
    endpoint = Endpoint(profile="lab")
    route = endpoint.route("bucket")
    assert (route.host, route.port, route.base_path, route.region) == ("bucket.lab.example", 81, "", "eu-west-1")
    assert endpoint.host == "lab.example:81"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://other.example")
    assert Endpoint(profile="lab", region="eu-west-9").route("bucket").authority == "bucket.other.example"


def test_buckets_that_cannot_be_read_are_refused() -> None:
    for bucket in ("express--use1-az4--x-s3", "a/b", ""):
        with pytest.raises(SetupError):
            Endpoint(region="us-east-1").route(bucket)
