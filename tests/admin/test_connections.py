"""Clients that open connections and do nothing with them: everybody else is served all the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from tests.admin.fake import FakeControl, serving
from tiercache.admin import connections
from tiercache.admin.app import serve_admin
from tiercache.admin.client import Client
from tiercache.admin.messages import Refreshed

HALF_REQUESTS = [b"", b"GET /v1/st", b"POST /v1/where HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"]


@pytest.fixture
def address(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


@contextmanager
def opened(address: Path, count: int, said: bytes) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(address))
            connection.settimeout(20)
            if said:
                connection.sendall(said)
            found.append(connection)
        yield found


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("said", HALF_REQUESTS)
def test_connections_that_are_held_open_shut_nobody_out(address: Path, said: bytes) -> None:
    with serving(FakeControl(), address), opened(address, 100, said) as held:
        with Client(address) as client:
            assert client.status().pid == 4711
        assert _is_closed(held[0]), "the one that waited longest gave way"


def test_a_user_has_no_more_than_a_share(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_PER_USER", 2)
    with serving(FakeControl(), address), opened(address, 3, b"") as held:
        assert _is_closed(held[0])


@pytest.mark.parametrize("said", HALF_REQUESTS)
def test_who_says_nothing_for_long_is_left(address: Path, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.2)
    with serving(FakeControl(), address), opened(address, 1, said) as held:
        assert _is_closed(held[0])


def test_a_request_in_work_is_neither_ended_nor_given_way_to(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 2.0)
    control = Slow()
    answers = []

    def ask() -> None:
        with Client(address) as client:
            answers.append(client.refresh(["fake/a"]).refreshed[0].path)

    with serving(control, address):
        asking = threading.Thread(target=ask)
        asking.start()
        assert control.asked.wait(20)
        monkeypatch.setattr(connections, "WAIT_SECONDS", 0.1)
        with opened(address, 1, b"") as [idle]:
            assert _is_closed(idle), "what waits is ended, in the same round that leaves the request alone"
        monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
        with opened(address, 1, b"") as [refused]:
            assert _is_closed(refused)
        control.go_on.set()
        asking.join(20)
    assert answers == ["fake/a"]


class Slow(FakeControl):
    """Its refresh takes until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.add("a", 1)
        self.asked = threading.Event()
        self.go_on = threading.Event()

    async def refresh(self, path: str) -> Refreshed:
        self.asked.set()
        await trio.to_thread.run_sync(self.go_on.wait)
        return await super().refresh(path)


async def test_the_metrics_port_is_not_blocked_either(address: Path) -> None:
    async with trio.open_nursery() as nursery:
        serve = partial(serve_admin, FakeControl(), socket_path=str(address), http=("127.0.0.1", 0))
        listening = await nursery.start(serve)
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(await trio.to_thread.run_sync(socket.create_connection, listening.http))
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.get(f"http://127.0.0.1:{listening.http[1]}/metrics")
            assert answer.status_code == 200
        nursery.cancel_scope.cancel()
