"""Start a daemon that outlives the command, and learn from it whether it is mounted.

The child is the daemon's keeper (`keeper.py`), which passes everything on to the daemon that it starts, and ends as that one does
if it never comes to a mount. `tiercache mount` must be able to say what went wrong, on its own stderr and with its own exit code.
So the child is not forked off and forgotten: it gets its configuration on fd 0 and reports once on fd 3, one JSON
document (`StartReport`); stdout and stderr are its log. A fresh interpreter by posix_spawn, not a
fork: the daemon starts without the parent's imports, threads and terminal session.

The configuration travels in a memory file and not as arguments, which every user can see in `ps`.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import site
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

import tiercache
from tiercache.admin.messages import StartReport, decode
from tiercache.admin.socket import instance_name, keeper_socket_for, prepare_runtime_directory
from tiercache.errors import SetupError

KEEPER = "tiercache.keeper"
REPORT_FD = 3
READY_SECONDS = (
    120.0  # a large index is validated and every dataset probed before the mount; each step has its own, shorter bound
)
END_SECONDS = 15.0
MAX_REPORT_BYTES = 1024 * 1024
MAX_LOG_BYTES = 16 * 1024 * 1024  # an older log of this size is put aside, once
LAST_LINES_COUNT = 8


class Outcome(msgspec.Struct, frozen=True):
    """`last_lines` of the log when the daemon ended without a report."""

    report: StartReport
    last_lines: list[str] = []


def log_path(mountpoint: str) -> Path:
    """/var/log/tiercache for root, $XDG_STATE_HOME/tiercache for others; one file a mount point. Creates the directory."""
    if os.geteuid() == 0:
        directory = Path("/var/log/tiercache")
    else:
        state = os.environ.get("XDG_STATE_HOME", "")
        directory = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "tiercache"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{instance_name(mountpoint)}.log"
        with suppress(FileNotFoundError):
            if path.stat().st_size > MAX_LOG_BYTES:
                path.rename(path.with_suffix(".log.1"))
    except OSError as error:
        raise SetupError(
            f"cannot keep a log in {directory}: {error.strerror}", hint="set XDG_STATE_HOME to a directory of yours"
        ) from error
    return path


def keeper_of(mountpoint: str) -> Sequence[str]:
    """The arguments of a Python interpreter that make it the keeper of a mount. Raises SetupError.

    -P: no module is taken from the working directory.
    """
    prepare_runtime_directory()
    return ("-P", "-m", KEEPER, mountpoint, str(keeper_socket_for(mountpoint)))


def start_daemon(config: bytes, log: Path, *, arguments: Sequence[str], ready_seconds: float = READY_SECONDS) -> Outcome:
    """Returns when the daemon is mounted or has ended. Raises SetupError; after an exception (Ctrl-C too) none is left behind."""
    with ExitStack() as stack:
        try:
            log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(f"cannot write the log {log}: {error.strerror}", hint="remove it, or correct its rights") from error
        stack.callback(os.close, log_fd)
        log_start = os.fstat(log_fd).st_size
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        try:
            pid = _spawn(config, arguments, log_fd, writing)
        finally:
            os.close(writing)
        try:
            report = _await_report(pid, reading, time.monotonic() + ready_seconds)
            if report is not None and not report.error:
                return Outcome(report)
            ended = _await_end(pid)
        except BaseException:
            _end(pid)
            raise
    if report is not None:
        return Outcome(report)
    return Outcome(StartReport(error=f"the daemon {ended} before it was mounted", hint=f"its log is {log}"), tail(log, log_start))


def _spawn(config: bytes, arguments: Sequence[str], log_fd: int, report_fd: int) -> int:
    with ExitStack() as stack:
        memory = os.memfd_create("tiercache-config", os.MFD_CLOEXEC)
        stack.callback(os.close, memory)
        os.write(memory, config)
        os.lseek(memory, 0, os.SEEK_SET)
        actions = []
        for source, target in ((memory, 0), (log_fd, 1), (log_fd, 2), (report_fd, REPORT_FD)):
            high = fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, 10)  # above all targets, so that no dup2 hits another's source
            stack.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, target))
        os.chdir("/")  # inherited: a daemon must not keep the user's directory busy. This process only prints from here on.
        command = [sys.executable, *arguments]
        return os.posix_spawn(sys.executable, command, _environment(), file_actions=actions, setsid=True)


def _environment() -> Mapping[str, str]:
    """The child must find the same package, also where it runs from a source tree (whose directory `-P` leaves out)."""
    root = str(Path(tiercache.__file__).resolve().parent.parent)
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return os.environ
    inherited = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}


def _await_report(pid: int, reading: int, deadline: float) -> StartReport | None:
    """None when the daemon closed the pipe, or ended, without a report."""
    received = bytearray()
    while True:
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0 or not select.select([reading], [], [], left_seconds)[0]:
            raise SetupError(f"the daemon (pid {pid}) was not ready in time", hint="look at its log; it was stopped")
        piece = os.read(reading, 65536)
        received += piece
        if len(received) > MAX_REPORT_BYTES:
            raise SetupError("the daemon's report has no end", hint="look at its log; it was stopped")
        try:
            return decode(bytes(received), StartReport)
        except json.JSONDecodeError as error:
            if piece:
                continue
            if not received:
                return None
            raise SetupError(f"the daemon's report breaks off: {error}", hint="look at its log; it was stopped") from error
        except ValueError as error:
            raise SetupError(
                f"the daemon's report cannot be understood: {error}", hint="look at its log; it was stopped"
            ) from error


def _await_end(pid: int) -> str:
    """How the child ended, as 'exited with status 1', within END_SECONDS; afterwards it is stopped."""
    status = _wait(pid, END_SECONDS)
    if status is None:
        _end(pid)
        return "neither reported nor ended, and was stopped"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by signal {number} ({signal.strsignal(number)})"
    return f"exited with status {os.WEXITSTATUS(status)}"


def _wait(pid: int, seconds: float) -> int | None:
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
    finally:
        os.close(descriptor)
    return os.waitpid(pid, 0)[1]


def _end(pid: int) -> None:
    """SIGTERM lets it unmount; SIGKILL, to the keeper and its daemon, when it does not."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        if _wait(pid, END_SECONDS) is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def tail(log: Path, start: int) -> list[str]:
    """The last lines of a log, of those that were written after its byte `start`. Raises OSError."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - 65536))
        return [os.fsdecode(line) for line in file.read().splitlines()[-LAST_LINES_COUNT:]]
