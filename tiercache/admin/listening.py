"""The listening sockets of the admin server: who may connect is decided here.

File permissions are the access control of the unix socket: mode 0660, the group can be set. It is
bound under a temporary name, gets mode and group there and is then renamed into place, so no moment
exists in which it is reachable with other rights; a umask would be the whole process's. A socket
file that nobody listens on (its daemon was killed) is replaced by the same rename, a live one is
refused; two daemons that start at once are told apart by a short lock on the directory.
"""

from __future__ import annotations

import fcntl
import grp
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiercache.admin.socket import MAX_SOCKET_PATH_BYTES, Answer, answer_of
from tiercache.errors import SetupError, UsageError

BACKLOG = 64
SOCKET_MODE = 0o660


@contextmanager
def loopback_socket(address: tuple[str, int] | None) -> Iterator[socket.socket | None]:
    """A listening TCP socket, or none when none is configured. Raises UsageError, SetupError."""
    if address is None:
        yield None
        return
    host, port = address
    host = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(
            f"admin.http may only listen on this machine, not on {host!r}",
            hint="use 127.0.0.1 or [::1]; let an agent on the node forward the metrics",
        )
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except (OSError, OverflowError) as error:
            raise SetupError(f"cannot listen on {host} port {port}: {error}", hint="give admin.http another port") from error
        listening.listen(BACKLOG)
        listening.setblocking(False)
        yield listening


@contextmanager
def unix_socket(path: Path, group: str | None) -> Iterator[socket.socket]:
    """A listening unix socket; its file goes when the context ends. Raises UsageError, SetupError."""
    if len(os.fsencode(path)) + len(_suffix()) > MAX_SOCKET_PATH_BYTES:
        raise SetupError(
            f"the socket path {path} is too long: at most {MAX_SOCKET_PATH_BYTES - len(_suffix())} bytes",
            hint="set admin.socket to a shorter path",
        )
    gid = _group_id(group)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        identity = _bind(listening, path, gid)
        listening.setblocking(False)
        try:
            yield listening
        finally:
            _remove(path, identity)


def _suffix() -> str:
    return f".{os.getpid()}"


def _bind(listening: socket.socket, path: Path, gid: int) -> tuple[int, int]:
    """Listen at `path`, replacing a dead socket; (device, inode) of the socket file."""
    temporary = Path(f"{path}{_suffix()}")
    try:
        with _locked(path.parent):
            _refuse_occupied(path)
            temporary.unlink(missing_ok=True)
            listening.bind(os.fspath(temporary))
            try:
                os.chmod(temporary, SOCKET_MODE)
                os.chown(temporary, -1, gid)
                listening.listen(BACKLOG)
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
            found = path.lstat()
    except OSError as error:
        raise SetupError(
            f"cannot create the admin socket {path}: {error.strerror or error}",
            hint="check the rights of its directory, or set admin.socket to another path",
        ) from error
    return found.st_dev, found.st_ino


def _refuse_occupied(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SetupError(f"{path} exists and is not a socket", hint="remove it, or set admin.socket to another path")
    if answer_of(path) is not Answer.DEAD:
        raise SetupError(
            f"a daemon already listens on {path}",
            hint="name another with --socket or TIERCACHE_SOCKET, or stop that one with `tiercache umount`",
        )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Held for the microseconds between looking and renaming."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _group_id(group: str | None) -> int:
    if group is None:
        return -1
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(f"admin.group {group!r} is not a group of this machine", hint="see `getent group`") from None


def _remove(path: Path, identity: tuple[int, int]) -> None:
    """Unlink our socket, but not one that a successor has put in its place."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if (found.st_dev, found.st_ino) == identity:
            path.unlink()
