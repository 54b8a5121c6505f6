"""Daemons that are killed, upgraded, stopped or refused while programs read: real mounts of a directory, real keepers."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fuse.mount import Mount, Mounting, detach, is_mounted, is_running
from tests.servers.process import wait_until
from tiercache.admin.socket import keeper_pid
from tiercache.fuse.takeover import place_for
from tiercache.supervision import Kept

MIB = 1 << 20
FILES = {"large": 24 * MIB, **{f"small{number}": 30_000 + number for number in range(20)}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    rng = random.Random(7)
    for name, size in FILES.items():
        (directory / name).write_bytes(rng.randbytes(size))
    return directory


def handed_over(mount: Mount) -> Mount:
    """Skips where nothing can be: then a new daemon mounts anew, which other tests see."""
    if "through Python" in mount.status()["path"]["reason"]:
        pytest.skip("needs the native extension")
    return mount


def another(mount: Mount, pid: int) -> dict[str, Any]:
    """The status of the daemon that follows."""
    found: dict[str, Any] = {}

    def answers() -> bool:
        ran = mount.tiercache("status", "--json")
        if ran.code == 0 and ran.json["pid"] != pid:
            found.update(ran.json)
        return bool(found)

    wait_until(answers, f"the successor of {pid}")
    mount.pid = found["pid"]
    return found


class Readers:
    """Threads that read and compare, each in its way, until the end; what went wrong, and the longest wait of each."""

    def __init__(self, source: Path, root: Path) -> None:
        self._source = source
        self._root = root
        self.wrong: list[str] = []
        self.rounds_count = dict.fromkeys(("sequential", "random", "small"), 0)
        self._ended = threading.Event()
        self._random = random.Random(3)

    def _sequential(self) -> bool:
        return (self._root / "large").read_bytes() == (self._source / "large").read_bytes()

    def _small(self) -> bool:
        name = self._random.choice([name for name in FILES if name != "large"])
        return (self._root / name).read_bytes() == (self._source / name).read_bytes()

    def _loop(self, name: str, reads_well: Callable[[], bool]) -> None:
        while not self._ended.is_set():
            try:
                if not reads_well():
                    self.wrong.append(f"{name}: wrong bytes")
            except OSError as error:
                self.wrong.append(f"{name}: {error}")
            self.rounds_count[name] += 1

    @contextmanager
    def reading(self) -> Iterator[Readers]:
        with (self._root / "large").open("rb") as mounted, (self._source / "large").open("rb") as plain:

            def at_random() -> bool:
                offset = random.randrange(FILES["large"] - 4096)
                return os.pread(mounted.fileno(), 4096, offset) == os.pread(plain.fileno(), 4096, offset)

            loops = {"sequential": self._sequential, "random": at_random, "small": self._small}
            threads = [threading.Thread(target=self._loop, args=loop) for loop in loops.items()]
            for thread in threads:
                thread.start()
            try:
                yield self
                before = dict(self.rounds_count)
                wait_until(lambda: all(self.rounds_count[name] > before[name] for name in before), "all to go on reading")
            finally:
                self._ended.set()
                for thread in threads:
                    thread.join(60)
            assert not any(thread.is_alive() for thread in threads)


def test_readers_do_not_notice_that_the_daemon_is_killed(mounting: Mounting, source: Path) -> None:
    mount = handed_over(mounting(f"file://{source}"))
    with Readers(source, mount.root).reading() as readers:
        for count in (1, 2):
            pid = mount.pid
            os.kill(pid, signal.SIGKILL)
            status = another(mount, pid)
            assert (status["supervisor"], status["restarts_count"]) == ("keeper", count)
            assert 0 < status["stall_seconds"] < 20
    assert readers.wrong == []
    mount.umount()
    assert keeper_pid(str(mount.point)) is None


def test_readers_do_not_notice_an_upgrade(mounting: Mounting, source: Path) -> None:
    mount = handed_over(mounting(f"file://{source}"))
    before = mount.status()
    with Readers(source, mount.root).reading() as readers:
        ran = mount.tiercache("upgrade", mount.point)
        assert ran.code == 0, ran.err
        assert re.fullmatch(rf"{mount.point}: tiercache (\S+) -> \1, readers waited \d+ ms\n", ran.out)
        done = mount.tiercache("upgrade", "--json").json
        assert (done["pid"], done["mountpoint"]) == (mount.pid, str(mount.point))
    assert readers.wrong == []
    after = mount.status()
    assert after["uptime_seconds"] < before["uptime_seconds"] + 60
    assert (after["pid"], after["restarts_count"], after["supervisor"]) == (before["pid"], 0, "keeper")
    assert not any("not clean" in notice for notice in after["notices"]), "it was a stop like any other"
    os.kill(mount.pid, signal.SIGKILL)
    another(mount, mount.pid)
    assert (mount.root / "small3").read_bytes() == (source / "small3").read_bytes(), "the keeper still had the connection"


def test_a_foreground_daemon_upgrades_itself_without_a_supervisor(mounting: Mounting, source: Path) -> None:
    mount = handed_over(mounting(f"file://{source}", settings={}))
    assert mount.status()["supervisor"] is None
    with (mount.root / "large").open("rb") as file:
        done = mount.tiercache("upgrade", "--config", mount.home / "tiercache.toml", "--json")
        assert done.code == 0, done.err
        assert file.read() == (source / "large").read_bytes()
    assert done.json["pid"] == mount.pid
    os.kill(mount.pid, signal.SIGTERM)
    assert mount.exit_code() == 0
    assert not is_mounted(mount.point)


def test_a_connection_that_the_successor_refuses_is_ended_and_mounted_anew(mounting: Mounting, source: Path) -> None:
    mount = handed_over(mounting(f"file://{source}", settings={}))
    config = mount.home / "tiercache.toml"
    config.write_text(config.read_text().replace("[mount]", '[mount]\nread_path = "python"'))
    with (mount.root / "large").open("rb") as file:
        assert file.read(10) == (source / "large").read_bytes()[:10]
        assert mount.tiercache("upgrade").code == 0
        with pytest.raises(OSError, match=r"not connected|connection abort"):
            os.fsync(file.fileno())
    assert (mount.root / "large").read_bytes() == (source / "large").read_bytes()
    assert "event=connection_refused" in mount.log_text()
    refused = mount.tiercache("upgrade")
    assert refused.code == 1
    assert "cannot be handed over" in refused.err
    assert mount.status()["uptime_seconds"] > 0, "it goes on"


def test_what_was_unmounted_while_no_daemon_ran_stays_unmounted(mounting: Mounting, source: Path) -> None:
    mount = handed_over(mounting(f"file://{source}"))
    keeper = keeper_pid(str(mount.point))
    assert keeper is not None
    os.kill(keeper, signal.SIGSTOP)
    os.kill(mount.pid, signal.SIGKILL)
    detach(mount.point)
    os.kill(keeper, signal.SIGCONT)
    wait_until(lambda: not is_running(keeper), "the end of the keeper")
    assert not is_mounted(mount.point)
    assert "event=unmounted_while_no_daemon_ran" in mount.log_text()


def test_a_connection_that_ended_is_not_taken_for_the_mount_that_got_its_number(mounting: Mounting, source: Path) -> None:
    """The kernel gives the numbers of connections again, to whichever mount comes next."""
    mount = mounting(f"file://{source}")
    number = os.stat(mount.point).st_dev & 0xFFFFF
    ended = os.open("/dev/fuse", os.O_RDWR)  # as the kernel shows one whose connection has ended
    try:
        assert place_for(str(mount.point), Kept(ended, ended, number)) is None
    finally:
        os.close(ended)
    assert is_mounted(mount.point)


def test_force_ends_a_mount_whose_daemon_is_stopped(mounting: Mounting, source: Path) -> None:
    mount = mounting(f"file://{source}")
    keeper = keeper_pid(str(mount.point))
    assert keeper is not None
    os.kill(mount.pid, signal.SIGSTOP)
    failures: list[int | None] = []

    def wait_for_a_name() -> None:
        try:
            os.stat(mount.point / "nothing")
        except OSError as error:
            failures.append(error.errno)

    waiting = threading.Thread(target=wait_for_a_name)
    waiting.start()
    ran = mount.tiercache("umount", "--force", mount.point, "--json")
    assert (ran.code, ran.json["was_mounted"]) == (0, True), ran.err
    waiting.join(30)
    assert failures in ([errno.ENOTCONN], [errno.ECONNABORTED], [errno.ENOENT])  # the last: it came too late
    assert not is_mounted(mount.point)
    assert not is_running(mount.pid)
    assert not is_running(keeper)
    assert mount.tiercache("umount", "--force", mount.point).out == f"{mount.point}: not mounted\n"


def test_force_ends_a_mount_without_a_daemon(mounting: Mounting, source: Path) -> None:
    mount = mounting(f"file://{source}")
    keeper = keeper_pid(str(mount.point))
    assert keeper is not None
    os.kill(keeper, signal.SIGSTOP)
    os.kill(mount.pid, signal.SIGKILL)
    began = time.monotonic()
    ran = mount.tiercache("umount", "--force", mount.point)
    assert (ran.code, ran.out) == (0, f"{mount.point}: unmounted\n"), ran.err
    assert time.monotonic() - began < 20
    assert not is_mounted(mount.point)
    wait_until(lambda: not is_running(keeper), "the end of the keeper")
    with suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGCONT)


def test_force_leaves_mounts_of_others_alone(mounting: Mounting, source: Path) -> None:
    mount = mounting(f"file://{source}", started=False)
    ran = mount.tiercache("umount", "--force", "/proc")
    assert ran.code == 1
    assert "not of tiercache" in ran.err


def test_what_cannot_be_handed_over_is_mounted_anew_within_five_seconds(mounting: Mounting, source: Path) -> None:
    """Where every request goes through Python: nobody holds the connection, so nobody waits."""
    mount = mounting(f"file://{source}", options=["-o", "read_path=python"])
    pid, descriptor = mount.pid, os.open(mount.root / "large", os.O_RDONLY)
    os.kill(pid, signal.SIGKILL)
    status = another(mount, pid)
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.fsync(descriptor)
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.close(descriptor)
    assert (status["supervisor"], status["restarts_count"]) == ("keeper", 1)
    assert status["stall_seconds"] < 5
    assert (mount.root / "large").read_bytes() == (source / "large").read_bytes()


def test_an_index_that_is_damaged_at_the_moment_of_death_is_rebuilt_under_readers(mounting: Mounting, source: Path) -> None:
    mount = handed_over(mounting(f"file://{source}"))
    keeper = keeper_pid(str(mount.point))
    assert keeper is not None
    with Readers(source, mount.root).reading() as readers:
        wait_until(lambda: all(readers.rounds_count.values()), "all to have read")
        os.kill(keeper, signal.SIGSTOP)
        pid = mount.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "the end of the daemon")
        with (mount.hot / "index" / "data.mdb").open("r+b") as index:
            index.seek(2 * 4096)
            index.write(random.Random(5).randbytes(os.fstat(index.fileno()).st_size - 2 * 4096))
        os.kill(keeper, signal.SIGCONT)
        status = another(mount, pid)
        assert any("the index was rebuilt" in notice for notice in status["notices"])
    assert readers.wrong == []


def test_a_store_that_is_down_does_not_keep_a_successor_from_serving_what_is_hot(mounting: Mounting, source: Path) -> None:
    mount = handed_over(mounting(f"file://{source}", options=["--immutable"]))
    content = (source / "large").read_bytes()
    path = mount.root / "large"
    assert path.read_bytes() == content
    wait_until(lambda: os.getxattr(path, "user.tiercache.residency").startswith(b"hot"), "the last commit")
    source.rename(source.with_name("away"))
    pid = mount.pid
    os.kill(pid, signal.SIGKILL)
    another(mount, pid)
    assert path.read_bytes() == content


def test_a_daemon_whose_keeper_was_killed_goes_on_and_stops_cleanly(mounting: Mounting, source: Path) -> None:
    mount = mounting(f"file://{source}")
    keeper = keeper_pid(str(mount.point))
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: mount.status()["supervisor"] is None, "the daemon to notice")
    upgraded = mount.tiercache("upgrade", mount.point)
    assert upgraded.code == 0 or "cannot be handed over" in upgraded.err
    assert (mount.root / "large").read_bytes() == (source / "large").read_bytes()
    os.kill(mount.pid, signal.SIGTERM)
    wait_until(lambda: not is_running(mount.pid), "the end of the daemon")
    assert not is_mounted(mount.point)
    assert "Traceback" not in mount.log_text()
