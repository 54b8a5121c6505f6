"""The admin server and its client, over real sockets."""
# ruff: noqa: ASYNC240  (a test may look at a file while nobody else waits)

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from tests.admin.fake import FakeControl, busy, serving
from tiercache.admin.app import Listening, serve_admin
from tiercache.admin.client import BATCH_COUNT, Client
from tiercache.admin.connections import GRACE_SECONDS
from tiercache.admin.messages import EvictRequest, PinRequest, ScrubRequest
from tiercache.admin.routes import MAX_BODY_BYTES
from tiercache.errors import NoDaemon, NotFound, SetupError, TiercacheError, Unavailable, UsageError

ODD_NAMES = ["a b", "ä", "a%2Fb", "line\nbreak", "\x1b[31m", 'quo"te', "back\\slash", os.fsdecode(b"latin-\xe9"), "\U0001f600"]


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


def raw_client(address: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(address)), base_url="http://x", trust_env=False)


def test_every_request_comes_back_as_it_was_answered(address: Path) -> None:
    control = FakeControl()
    control.add("a.bin", 100)
    with serving(control, address), Client(address) as client:
        assert client.status() == control.status()
        [file] = client.where(["fake/a.bin"]).files
        assert (file.key, file.size_bytes, file.residency) == ("a.bin", 100, ["hot", "cold"])
        assert client.refresh(["fake/a.bin"]).refreshed[0].changed_count == 2
        assert control.refreshed == ["fake/a.bin"]
        answer = client.pin(PinRequest(["fake/a.bin"], "me", "training", 60.0))
        assert answer.admitted
        assert client.pins().pins == answer.pins == list(control.pinned.values())
        assert client.pin_progress(["fake/a.bin"]).hot_bytes == 40
        assert client.unpin(["fake/a.bin"]).removed == answer.pins
        assert client.unpin(["fake/a.bin"]).not_pinned == ["fake/a.bin"]
        assert client.metrics() == control.metrics_text
        assert client.stop().pid == 4711
    assert control.stopped.is_set()


def test_work_is_started_and_asked_for_by_its_number(address: Path) -> None:
    control = FakeControl()
    with serving(control, address), Client(address) as client:
        started = client.evict(EvictRequest(["fake/a"], "drop"))
        assert (started.job, started.kind, started.joined) == (1, "eviction", False)
        assert client.job(1).state == "running"
        assert client.scrub(ScrubRequest("warm", repair=True)).job == 2
        assert client.rebuild_index().job == 3
        assert control.work.asked == [EvictRequest(["fake/a"], "drop"), ScrubRequest("warm", repair=True), "rebuild"]
        assert [target.state for target in client.targets().targets] == ["up", "down", "up"]
        with pytest.raises(NotFound, match="there is no job 4"):
            client.job(4)
        control.work.has_warm = False
        with pytest.raises(UsageError, match="no warm tier") as caught:
            client.evict(EvictRequest(["fake/a"], "warm"))
        assert caught.value.hint == "mount with --warm-target"


@pytest.mark.parametrize(
    ("route", "body", "complaint"),
    [
        ("evict", b'{"paths": ["a"], "to": "cold"}', "Invalid enum value 'cold'"),
        ("evict", b"{}", "missing required field `paths`"),
        ("scrub", b'{"tier": "cold"}', "Invalid enum value 'cold'"),
        ("scrub", b'{"fix": true}', "unknown field `fix`"),
    ],
)
def test_work_that_makes_no_sense_is_refused(address: Path, route: str, body: bytes, complaint: str) -> None:
    with serving(FakeControl(), address), raw_client(address) as client:
        answer = client.post(f"/v1/{route}", content=body)
        assert (answer.status_code, answer.json()["kind"]) == (400, "UsageError")
        assert complaint in answer.json()["error"]


def test_case_15_odd_names_survive_both_ways(address: Path) -> None:
    control = FakeControl()
    for name in ODD_NAMES:
        control.add(name, 1)
    with serving(control, address), Client(address) as client:
        answer = client.where([f"fake/{name}" for name in ODD_NAMES])
        assert [file.key for file in answer.files] == ODD_NAMES
        missing = os.fsdecode(b"fake/\xff")
        assert client.where([missing]).failures[0].path == missing


def test_one_bad_path_does_not_spoil_the_others(address: Path) -> None:
    control = FakeControl()
    control.add("a", 1)
    control.add("b", 2)
    with serving(control, address), Client(address) as client:
        answer = client.where(["fake/a", "fake/none", "fake/b"])
        assert [file.key for file in answer.files] == ["a", "b"]
        [failure] = answer.failures
        assert (failure.path, failure.kind, failure.hint) == ("fake/none", "NotFound", "list its directory")


def test_more_paths_than_one_request_takes(address: Path) -> None:
    control = FakeControl()
    names = [f"{number:04}" for number in range(2 * BATCH_COUNT + 1)]
    for name in names:
        control.add(name, 1)
    with serving(control, address), Client(address) as client:
        assert [file.key for file in client.where([f"fake/{name}" for name in names]).files] == names


def test_errors_keep_their_class_and_hint(address: Path) -> None:
    control = FakeControl()
    control.refuse_stop = busy("/mnt/fake")
    with serving(control, address), Client(address) as client:
        with pytest.raises(NotFound, match="'fake/none' does not exist") as caught:
            client.pin(PinRequest(["fake/none"], "me"))
        assert caught.value.hint == "list its directory"
        with pytest.raises(SetupError, match="in use"):
            client.stop()
        assert not control.stopped.is_set()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not a Paths"),
        (b"{", "not a Paths"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `paths`"),
        (b'{"paths": "a"}', r"Expected `array`, got `str` - at `\$.paths`"),
        (b'{"paths": [1]}', r"Expected `str`, got `int` - at `\$.paths"),
        (b'{"paths": [], "more": 1}', "unknown field `more`"),
        (b"\xff\xfe", "not a Paths"),
        (b'{"paths": [NaN]}', "NaN is not a JSON number"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_json_is_refused_with_a_reason(address: Path, body: bytes, complaint: str) -> None:
    with serving(FakeControl(), address), raw_client(address) as client:
        answer = client.post("/v1/where", content=body)
        assert answer.status_code == 400
        assert answer.json()["kind"] == "UsageError"
        assert re.search(complaint, answer.json()["error"])


def test_bodies_are_bounded(address: Path) -> None:
    with serving(FakeControl(), address), raw_client(address) as client:
        answer = client.post("/v1/where", content=b" " * (MAX_BODY_BYTES + 1))
        assert answer.status_code == 413
        assert str(MAX_BODY_BYTES) in answer.json()["error"]
        assert client.get("/v1/status").status_code == 200


@pytest.mark.parametrize(("method", "route", "code"), [("GET", "/", 404), ("GET", "/v1/where", 405), ("POST", "/v1/status", 405)])
def test_unknown_routes_answer_json(address: Path, method: str, route: str, code: int) -> None:
    with serving(FakeControl(), address), raw_client(address) as client:
        answer = client.request(method, route)
        assert answer.status_code == code
        assert route in answer.json()["error"]


@pytest.mark.parametrize("ttl", [0, -1, 1e308, 2**63])
def test_a_pin_needs_a_positive_time_to_live_of_at_most_a_century(address: Path, ttl: float) -> None:
    with serving(FakeControl(), address), Client(address) as client, pytest.raises(UsageError, match="ttl_seconds"):
        client.pin(PinRequest([], "me", ttl_seconds=ttl))


GARBAGE = [
    b"\0" * 100,
    b"GET / HTTP/9.9\r\n\r\n",
    b"A" * 100_000,
    b"POST /v1/pin HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
    b"POST /v1/pin HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n"
    + b"\xff" * 50,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 50,
]


@pytest.mark.parametrize("junk", GARBAGE, ids=[ascii(junk[:24]) for junk in GARBAGE])
def test_garbage_does_not_end_the_server(address: Path, junk: bytes) -> None:
    """Found this way: a body that breaks off could raise BusyResourceError out of the server, and end the mount."""
    with serving(FakeControl(), address), Client(address) as client:
        for _ in range(10):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(address))
                connection.sendall(junk)
        assert client.status().pid == 4711


def test_a_daemon_that_does_not_answer_is_unavailable(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.admin.client.STORE_SECONDS", 0.2)
    control = FakeControl()
    control.hang = True
    with serving(control, address), Client(address) as client, pytest.raises(Unavailable, match="did not answer /v1/where"):
        client.where(["fake/a"])


def test_a_bug_in_the_daemon_is_reported_and_survived(address: Path, caplog: pytest.LogCaptureFixture) -> None:
    control = FakeControl()
    control.refuse_stop = ZeroDivisionError("a bug")  # type: ignore[assignment]
    with serving(control, address), Client(address) as client:
        with pytest.raises(TiercacheError, match="failed at /v1/stop"):
            client.stop()
        assert client.status().pid == 4711
    assert "ZeroDivisionError: a bug" in caplog.text


def test_nobody_there(tmp_path: Path) -> None:
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(dead))
    for path in (tmp_path / "missing.sock", dead, tmp_path / "none" / "x.sock"):
        with Client(path) as client, pytest.raises(NoDaemon, match="no daemon answers"):
            client.status()


def test_socket_paths_that_the_kernel_cannot_take() -> None:
    for path in ("/" + "x" * 120, "a\0b"):
        with pytest.raises(UsageError, match="cannot be a socket"):
            Client(path)


async def test_the_socket_is_for_owner_and_group_only(address: Path) -> None:
    async with trio.open_nursery() as nursery:
        listening = await nursery.start(partial(serve_admin, FakeControl(), socket_path=str(address)))
        assert listening == Listening(str(address), None)
        found = address.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o660
        assert found.st_gid == os.getegid()
        assert [entry.name for entry in address.parent.iterdir()] == ["admin.sock"]
        nursery.cancel_scope.cancel()
    assert not address.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to any group")
async def test_the_group_can_be_chosen(address: Path) -> None:
    import grp

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_admin, FakeControl(), socket_path=str(address), group="daemon"))
        assert address.stat().st_gid == grp.getgrnam("daemon").gr_gid
        nursery.cancel_scope.cancel()


async def test_an_unknown_group_is_named(address: Path) -> None:
    with pytest.raises(UsageError, match="'nobody-has-this'"):
        await serve_admin(FakeControl(), socket_path=str(address), group="nobody-has-this")
    assert not address.exists()


async def test_a_dead_socket_is_replaced_and_a_live_one_refused(address: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(address))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_admin, FakeControl(), socket_path=str(address)))
        before = address.stat().st_ino
        with pytest.raises(SetupError, match="already listens"):
            await serve_admin(FakeControl(), socket_path=str(address))
        assert address.stat().st_ino == before
        nursery.cancel_scope.cancel()


async def test_a_file_of_somebody_is_not_replaced(address: Path) -> None:
    address.write_text("precious")
    with pytest.raises(SetupError, match="is not a socket"):
        await serve_admin(FakeControl(), socket_path=str(address))
    assert address.read_text() == "precious"


async def test_a_successors_socket_is_left_alone(address: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_admin, FakeControl(), socket_path=str(address)))
        address.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(address))
            nursery.cancel_scope.cancel()
    assert address.exists()


async def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot create the admin socket .*none/a\.sock: No such file"):
        await serve_admin(FakeControl(), socket_path=str(tmp_path / "none" / "a.sock"))


async def test_loopback_serves_metrics_and_nothing_else(address: Path) -> None:
    control = FakeControl()
    async with trio.open_nursery() as nursery:
        listening = await nursery.start(partial(serve_admin, control, socket_path=str(address), http=("127.0.0.1", 0)))
        host, port = listening.http
        async with httpx.AsyncClient(trust_env=False, base_url=f"http://{host}:{port}") as client:
            answer = await client.get("/metrics")
            assert answer.content == control.metrics_text
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert (await client.get("/v1/status")).status_code == 404
            assert (await client.post("/v1/stop")).status_code == 404
        nursery.cancel_scope.cancel()
    assert not control.stopped.is_set()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
async def test_other_addresses_than_loopback_are_refused(address: Path, host: str) -> None:
    with pytest.raises(UsageError, match="only listen on this machine"):
        await serve_admin(FakeControl(), socket_path=str(address), http=(host, 0))


async def test_a_port_in_use_is_named(address: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1 port {port}"):
            await serve_admin(FakeControl(), socket_path=str(address), http=("127.0.0.1", port))
    assert not address.exists()


async def test_a_client_that_stops_reading_does_not_keep_the_daemon(address: Path) -> None:
    control = FakeControl()
    control.metrics_text = b"x" * 50_000_000
    with socket.socket(socket.AF_UNIX) as stuck:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_admin, control, socket_path=str(address)))
            stuck.connect(str(address))
            stuck.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await trio.to_thread.run_sync(stuck.recv, 100)
            with trio.fail_after(GRACE_SECONDS + 3):
                nursery.cancel_scope.cancel()
                await trio.sleep_forever()


def test_a_running_request_is_finished_before_the_end(address: Path) -> None:
    """`stop` is the request during which the daemon ends: its answer must still arrive."""
    for _ in range(5):
        with serving(FakeControl(), address), Client(address) as client:
            assert client.stop().mountpoint == "/mnt/fake"


def test_two_threads_ask_at_once(address: Path) -> None:
    pids: list[int] = []

    def ask() -> None:
        with Client(address) as client:
            pids.extend(client.status().pid for _ in range(20))

    with serving(FakeControl(), address):
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert pids == [4711] * 80
