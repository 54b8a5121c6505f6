"""The keeper of one mount: a small process that starts the daemon again when it died, and holds what the next one needs.

`tiercache mount` starts it, and it starts the daemon. It is what systemd is for a service, and speaks the same protocol
(`supervision.py`): the daemon gives it the connection to the kernel to hold, so that requests wait while no daemon runs, and gets
it back when it is started again. It ends with the mount: when the daemon ends cleanly, or ends before it ever was
mounted. When daemon after daemon dies, waiting for the next one would be for ever: then the connection is aborted, the mount
detached, and programs get errors.

It must never touch the mount: one that had a file of it open would wait for the daemon that it is to start. So it stands in
`/`, closes everything that it inherits, and opens nothing but its sockets. It imports next to nothing, because it
lives as long as the mount (see the test for its memory).

    python -m tiercache.keeper MOUNTPOINT SOCKET

The configuration is a memory file on descriptor 0, which each daemon gets anew; 1 and 2 are the log; the first daemon
reports to descriptor 3. While there is a mount somebody listens on SOCKET, which tells `umount --force` the keeper's process id.
"""

from __future__ import annotations

import array
import fcntl
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from tiercache.detaching import abandon, is_connected
from tiercache.mountinfo import FSTYPE, visible_at

DAEMON = (sys.executable, "-P", "-m", "tiercache.daemon")
CONFIG_FD, REPORT_FD, FIRST_LISTEN_FD = 0, 3, 3
FUSE = "tiercache-fuse."  # the name of a connection, as in supervision.py, before its number
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_MESSAGE_BYTES = 4096
MAX_MESSAGES = 1024
MAX_KEPT = 16
_CREDENTIALS = struct.Struct("3i")


class Pace(NamedTuple):
    """After an end the next daemon is started after `first_seconds`, twice that after the next end, and so on; `loop_count` ends
    within `loop_seconds` are a crash loop. A daemon that has served for `settled_seconds` begins a new count: what killed it was
    not the start, nor a request that waited for it."""

    first_seconds: float = 0.1
    loop_count: int = 5
    loop_seconds: float = 60.0
    settled_seconds: float = 2.0


PACE = Pace()


class Ends:
    """When daemons died, as far as it matters."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._recent: list[float] = []

    def another(self, now_seconds: float, served_seconds: float = 0.0) -> float | None:
        """How long to wait before the next start, after a daemon that has served that long; None when it is a crash loop."""
        pace = self._pace
        counted = [] if served_seconds >= pace.settled_seconds else self._recent
        self._recent = [*(end for end in counted if now_seconds - end < pace.loop_seconds), now_seconds]
        if len(self._recent) >= pace.loop_count:
            return None
        return float(pace.first_seconds * 2 ** (len(self._recent) - 1))


class Message(NamedTuple):
    """A datagram, the process that sent it, and the descriptors that came with it."""

    pid: int
    fields: Mapping[str, str]
    fds: Sequence[int]


class Keeper:
    def __init__(
        self, point: str, socket_path: str, config_fd: int, report_fd: int, daemon: Sequence[str] = DAEMON, pace: Pace = PACE
    ) -> None:
        self._point = point
        self._socket_path = socket_path
        self._config_fd = config_fd
        self._report_fd = report_fd
        self._daemon = daemon
        self._ends = Ends(pace)
        self._kept: dict[str, int] = {}
        self._was_mounted = False
        self._stop_asked = False
        self._pid = 0
        self._ready_at = math.inf
        self._notices = _notify_socket()
        self._signals = _signal_socket()
        self._poll = select.poll()
        for channel in (self._notices, self._signals):
            self._poll.register(channel, select.POLLIN)
        self._listening: socket.socket | None = None
        self._socket_identity = (0, 0)

    # -- the life of a mount

    def run(self) -> int:
        """The exit code. Blocks as long as the mount lives."""
        restarts, stopped_at = 0, 0.0
        while True:
            self._ready_at = math.inf
            self._pid = self._start(restarts, stopped_at)
            status = self._watch()
            stopped_at = time.monotonic()
            if status == 0:
                break
            how = _how(status)
            if not self._was_mounted or self._stop_asked:
                _log("error", "daemon_ended", how=how)
                break
            delay_seconds = self._ends.another(stopped_at, stopped_at - self._ready_at)
            if delay_seconds is None:
                _log("error", "daemon_given_up", how=how, mountpoint=self._point)
                break
            restarts += 1
            _log("warning", "daemon_restarts", how=how, after_seconds=delay_seconds, restarts=restarts)
            self._pause(delay_seconds)
            if self._stop_asked:
                break
        if status:
            self._abandon_mount()
        self._close()
        if status and not self._was_mounted:
            _end_as(status)
        return 1 if status else 0

    def _watch(self) -> int:
        """Serve the daemon until it ends; its wait status. What it said last is heard."""
        pidfd = os.pidfd_open(self._pid)
        self._poll.register(pidfd, select.POLLIN)
        try:
            while all(fd != pidfd for fd, _ in self._poll.poll()):
                self._hear()
        finally:
            self._poll.unregister(pidfd)
            os.close(pidfd)
        self._hear()
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return status

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop_asked and (left_seconds := deadline - time.monotonic()) > 0:
            self._poll.poll(left_seconds * 1000)
            self._hear()

    def _abandon_mount(self) -> None:
        """No mount that nobody serves may be left; one that is not ours (any more) is left alone."""
        mount = visible_at(self._point)
        if mount is None or mount.fstype != FSTYPE:
            return
        numbers = {name.rpartition(".")[2] for name, fd in self._kept.items() if name.startswith(FUSE) and is_connected(fd)}
        ours = str(mount.connection_number) in numbers if self._kept else self._was_mounted
        if ours:
            complaint = abandon(mount)
            _log("warning", "mount_abandoned", mountpoint=self._point, complaint=complaint or "none")

    def _close(self) -> None:
        _close(list(self._kept.values()))
        if self._listening is not None:
            with suppress(FileNotFoundError):
                if _identity(self._socket_path) == self._socket_identity:  # not that of the next keeper
                    os.unlink(self._socket_path)
            self._listening.close()

    # -- starting

    def _start(self, restarts: int, stopped_at: float) -> int:
        pid = os.fork()  # nothing else runs here; and only a fork can know its process id, which LISTEN_PID has to say
        if pid:
            if not restarts:
                os.close(self._report_fd)
            return pid
        try:
            self._become_daemon(restarts, stopped_at)
        except OSError as error:
            _log("error", "daemon_not_started", error=str(error))
        finally:
            os._exit(127)

    def _become_daemon(self, restarts: int, stopped_at: float) -> NoReturn:
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": "@" + os.fsdecode(self._notices.getsockname()[1:]),
            "TIERCACHE_KEEPER": str(os.getppid()),
            "TIERCACHE_RESTARTS": str(restarts),
        }
        os.lseek(self._config_fd, 0, os.SEEK_SET)
        os.dup2(self._config_fd, CONFIG_FD)
        command = list(self._daemon)
        if not restarts:
            os.dup2(self._report_fd, REPORT_FD)
            os.execve(command[0], [*command, "--report"], environment)
        environment |= {
            "TIERCACHE_STOPPED_AT": repr(stopped_at),
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(self._kept)),
            "LISTEN_FDNAMES": ":".join(self._kept),
        }
        for position, fd in enumerate(self._kept.values()):  # kept above, so that none is overwritten
            os.dup2(fd, FIRST_LISTEN_FD + position)
        os.execve(command[0], command, environment)

    # -- what comes in

    def _hear(self) -> None:
        """Everything that has come, up to a bound that is above what a socket holds. Blocks on nothing."""
        for _ in range(MAX_MESSAGES):
            message = _received(self._notices)
            if message is None:
                break
            if message.pid == self._pid != 0:
                self._obey(message)
            else:
                _close(message.fds)
        with suppress(BlockingIOError):
            for number in self._signals.recv(64):
                self._stop_asked = True
                if self._pid:
                    os.kill(self._pid, number)
        if self._listening is not None:
            with suppress(BlockingIOError):
                self._listening.accept()[0].close()

    def _obey(self, message: Message) -> None:
        fields, fds = message.fields, list(message.fds)
        name = fields.get("FDNAME", "")
        if fields.get("FDSTORE") == "1" and len(fds) == 1 and name and (name in self._kept or len(self._kept) < MAX_KEPT):
            self._drop(name)
            self._kept[name] = _moved_up(fds.pop())
        elif fields.get("FDSTOREREMOVE") == "1":
            self._drop(name)
        _close(fds)
        if fields.get("READY") == "1":
            self._ready_at = min(self._ready_at, time.monotonic())
            if not self._was_mounted:
                self._was_mounted = True
                self._listen()

    def _drop(self, name: str) -> None:
        if name in self._kept:
            os.close(self._kept.pop(name))

    def _listen(self) -> None:
        """Only the keeper of what is mounted has the name; a socket there belongs to one that was killed."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.setblocking(False)
        try:
            with suppress(FileNotFoundError):
                os.unlink(self._socket_path)
            listening.bind(self._socket_path)
            listening.listen()
            self._socket_identity = _identity(self._socket_path)
        except OSError as error:
            listening.close()
            _log("warning", "keeper_not_listening", socket=self._socket_path, error=str(error))
            return
        self._listening = listening
        self._poll.register(listening, select.POLLIN)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _notify_socket() -> socket.socket:
    """Anybody on this machine may send to it: the kernel says who did."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    channel.bind("")  # a free name in the abstract namespace: nothing to remove afterwards
    channel.setblocking(False)
    return channel


def _signal_socket() -> socket.socket:
    """Signals as bytes that can be waited for. One that is ignored (nohup) stays ignored."""
    reading, writing = socket.socketpair()
    for end in (reading, writing):
        end.setblocking(False)
    signal.set_wakeup_fd(writing.detach())
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return reading


def _received(channel: socket.socket) -> Message | None:
    room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(MAX_KEPT * 4)
    try:
        raw, ancillary, _, _ = channel.recvmsg(MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    pid, fds = 0, array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    lines = (line.partition("=") for line in raw.decode(errors="replace").split("\n"))
    return Message(pid, {name: value for name, _, value in lines}, fds)


def _moved_up(fd: int) -> int:
    """Above all the numbers that descriptors get in a new daemon."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_LISTEN_FD + MAX_KEPT)
    os.close(fd)
    return moved


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by signal {number} ({signal.strsignal(number)})"
    return f"exited with status {os.WEXITSTATUS(status)}"


def _end_as(status: int) -> NoReturn:
    """End as the daemon did, so that `tiercache mount` can say how."""
    if os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no other way
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _log(level: str, event: str, **facts: object) -> None:
    """As the daemon's own lines look. A log that cannot be written must not end the keeper."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    quoted = (f'{name}="{value}"' if " " in str(value) else f"{name}={value}" for name, value in facts.items())
    line = " ".join([f"timestamp={stamp} level={level} event={event}", *quoted])
    with suppress(OSError):
        os.write(2, os.fsencode(line) + b"\n")


def main() -> int:
    point, socket_path = sys.argv[1:]
    os.chdir("/")
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > REPORT_FD:
            with suppress(OSError):  # the one that listed them
                os.close(fd)
    above = FIRST_LISTEN_FD + MAX_KEPT
    config_fd = fcntl.fcntl(CONFIG_FD, fcntl.F_DUPFD_CLOEXEC, above)
    report_fd = fcntl.fcntl(REPORT_FD, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(REPORT_FD)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, CONFIG_FD)
    os.close(nothing)
    return Keeper(point, socket_path, config_fd, report_fd).run()


if __name__ == "__main__":
    sys.exit(main())
