from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tiercache.errors import SetupError
from tiercache.notify import notify


@pytest.fixture
def supervisor() -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listening:
        listening.settimeout(5)
        yield listening


def test_without_a_supervisor_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert notify("READY=1") is False
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    assert notify("READY=1") is False


def test_a_socket_with_a_path_gets_one_datagram_a_state(
    supervisor: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.bind(os.fspath(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", os.fspath(tmp_path / "notify"))
    assert notify("READY=1\nSTATUS=Mounted on /mnt/été") is True
    assert notify("STOPPING=1") is True
    assert supervisor.recv(4096).decode() == "READY=1\nSTATUS=Mounted on /mnt/été"
    assert supervisor.recv(4096) == b"STOPPING=1"


def test_an_abstract_socket_is_reached_too(supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor.bind(f"\0tiercache-test-{os.getpid()}")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@tiercache-test-{os.getpid()}")
    assert notify("READY=1") is True
    assert supervisor.recv(4096) == b"READY=1"


@pytest.mark.parametrize("address", ["/nonexistent/notify", "relative", "/" + "x" * 200])
def test_a_supervisor_that_cannot_be_reached_is_named(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with pytest.raises(SetupError, match=address) as caught:
        notify("READY=1")
    assert "Type=notify" in caught.value.hint
