"""`serve` as a service manager runs it: ready when it can be read, gone cleanly on SIGTERM, metrics on a port."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting, detach, is_mounted, is_running, tiercache
from tests.fuse.room import room
from tests.servers.process import free_ports, wait_until


@contextmanager
def notified(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(path))
        channel.settimeout(30)
        yield channel


def told_until(channel: socket.socket, state: bytes) -> list[bytes]:
    """What the supervisor hears, up to and with `state`; descriptors are left to the kernel to close."""
    heard = [channel.recv(4096)]
    while state not in heard[-1].split(b"\n"):
        heard.append(channel.recv(4096))
    return heard


def stop(mount: Mount) -> int:
    """SIGTERM; the exit code."""
    os.kill(mount.pid, signal.SIGTERM)
    return mount.exit_code()


def test_readiness_is_told_when_it_can_be_read_and_sigterm_ends_it_cleanly(
    bucket: Bucket, mounting: Mounting, tmp_path: Path
) -> None:
    bucket.put("file", b"content")
    with notified(tmp_path / "n") as channel:
        mount = mounting(bucket, settings={}, extra={"NOTIFY_SOCKET": str(tmp_path / "n")})
        told = told_until(channel, b"READY=1")
        number = os.stat(mount.point).st_dev & 0xFFFFF
        names = [line for text in told for line in text.split(b"\n") if line.startswith(b"FDNAME=")]
        assert names in ([], [b"FDNAME=tiercache-%s.%d" % (kind, number) for kind in (b"fuse", b"table")])
        assert (mount.root / "file").read_bytes() == b"content"
        assert stop(mount) == 0
        told = told_until(channel, b"STOPPING=1")
        assert told == [b"STOPPING=1"]
    assert not is_mounted(mount.point)
    assert not mount.socket.exists()
    assert "Traceback" not in mount.log_text()


def test_a_terminal_that_hangs_up_ends_it_cleanly(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket, settings={})
    os.kill(mount.pid, signal.SIGHUP)
    assert mount.exit_code() == 0
    assert not is_mounted(mount.point)


def test_sigterm_does_not_wait_for_open_files(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket, settings={})
    handle = os.open(mount.root / "file", os.O_RDONLY)
    try:
        assert os.read(handle, 1) == b"c"
        began = time.monotonic()
        assert stop(mount) == 0
        assert time.monotonic() - began < 10
        assert not is_mounted(mount.point)
    finally:
        with suppress(OSError):  # the file system that it belongs to is gone
            os.close(handle)
    mount.start()
    assert (mount.root / "file").read_bytes() == b"content"


def test_a_mount_that_is_taken_away_by_somebody_else_ends_the_daemon_well(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket, settings={})
    assert os.spawnlp(os.P_WAIT, "umount", "umount", str(mount.point)) == 0
    assert mount.exit_code() == 0
    assert "Traceback" not in mount.log_text()


def test_each_dataset_is_a_directory_and_metrics_are_on_a_port(bucket: Bucket, mounting: Mounting, tmp_path: Path) -> None:
    bucket.put("file", b"from the bucket")
    local = tmp_path / "local"
    local.mkdir()
    (local / "file").write_bytes(b"from the directory")
    (port,) = free_ports(1)
    mount = mounting(bucket, settings={"admin": {"http": f"127.0.0.1:{port}"}}, started=False)
    mount.more_datasets.append({"name": "second", "cold": f"file://{local}"})
    mount.start()
    assert sorted(os.listdir(mount.point)) == ["data", "second"]
    assert (mount.point / "data/file").read_bytes() == b"from the bucket"
    assert (mount.point / "second/file").read_bytes() == b"from the directory"
    assert not (mount.point / "third").exists()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'tiercache_opens_total{dataset="data"} 1.0' in text
    assert 'tiercache_opens_total{dataset="second"} 1.0' in text
    ran = mount.tiercache("where", "second/file", "--json")
    assert ran.json["files"][0]["dataset"] == "second"
    names = {dataset["name"] for dataset in mount.status()["datasets"]}
    assert names == {"data", "second"}


def test_sigterm_ends_a_daemon_whose_mount_is_held_elsewhere(bucket: Bucket, mounting: Mounting, tmp_path: Path) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket, settings={})
    with room(tmp_path) as container:
        assert stop(mount) == 0
        ran = container.run(["cat", mount.root / "file"], mount.env)
        assert ran.code == 1
        assert "not connected" in ran.err
    assert "Traceback" not in mount.log_text()


def test_umount_ends_a_daemon_whose_mount_is_held_elsewhere(bucket: Bucket, mounting: Mounting, tmp_path: Path) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket)
    with room(tmp_path):
        mount.umount()
        mount.start()
        assert (mount.point / "file").read_bytes() == b"content"


def test_sigterm_ends_a_daemon_whose_mount_was_detached_while_a_file_was_open(bucket: Bucket, mounting: Mounting) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket, settings={})
    handle = os.open(mount.root / "file", os.O_RDONLY)
    try:
        detach(mount.point)
        assert os.read(handle, 1) == b"c"
        assert stop(mount) == 0
    finally:
        with suppress(OSError):
            os.close(handle)


def test_a_daemon_takes_no_other_mount_away(bucket: Bucket, mounting: Mounting, tmp_path: Path) -> None:
    bucket.put("file", b"content")
    mount = mounting(bucket, settings={})
    with room(tmp_path):  # it holds the first mount
        detach(mount.point)
        assert os.spawnlp(os.P_WAIT, "mount", "mount", "-t", "tmpfs", "tmpfs", str(mount.point)) == 0
        assert stop(mount) == 0
        assert is_mounted(mount.point)


def test_a_daemon_on_a_socket_that_nobody_named_is_not_said_to_have_gone(bucket: Bucket, mounting: Mounting) -> None:
    mount = mounting(bucket)
    del mount.env["TIERCACHE_SOCKET"]
    ran = tiercache("umount", mount.point, env=mount.env)
    assert (ran.code, ran.out) == (0, f"{mount.point}: unmounted\n")
    wait_until(lambda: not is_running(mount.pid), "the end of the daemon")
