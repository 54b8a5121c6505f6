"""`upgrade`: have a daemon replaced by the program that is installed now, while its mount stays and its readers wait a moment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiercache.cli import output
from tiercache.cli.options import Json, Socket
from tiercache.cli.processes import Process, process_of
from tiercache.errors import NoDaemon, SetupError, TiercacheError, Unavailable

if TYPE_CHECKING:
    from tiercache.admin.messages import HandingOver, Status

SUCCESSOR_SECONDS = 120.0  # as for a mount: a large index may have to be checked
POLL_SECONDS = 0.02


class Upgraded(msgspec.Struct, frozen=True):
    """What `upgrade --json` prints. `stall_seconds` is how long readers waited."""

    mountpoint: str
    pid: int
    old_version: str
    new_version: str
    stall_seconds: float


def upgrade(
    mountpoint: Annotated[str | None, typer.Argument(metavar="[MOUNTPOINT]", help="Default: the only one.")] = None,
    config_file: Annotated[str | None, typer.Option("--config", metavar="FILE", help="Of the mount point.")] = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Let the daemon go on as the version that is installed now, without unmounting."""
    from tiercache.admin.client import Client
    from tiercache.admin.socket import peer_pid

    address = _address(mountpoint, config_file, socket)
    with Client(address) as client:
        client.status()  # somebody is there, and answers
        with process_of(peer_pid(address)) as process:
            asked_at = time.monotonic()
            leaving = client.upgrade()
            successor = _await_successor(address, leaving, asked_at, process)
    stall_seconds = successor.stall_seconds or 0.0
    done = Upgraded(leaving.mountpoint, successor.pid, leaving.version, successor.version, stall_seconds)
    if as_json:
        output.json_document(done)
    else:
        versions = f"{done.old_version} -> {done.new_version}"
        output.line(f"{done.mountpoint}: tiercache {versions}, readers waited {stall_seconds * 1000:.0f} ms")


def _address(mountpoint: str | None, config_file: str | None, socket: str | None) -> Path:
    from tiercache.admin.locate import daemon_of_mountpoint, only_daemon
    from tiercache.cli.target import chosen_mount_point

    point = chosen_mount_point(mountpoint, config_file)
    if point is None:
        return only_daemon(socket)
    address = daemon_of_mountpoint(socket, point)
    if address is None:
        raise NoDaemon(f"no daemon serves {point}", hint="start one with `tiercache mount`")
    return address


def _await_successor(address: Path, leaving: HandingOver, asked_at: float, process: Process | None) -> Status:
    """The status of a daemon that is younger than our request. Raises SetupError when the process ended instead."""
    from tiercache.admin.client import Client

    while (waited_seconds := time.monotonic() - asked_at) < SUCCESSOR_SECONDS:
        time.sleep(POLL_SECONDS)
        if process is not None and process.has_ended():
            raise _failed(leaving, "ended")
        try:
            with Client(address) as client:
                status = client.status()
        except (NoDaemon, Unavailable):
            continue
        if status.uptime_seconds < waited_seconds and status.stall_seconds is not None:
            return status
    raise _failed(leaving, f"does not answer after {SUCCESSOR_SECONDS:.0f} s")


def _failed(leaving: HandingOver, how: str) -> TiercacheError:
    return SetupError(
        f"{leaving.mountpoint}: the successor, version {leaving.successor}, {how}{_last_words(leaving.mountpoint)}",
        hint="its log says why; a supervisor that there is tries again",
    )


def _last_words(mountpoint: str) -> str:
    """The error that the daemon ended with, where its log is a file of ours."""
    from tiercache.cli.spawn import log_path, tail

    try:
        lines = tail(log_path(mountpoint), 0)
    except (OSError, SetupError):
        return ""
    ended = [line.partition("event=ended error=")[2] for line in lines if "event=ended error=" in line]
    return f": {ended[-1].strip(chr(34))}" if ended else ""
