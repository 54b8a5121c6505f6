"""The protocol between a daemon and its supervisor, from the daemon's side."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tiercache import __version__, config, supervision
from tiercache.errors import SetupError
from tiercache.supervision import Kept, Supervision, drop, is_being_restarted, keep, rehearse_successor

ROOT = Path(__file__).parents[2]

FOUND = """
import json, os
from tiercache.supervision import found
what = found()
names = {{fd: os.readlink(f"/proc/self/fd/{{fd}}") for fd in (3, 4, 5) if os.path.exists(f"/proc/self/fd/{{fd}}")}}
inherits = [fd for fd in names if os.get_inheritable(fd)]
left = sorted(name for name in os.environ if name.startswith(("LISTEN_", "TIERCACHE_")))
print(json.dumps([what, names, inherits, left]))
"""

FORK = """
import fcntl, os, sys
os.environ["LISTEN_PID"] = str(os.getpid() + {off})
high = [fcntl.fcntl(os.memfd_create(name), fcntl.F_DUPFD_CLOEXEC, 10) for name in {names}]
for position, fd in enumerate(high):
    os.dup2(fd, 3 + position)
os.execv(sys.executable, [sys.executable, "-c", {program!r}])
"""


def started_with(names: list[str], environment: dict[str, str], *, off: int = 0) -> list[object]:
    """What a process finds that is started with memory files of these names."""
    program = FORK.format(off=off, names=names, program=FOUND.replace("{{", "{").replace("}}", "}"))
    passed = {"LISTEN_FDS": str(len(names)), "LISTEN_FDNAMES": ":".join(names)} if names else {}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **passed, **environment},
        capture_output=True,
        check=True,
        timeout=60,
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listening:
        listening.settimeout(5)
        listening.bind(os.fspath(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", os.fspath(tmp_path / "notify"))
        yield listening


def test_a_fresh_start_finds_nothing() -> None:
    assert started_with([], {})[0] == [None, 0, None, None]


def test_a_successor_finds_its_connection_whatever_the_order_and_closes_the_rest() -> None:
    environment = {"NOTIFY_SOCKET": "@k", "TIERCACHE_RESTARTS": "3", "TIERCACHE_STOPPED_AT": "12.5"}
    environment["TIERCACHE_KEEPER"] = str(os.getpid())
    what, names, inherits, left = started_with(["tiercache-table.47", "other", "tiercache-fuse.47"], environment)
    assert what == ["keeper", 3, 12.5, [5, 3, 47]]
    assert names == {"3": "/memfd:tiercache-table.47 (deleted)", "5": "/memfd:tiercache-fuse.47 (deleted)"}
    assert inherits == []
    assert left == ["TIERCACHE_KEEPER", "TIERCACHE_RESTARTS"], "which a successor of the same keeper needs again"


def test_a_keeper_that_was_killed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, *_, left = started_with([], {"NOTIFY_SOCKET": "@k", "TIERCACHE_RESTARTS": "3", "TIERCACHE_KEEPER": "1"})
    assert what == [None, 3, None, None]
    assert left == ["TIERCACHE_RESTARTS"]
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    keep(Kept(0, 1, 2))
    drop(2)
    assert Supervision("keeper", 0, None, None).present is None


def test_half_a_connection_is_none_and_of_two_the_last_counts() -> None:
    assert started_with(["tiercache-fuse.47"], {})[0] == [None, 0, None, None]
    names = [f"tiercache-{kind}.{number}" for number in (40, 41) for kind in ("fuse", "table")]
    what, open_now, *_ = started_with(names, {})
    assert what == [None, 0, None, [5, 6, 41]]
    assert open_now == {"5": "/memfd:tiercache-fuse.41 (deleted)"}


def test_descriptors_for_another_process_are_not_ours() -> None:
    what, names, *_ = started_with(["tiercache-fuse.1", "tiercache-table.1"], {"NOTIFY_SOCKET": "/run/systemd/notify"}, off=1)
    assert what == ["systemd", 0, None, None]
    assert names == {
        "3": "/memfd:tiercache-fuse.1 (deleted)",
        "4": "/memfd:tiercache-table.1 (deleted)",
    }, "nor are they closed"


def test_keeping_and_dropping(supervisor: socket.socket) -> None:
    first, second = os.memfd_create("fuse"), os.memfd_create("table")
    try:
        keep(Kept(first, second, 47))
        for name in ("fuse", "table"):
            text, fds, _, _ = socket.recv_fds(supervisor, 4096, 4)
            assert text.decode().split("\n") == ["FDSTORE=1", f"FDNAME=tiercache-{name}.47", "FDPOLL=0"]
            assert os.readlink(f"/proc/self/fd/{fds[0]}") == f"/memfd:{name} (deleted)"
            os.close(fds[0])
    finally:
        os.close(first)
        os.close(second)
    drop(47)
    assert supervisor.recv(4096) == b"FDSTOREREMOVE=1\nFDNAME=tiercache-fuse.47"
    assert supervisor.recv(4096) == b"FDSTOREREMOVE=1\nFDNAME=tiercache-table.47"


def test_without_a_supervisor_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    keep(Kept(0, 1, 2))
    drop(2)


def test_a_process_becomes_its_successor() -> None:
    """The same process id, the same program without --report, the descriptors in their places."""
    program = """
import os, sys, time
from tiercache.supervision import Kept, Supervision, become_successor, found
what = found()
if what.kept is None:
    high = [os.memfd_create(name) for name in ("c", "b", "a")]  # 3 and 4 are taken by others
    print(os.getpid(), flush=True)
    become_successor(Kept(high[1], high[0], 9), stopped_at_seconds=1.5)
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in what.kept[:2]]
print(os.getpid(), what, links, sys.argv)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "one", "--report"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, after = done.stdout.splitlines()
    kept = "Kept(fuse_fd=3, table_fd=4, number=9)"
    found = f"Supervision(kind=None, restarts_count=0, stopped_at_seconds=1.5, kept={kept})"
    assert after == f"{before} {found} ['/memfd:b (deleted)', '/memfd:c (deleted)'] ['-c', 'one']"


def test_a_program_that_cannot_be_started_is_found_out_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = config.encode(config.from_mount("file:///nowhere", str(tmp_path / "mnt"), hot=[str(tmp_path / "hot")]))
    assert rehearse_successor(good) == __version__
    with pytest.raises(SetupError, match="cannot be started: "):
        rehearse_successor(b"{}")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'Traceback' >&2\necho \"ImportError: no module\" >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(SetupError, match="cannot be started: ImportError: no module"):
        rehearse_successor(good)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(SetupError, match="cannot be started"):
        rehearse_successor(good)


@pytest.mark.parametrize(
    ("jobs", "restarted"),
    [("12 tiercache.service restart running\n", True), ("12 tiercache.service stop running\n", False), ("", False)],
)
def test_a_restart_is_told_from_a_stop(jobs: str, restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\nprintf '{jobs}'\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(supervision, "_unit", lambda: "tiercache.service")
    assert is_being_restarted() is restarted
    assert (tmp_path / "asked").read_text().endswith("list-jobs --no-legend --plain tiercache.service\n")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not is_being_restarted()
