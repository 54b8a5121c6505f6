"""What a daemon and its supervisor say to each other, so that a mount outlives its daemon.

A supervisor is systemd, or the keeper (`keeper.py`) of a mount that `tiercache mount` made; both speak the same protocol, that of
sd_notify(3) and sd_listen_fds(3), so the daemon has one way for both. What is kept is the connection to the kernel
(the /dev/fuse descriptor, and a memory file with all that a successor has to know): while somebody holds it, requests wait
in the kernel instead of failing, and the next process goes on where the last one ended. The same descriptors, handed to
oneself through execve(2), are an upgrade: the same process id, the new program.

The name of a kept descriptor ends in the connection's number, which is the device number of its mount: so a successor can tell
from mountinfo, without touching the mount, that it is the connection of what is mounted at its mount point.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

import structlog

from tiercache.errors import SetupError
from tiercache.notify import notify

log = structlog.get_logger()

FUSE, TABLE = "tiercache-fuse", "tiercache-table"
FIRST_FD = 3  # SD_LISTEN_FDS_START
KEEPER, RESTARTS = "TIERCACHE_KEEPER", "TIERCACHE_RESTARTS"
STOPPED_AT = "TIERCACHE_STOPPED_AT"
"""Environment, from the keeper or from the program before: the keeper's process, how often it started a daemon again, and when
the last one stopped."""
SYSTEMD = "/run/systemd/system"
ASK_SECONDS = 5.0
REHEARSAL_SECONDS = 60.0
_GOES_ON = "correct the installation; the running daemon goes on"

Kind = Literal["keeper", "systemd"]


class Kept(NamedTuple):
    """The descriptors of one connection, and its number."""

    fuse_fd: int
    table_fd: int
    number: int


class Supervision(NamedTuple):
    """What this process found when it started; nothing is `kept` at a fresh start.

    `stopped_at_seconds` is when the process before it stopped answering, on the monotonic clock, as far as that is known.
    """

    kind: Kind | None
    restarts_count: int
    stopped_at_seconds: float | None
    kept: Kept | None

    @property
    def present(self) -> Kind | None:
        """The supervisor now: a keeper can be killed."""
        return None if self.kind == "keeper" and not _keeper_lives() else self.kind


def found() -> Supervision:
    """Once, before anything else is opened. Closes descriptors that it does not know, and unsets what names them."""
    listening = _listening()
    kept = _connection(listening)
    known = set() if kept is None else {kept.fuse_fd, kept.table_fd}
    for fd in set(listening.values()) - known:
        os.close(fd)
    if KEEPER in os.environ and not _keeper_lives():
        del os.environ[KEEPER], os.environ["NOTIFY_SOCKET"]
    kind: Kind | None = "keeper" if KEEPER in os.environ else "systemd" if os.environ.get("NOTIFY_SOCKET") else None
    count, stopped_at = int(os.environ.get(RESTARTS, "0")), os.environ.pop(STOPPED_AT, None)
    if kind == "systemd" and kept is not None:
        count = _systemd_restarts_count()
    return Supervision(kind, count, None if stopped_at is None else float(stopped_at), kept)


def _keeper_lives() -> bool:
    return os.environ.get(KEEPER) == str(os.getppid())


def _listening() -> dict[str, int]:
    """sd_listen_fds_with_names(3): the descriptors that were passed to this very process, by name."""
    pid, count, names = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    given = {}
    for position, name in zip(range(int(count)), names.split(":"), strict=False):
        fd = FIRST_FD + position
        os.set_inheritable(fd, False)
        given[name if name not in given else f"{name}#{fd}"] = fd
    return given


def _connection(listening: Mapping[str, int]) -> Kept | None:
    """The last complete pair: a predecessor that died between dropping one connection and keeping the next left two."""
    pairs = []
    for name, fd in listening.items():
        kind, _, number = name.partition(".")
        table = listening.get(f"{TABLE}.{number}")
        if kind == FUSE and number.isdecimal() and table is not None:
            pairs.append(Kept(fd, table, int(number)))
    return pairs[-1] if pairs else None


def tell(state: str, fds: Sequence[int] = ()) -> None:
    """Notify, unless the supervisor has gone meanwhile: the mount must not suffer from that."""
    try:
        notify(state, fds)
    except SetupError as error:
        log.warning("supervisor_not_told", error=str(error))


def keep(kept: Kept) -> None:
    """Give the supervisor, if there is one, duplicates to hold. A second time for the same descriptors changes nothing."""
    for name, fd in ((FUSE, kept.fuse_fd), (TABLE, kept.table_fd)):
        tell(f"FDSTORE=1\nFDNAME={name}.{kept.number}\nFDPOLL=0", [fd])


def drop(number: int) -> None:
    """Have the supervisor close what it holds of a connection."""
    for name in (FUSE, TABLE):
        tell(f"FDSTOREREMOVE=1\nFDNAME={name}.{number}")


def program() -> list[str]:
    """The command that started this process, to be run again with whatever is installed by then."""
    return [sys.executable, *(argument for argument in sys.orig_argv[1:] if argument != "--report")]


def rehearse_successor(config: bytes) -> str:
    """The version of the program that would be started now, once it has shown that it can be. Blocks. Raises SetupError."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tiercache.daemon", "--rehearse"],
            input=config,
            capture_output=True,
            timeout=REHEARSAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"the installed program cannot be started: {error}", hint=_GOES_ON) from error
    if done.returncode:
        said = os.fsdecode(done.stderr).strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise SetupError(f"the installed program cannot be started: {said[-1]}", hint=_GOES_ON)
    return os.fsdecode(done.stdout)


def become_successor(kept: Kept, *, stopped_at_seconds: float) -> NoReturn:
    """Replace this process by a new one of the same program and give it the connection. Raises OSError."""
    command = program()
    fds = [kept.fuse_fd, kept.table_fd]
    environment = {
        **os.environ,
        STOPPED_AT: repr(stopped_at_seconds),
        **listen_environment(os.getpid(), [f"{FUSE}.{kept.number}", f"{TABLE}.{kept.number}"]),
    }
    pass_on(fds)
    os.execve(command[0], command, environment)


def listen_environment(pid: int, names: Sequence[str]) -> dict[str, str]:
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(len(names)), "LISTEN_FDNAMES": ":".join(names)}


def pass_on(fds: Sequence[int]) -> None:
    """Put these descriptors where the next program looks for them. What was there is closed: an exec must follow."""
    import fcntl

    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + len(fds)) for fd in fds]
    for position, fd in enumerate(high):
        os.dup2(fd, FIRST_FD + position)


# -- what systemd is asked


def is_being_restarted() -> bool:
    """Did systemd stop this unit only in order to start it again? Blocks; False when that cannot be known."""
    unit = _unit()
    jobs = "" if unit is None else _systemctl("list-jobs", "--no-legend", "--plain", unit)
    return any(line.split()[2:3] == ["restart"] for line in jobs.splitlines())


def _systemd_restarts_count() -> int:
    unit = _unit()
    answer = "" if unit is None else _systemctl("show", "--property=NRestarts", "--value", unit)
    return int(answer) if answer.strip().isdecimal() else 0


def _unit() -> str | None:
    """The unit whose process this is, by its control group: the last component that names a service."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            groups = [line.rstrip("\n").split(":", 2)[2] for line in file]
    except OSError:
        return None
    names = [name for group in groups for name in group.split("/") if name.endswith(".service")]
    return names[-1] if names and os.path.isdir(SYSTEMD) else None


def _systemctl(*arguments: str) -> str:
    command = ["systemctl", *([] if os.geteuid() == 0 else ["--user"]), *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_SECONDS, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(done.stdout)
