"""The keeper with daemons that are short scripts: what it starts, holds, hears, passes on, and when it gives up."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tiercache.keeper import Ends, Pace
from tiercache.mountinfo import visible_at

SECONDS = 20.0
ROOT = Path(__file__).parents[1]

RUN = """
import sys
from tiercache import keeper
from tiercache.keeper import Keeper, Pace
import fcntl, os
script, pace = sys.argv[3], Pace(*map(float, sys.argv[4:]))
keeper.DAEMON = ()
original = Keeper.__init__
def init(self, *arguments):
    original(self, *arguments, daemon=(sys.executable, "-P", "-c", script), pace=pace)
Keeper.__init__ = init
sys.argv[3:] = []
sys.exit(keeper.main())
"""

DAEMON = """
import json, os, signal, socket, sys, time
started = open({starts!r}, "a")
number = sum(1 for _ in open({starts!r})) + 1
fds = {{n: os.readlink(f"/proc/self/fd/{{n}}") for n in range(12) if os.path.exists(f"/proc/self/fd/{{n}}")}}
names = [name for name in os.environ if name.startswith(("LISTEN_", "TIERCACHE_"))]
facts = dict(pid=os.getpid(), fds=fds, config=os.read(0, 99).decode(), argv=sys.argv, cwd=os.getcwd(), at=time.monotonic())
facts |= {{name: os.environ[name] for name in names}}
started.write(json.dumps(facts) + "\\n")
started.close()
def tell(text, *fds):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect("\\0" + os.environ["NOTIFY_SOCKET"][1:])
        socket.send_fds(channel, [text.encode()], list(fds)) if fds else channel.send(text.encode())
def store(name):
    fd = os.memfd_create(f"{{name}} of {{number}}")
    tell(f"FDSTORE=1\\nFDNAME={{name}}\\nFDPOLL=0", fd)
    os.close(fd)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Run:
    """A keeper of scripted daemons, and what these saw when they started."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._starts = home / "starts"
        self._starts.touch()
        self.log = home / "log"
        self.socket = home / "keeper"
        self.point = home / "mnt"
        self.report_fd = -1
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, body: str, *pace: float) -> Run:
        script = DAEMON.format(starts=str(self._starts)) + body
        config = os.memfd_create("config")
        os.write(config, b"the configuration")
        self.report_fd, writing = os.pipe()
        command = [sys.executable, "-P", "-c", RUN, str(self.point), str(self.socket), script, *map(str, pace or (0.01, 5, 60))]
        stray = os.open("/", os.O_RDONLY)
        os.set_inheritable(stray, True)

        def descriptors() -> None:
            os.dup2(config, 0)
            os.dup2(writing, 3)

        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                pass_fds=[3, stray],
                preexec_fn=descriptors,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        for fd in (config, writing, stray):
            os.close(fd)
        return self

    @property
    def starts(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._starts.read_text().splitlines()]

    def pid_of(self, number: int) -> int:
        """Of the daemon that was started as the `number`th, once it runs."""
        wait_until(lambda: len(self.starts) >= number)
        pid = self.starts[number - 1]["pid"]
        assert isinstance(pid, int)
        return pid

    def code(self) -> int:
        assert self.process is not None
        return self.process.wait(SECONDS)

    def close(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.report_fd >= 0:
            os.close(self.report_fd)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_daemon_gets_configuration_and_report_and_nothing_else(run: Run) -> None:
    run.start("os.write(3, b'ready')")
    assert run.code() == 0
    (first,) = run.starts
    assert first["config"] == "the configuration"
    assert first["argv"] == ["-c", "--report"]
    assert first["cwd"] == "/"
    assert first["TIERCACHE_RESTARTS"] == "0"
    assert "LISTEN_FDS" not in first
    fds = first["fds"]
    assert isinstance(fds, dict)
    assert sorted(map(int, fds))[:4] == [0, 1, 2, 3]
    assert "memfd:config" in fds["0"]
    assert "/" not in fds.values(), "a descriptor that the keeper inherited went on to the daemon"
    assert os.read(run.report_fd, 99) == b"ready"
    assert os.read(run.report_fd, 99) == b"", "the keeper does not hold the pipe"


def test_after_a_death_the_next_daemon_gets_what_was_kept(run: Run) -> None:
    run.start("""
if number == 1:
    store("fuse.7"); store("table.7"); tell("READY=1"); die()
tell("STOPPING=1")
""")
    assert run.code() == 0
    _, second = run.starts
    assert (second["LISTEN_FDS"], second["LISTEN_FDNAMES"]) == ("2", "fuse.7:table.7")
    assert second["LISTEN_PID"] == str(second["pid"])
    fds = second["fds"]
    assert isinstance(fds, dict)
    assert (fds["3"], fds["4"]) == ("/memfd:fuse.7 of 1 (deleted)", "/memfd:table.7 of 1 (deleted)")
    assert "5" not in fds or "memfd" not in fds["5"]
    assert second["config"] == "the configuration", "read from its beginning again"
    assert second["argv"] == ["-c"], "there is nobody to report to"
    assert second["TIERCACHE_RESTARTS"] == "1"
    at, stopped_at = second["at"], second["TIERCACHE_STOPPED_AT"]
    assert isinstance(at, float)
    assert isinstance(stopped_at, str)
    assert 0 <= at - float(stopped_at) < SECONDS
    assert "was killed by signal 9 (Killed)" in run.log.read_text()


def test_a_name_that_is_stored_again_replaces_and_a_removed_one_is_gone(run: Run) -> None:
    run.start("""
store("a")
if number < 3:
    store("b"); tell("READY=1"); die() if number == 1 else None
    tell("FDSTOREREMOVE=1\\nFDNAME=b"); tell("FDSTOREREMOVE=1\\nFDNAME=never"); sys.exit(1)
""")
    assert run.code() == 0
    _, second, third = run.starts
    assert second["LISTEN_FDNAMES"] == "a:b"
    assert third["LISTEN_FDNAMES"] == "a"
    fds = third["fds"]
    assert isinstance(fds, dict)
    assert fds["3"] == "/memfd:a of 2 (deleted)"


def test_a_daemon_without_descriptors_is_started_again_too(run: Run) -> None:
    run.start("""tell("READY=1"); die() if number == 1 else sys.exit(0)""")
    assert run.code() == 0
    assert run.starts[1]["LISTEN_FDS"] == "0"


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), 11)", -11), ("os.kill(os.getpid(), 9)", -9), ("raise RuntimeError", 1)],
)
def test_a_daemon_that_never_was_mounted_is_not_started_again(run: Run, end: str, code: int) -> None:
    run.start(f"store('fuse.7')\n{end}")
    assert run.code() == code, "the keeper ends as the daemon did"
    assert len(run.starts) == 1
    assert not run.socket.exists()


def test_daemons_that_die_one_after_the_other_are_given_up(run: Run) -> None:
    run.start("""tell("READY=1"); store("fuse.7"); die()""", 0.02, 5, 60)
    assert run.code() == 1
    assert len(run.starts) == 5
    moments = [start["at"] for start in run.starts]
    for position, (earlier, later) in enumerate(itertools.pairwise(moments)):
        assert isinstance(earlier, float)
        assert isinstance(later, float)
        assert later - earlier >= 0.02 * 2**position
    assert "event=daemon_given_up" in run.log.read_text()
    assert not run.socket.exists()


def test_the_pace() -> None:
    ends = Ends(Pace(0.1, 5, 60))
    assert [ends.another(moment) for moment in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.1, 0.2, 0.4, 0.8, None]
    ends = Ends(Pace(0.1, 5, 60))
    assert [ends.another(16.0 * number) for number in range(40)] == [0.1, 0.2, 0.4] + [0.8] * 37
    ends = Ends(Pace(0.1, 5, 60, 2.0))
    lives = [(1.0, 1.9), (2.0, -math.inf), (3.0, 0.0), (8.0, 2.0), (9.0, 0.0), (10.0, 0.0), (11.0, 0.0), (12.0, 0.0)]
    delays = [ends.another(*life) for life in lives]
    assert delays == [0.1, 0.2, 0.4, 0.1, 0.2, 0.4, 0.8, None], "one that has served begins a new count"
    assert Ends(Pace()).another(1e6) == 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on_and_mean_the_end(run: Run, number: signal.Signals) -> None:
    run.start(f"""
signal.signal({number:d}, lambda *_: sys.exit(0))
tell("READY=1")
open({str(run.socket)!r} + ".on", "w").close()
signal.pause()
""")
    wait_until(Path(f"{run.socket}.on").exists)
    assert run.process is not None
    os.kill(run.process.pid, number)
    assert run.code() == 0
    assert len(run.starts) == 1


def test_a_daemon_that_fails_while_it_stops_is_not_started_again(run: Run) -> None:
    run.start("""
signal.signal(15, lambda *_: sys.exit(7))
tell("READY=1")
os.kill(os.getppid(), 15)
while True: signal.pause()
""")
    assert run.code() == 1
    assert len(run.starts) == 1


def test_a_stop_between_two_daemons_is_the_end(run: Run) -> None:
    run.start("""tell("READY=1"); die()""", 1000.0, 5, 60)
    wait_until(lambda: "event=daemon_restarts" in run.log.read_text())
    assert run.process is not None
    run.process.terminate()
    assert run.code() == 1
    assert len(run.starts) == 1


def test_messages_of_others_are_not_obeyed_and_their_descriptors_closed(run: Run) -> None:
    """A child of the daemon is another process too, as is anybody who guesses the socket's name."""
    run.start(
        """
if number == 1:
    store("mine")
    if os.fork() == 0:
        for _ in range(100): store("theirs")
        tell("FDSTOREREMOVE=1\\nFDNAME=mine")
        os._exit(0)
    os.wait()
    tell("READY=1")
    tell("FDSTORE=1\\nFDNAME=none")
    tell("nonsense"); tell("=="); tell("FDSTORE=1"); tell("\\xff=\\xff")
    with open({!r}, "w") as file: file.write(str(len(os.listdir(f"/proc/{os.getppid()}/fd"))))
    die()
""".replace("{!r}", repr(str(run.log) + ".count"))
    )
    assert run.code() == 0
    assert run.starts[1]["LISTEN_FDNAMES"] == "mine"
    assert int(Path(f"{run.log}.count").read_text()) < 20


def test_a_keeper_of_a_mount_can_be_found_and_only_that(run: Run) -> None:
    run.socket.touch()  # what a keeper that was killed left behind
    on = Path(f"{run.socket}.on")
    run.start(f"""
if number == 1:
    os.rename({str(run.socket)!r}, {str(run.socket)!r} + ".old")
    tell("READY=1"); die()
open({str(on)!r}, "w").close()
signal.pause()
""")
    wait_until(on.exists)
    assert run.process is not None
    for _ in range(300):  # nobody's questions fill its queue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(SECONDS)
            asking.connect(str(run.socket))
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            assert int.from_bytes(credentials[:4], sys.byteorder) == run.process.pid
            assert select.select([asking], [], [], SECONDS)[0], "it accepts and closes"
    os.kill(run.pid_of(2), signal.SIGKILL)
    run.pid_of(3)
    run.process.terminate()
    run.code()
    assert not run.socket.exists()


def test_it_is_small(run: Run) -> None:
    """Beside each mount, for as long as it lives."""
    run.start("""tell("READY=1"); signal.pause()""")
    run.pid_of(1)
    wait_until(run.socket.exists)
    assert run.process is not None
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    resident_kib = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
    assert resident_kib < 14_000
    assert os.readlink(f"/proc/{run.process.pid}/cwd") == "/"


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="mounts: needs root and /dev/fuse")
def test_a_mount_that_nobody_will_serve_is_ended(run: Run) -> None:
    """Its connection is kept, so whoever asks it something waits until then."""
    run.point.mkdir()
    run.start(
        """
import ctypes
fuse = os.open("/dev/fuse", os.O_RDWR)
if number == 1:
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    assert ctypes.CDLL(None).mount(b"test", POINT, b"fuse.tiercache", 0, options) == 0
    device = os.popen(f"grep ' {os.fsdecode(POINT)} ' /proc/self/mountinfo").read().split()[2].split(":")[1]
    tell(f"FDSTORE=1\\nFDNAME=tiercache-fuse.{device}\\nFDPOLL=0", fuse)
    tell("READY=1")
    sys.stdin.close(); os.pread(fuse, 200000, 0)
die()
""".replace("POINT", repr(os.fsencode(run.point))),
        0.01,
        3,
        60,
    )
    failures: list[int | None] = []

    def ask() -> None:
        try:
            os.statvfs(run.point)
        except OSError as error:
            failures.append(error.errno)

    wait_until(lambda: visible_at(str(run.point)) is not None)
    asking = threading.Thread(target=ask)
    asking.start()
    assert run.code() == 1
    asking.join(SECONDS)
    assert failures in ([], [errno.ENOTCONN], [errno.ECONNABORTED])  # none: it asked when all was over
    assert visible_at(str(run.point)) is None
    assert f"event=mount_abandoned mountpoint={run.point} complaint=none" in run.log.read_text()


def test_a_mount_of_another_kind_is_left_alone(run: Run) -> None:
    before = visible_at("/proc")
    run.point = Path("/proc")
    run.start("""tell("READY=1"); die()""", 0.001, 2, 60)
    assert run.code() == 1
    assert visible_at("/proc") == before
