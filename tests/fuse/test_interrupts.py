"""A program that waits for a store that says nothing can be ended at once; one that catches the signal hears of it at once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy, Seen
from tests.servers.weed import Weed

MIB = 1 << 20
PATIENT = {"cold": {"deadline": "60s"}}
BODY = random.Random(6).randbytes(20 * MIB)
READ_AT_RANDOM = """
import os, signal, sys
def stop(*_):
    print("stopped", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
print("opened", flush=True)
os.pread(fd, 4096, 9 << 20)
print("read", flush=True)
"""
FAULT_AT_RANDOM = """
import mmap, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
fd = os.open(sys.argv[1], os.O_RDONLY)
mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
mapped.madvise(mmap.MADV_RANDOM)
print("opened", flush=True)
sys.stdout.write(str(mapped[9 << 20]))
"""


class Gate:
    """Holds back what is asked of the store for objects, while it is closed."""

    def __init__(self, proxy: Proxy) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting_count = 0
        proxy.before = self._pass

    def _pass(self, seen: Seen) -> None:
        if seen.method == "GET" and not seen.is_list and not self._open.is_set():
            self.waiting_count += 1
            self._open.wait(60)

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


@pytest.fixture
def gate(proxy: Proxy) -> Gate:
    return Gate(proxy)


@pytest.fixture
def mount(bucket: Bucket, proxy: Proxy, gate: Gate, mounting: Mounting) -> Mount:
    bucket.put("large", BODY)
    bucket.put("small", BODY[:5000])
    mount: Mount = mounting(bucket, via=proxy, settings=PATIENT)
    assert sorted(os.listdir(mount.root)) == ["large", "small"]
    return mount


def is_stalled(process: subprocess.Popen[bytes], gate: Gate) -> bool:
    return gate.waiting_count > 0 and Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "SD"


def end(process: subprocess.Popen[bytes], number: int) -> float:
    """How long it takes."""
    began = time.monotonic()
    process.send_signal(number)
    process.wait(30)
    return time.monotonic() - began


@pytest.mark.parametrize("name", ["small", "large"])  # a small file waits in open, a large one in read
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_a_stalled_reader(mount: Mount, gate: Gate, name: str, number: int) -> None:
    with gate.closed():
        process = subprocess.Popen(["cat", mount.root / name], stdout=subprocess.DEVNULL)
        wait_until(lambda: is_stalled(process, gate), "a stalled reader")
        assert end(process, number) < 1.0
        assert process.returncode == -number
    size = 5000 if name == "small" else len(BODY)
    assert (mount.root / name).read_bytes() == BODY[:size], "nobody else is hurt"


def test_a_kill_after_an_ignored_signal_ends_a_stalled_reader(mount: Mount, gate: Gate) -> None:
    """The kernel tells of the first signal only."""
    with gate.closed():
        command = ["sh", "-c", 'trap "" INT; exec cat "$0"', mount.root / "small"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(lambda: is_stalled(process, gate), "a stalled reader")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGWINCH)
        assert process.poll() is None
        assert end(process, signal.SIGKILL) < 1.0


def program(text: str, path: Path, gate: Gate) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", text, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"opened\n"
    wait_until(lambda: is_stalled(process, gate), "a stalled reader")
    return process


def test_a_program_that_catches_the_signal_hears_of_it_while_it_reads(mount: Mount, gate: Gate) -> None:
    with gate.closed():
        process = program(READ_AT_RANDOM, mount.root / "large", gate)
        assert end(process, signal.SIGTERM) < 1.0
        assert process.stdout is not None
        assert (process.returncode, process.stdout.read()) == (0, b"stopped\n")
        process.stdout.close()


def test_a_page_fault_is_not_broken_off_for_a_signal_that_is_caught(mount: Mount, gate: Gate) -> None:
    """It would be a SIGBUS: worse than to wait."""
    with gate.closed():
        process = program(FAULT_AT_RANDOM, mount.root / "large", gate)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)  # the daemon looks at interrupted readers more often than that
    assert process.wait(30) == 0
    assert process.stdout is not None
    assert process.stdout.read() == b"heard\n" + str(BODY[9 << 20]).encode()
    process.stdout.close()


def test_a_stopped_store_holds_nobody(bucket: Bucket, weed: Weed, mounting: Mounting) -> None:
    bucket.put("small", BODY[:5000])
    mount = mounting(bucket, settings=PATIENT)
    assert os.listdir(mount.root) == ["small"]
    weed.pause()
    try:
        process = subprocess.Popen(["cat", mount.root / "small"], stdout=subprocess.DEVNULL)
        wait_until(lambda: "fuse" in Path(f"/proc/{process.pid}/stack").read_text(), "a stalled reader")
        assert end(process, signal.SIGINT) < 1.0
    finally:
        weed.resume()
    assert (mount.root / "small").read_bytes() == BODY[:5000]
