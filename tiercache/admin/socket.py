"""Where the admin sockets are: one a daemon, named after its mount point, in the user's runtime directory.

The name is a readable part and a short hash of the mount point, so that `ls` tells which socket
belongs to which mount and no two mount points share one. A registry file of running daemons was
rejected: it goes stale, while a socket tells by itself whether somebody listens.

Runtime directories: `/run/tiercache` for root, `$XDG_RUNTIME_DIR/tiercache` for others, and
`/tmp/tiercache-<uid>` where a session has no XDG_RUNTIME_DIR (cron, ssh to a compute node, containers). Anybody may
create names in /tmp, so the directory is used only when it is ours and closed to others: a
foreign socket there would receive our requests.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import os
import re
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from tiercache.errors import SetupError

ROOT_DIRECTORY = Path("/run/tiercache")
MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux holds 108 with the final NUL
READABLE_CHARACTERS = 32
CONNECT_SECONDS = 5.0


class Answer(enum.Enum):
    LIVE = "somebody listens"
    DEAD = "nobody listens"
    DENIED = "this user may not connect"


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


def instance_name(mountpoint: str) -> str:
    """`/mnt/data` -> `mnt-data-1f2e3d4c`: what the files of one mount's daemon (socket, log) are called."""
    raw = os.fsencode(mountpoint)
    readable = re.sub(rb"[^A-Za-z0-9._]+", b"-", raw).strip(b"-").decode("ascii")[-READABLE_CHARACTERS:].lstrip("-.")
    return f"{readable or 'root'}-{hashlib.blake2b(raw, digest_size=4).hexdigest()}"


def runtime_directory() -> Path:
    """Where this user's daemons have their sockets. It need not exist yet."""
    if os.geteuid() == 0:
        return ROOT_DIRECTORY
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(session) and os.path.isdir(session):
        return Path(session) / "tiercache"
    return Path(f"/tmp/tiercache-{os.geteuid()}")


def socket_for(mountpoint: str) -> Path:
    """The socket of the daemon that serves `mountpoint` (absolute, symbolic links resolved)."""
    return runtime_directory() / f"{instance_name(mountpoint)}.sock"


def keeper_socket_for(mountpoint: str) -> Path:
    """Where the keeper of a mount listens, so that it can be found while no daemon runs."""
    return runtime_directory() / f"{instance_name(mountpoint)}.keeper"


def keeper_pid(mountpoint: str) -> int | None:
    """The process that keeps this mount; None when there is none (any more)."""
    return listener_pid(keeper_socket_for(mountpoint).name)


def listener_pid(name: str) -> int | None:
    """The process that listens on the socket `name` of this user or of root. It is not asked anything: it may hang."""
    for directory in _searched():
        with suppress(OSError):
            if not _fault(directory) and (pid := peer_pid(directory / name)) is not None:
                return pid
    return None


def prepare_runtime_directory() -> Path:
    """Create the runtime directory when it is missing. Raises SetupError when it is not safe to use."""
    directory = runtime_directory()
    mode = 0o755 if directory == ROOT_DIRECTORY else 0o700
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
            directory.chmod(mode)  # whatever the umask: members of a socket's group must get through to it
    except OSError as error:
        raise SetupError(
            f"cannot create the runtime directory {directory}: {error.strerror}",
            hint="set XDG_RUNTIME_DIR to a directory of yours",
        ) from error
    fault = _fault(directory)
    if fault:
        raise SetupError(
            f"the runtime directory {directory} {fault}", hint="remove it, or set XDG_RUNTIME_DIR to a directory of yours"
        )
    return directory


def _fault(directory: Path) -> str:
    """Why a runtime directory must not be used, '' if it may be. Raises FileNotFoundError."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if directory == ROOT_DIRECTORY:
        return "belongs to another user" if found.st_uid != 0 else ""
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    return "is open to other users" if found.st_mode & 0o077 else ""


def sockets() -> dict[Path, Answer]:
    """Every socket file where a daemon of this user or of root may listen, and what is behind it."""
    found: dict[Path, Answer] = {}
    for directory in _searched():
        try:
            if _fault(directory):
                continue
            names = sorted(directory.glob("*.sock"))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        found |= {name: answer_of(name) for name in names}
    return found


def live_sockets() -> list[Path]:
    """Those that a daemon listens on and that this user may use."""
    return [name for name, answer in sockets().items() if answer is Answer.LIVE]


def _searched() -> list[Path]:
    """A daemon that cron started has no XDG_RUNTIME_DIR, the session that asks for it has: look in both places."""
    if os.geteuid() == 0:
        return [ROOT_DIRECTORY]
    uid = os.geteuid()
    candidates = (runtime_directory(), Path(f"/run/user/{uid}/tiercache"), Path(f"/tmp/tiercache-{uid}"), ROOT_DIRECTORY)
    return list(dict.fromkeys(candidates))


def answer_of(path: Path) -> Answer:
    """A full backlog is a busy listener. Raises OSError where none of the answers fits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return Answer.DEAD
        except PermissionError:
            return Answer.DENIED
        except OSError as error:
            if error.errno == errno.EAGAIN or isinstance(error, TimeoutError):
                return Answer.LIVE
            raise
    return Answer.LIVE


def peer_pid(path: Path) -> int | None:
    """The process that listens at `path`; None when it runs where this process cannot see it (another PID namespace).

    Raises OSError when nobody answers.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        probe.connect(os.fspath(path))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid = int(_CREDENTIALS.unpack(credentials)[0])
    return pid if pid > 0 else None
