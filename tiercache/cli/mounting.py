"""`mount` and `serve`: start a daemon, in the background or in the foreground."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiercache.admin.messages import StartReport, Status
from tiercache.cli import output
from tiercache.cli.human import size
from tiercache.cli.options import Json, Socket, parse_mount_options
from tiercache.errors import NoDaemon, SetupError, TiercacheError, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.config.settings import Config

FAILED = 1


class Mounted(msgspec.Struct, frozen=True):
    """What `mount --json` prints. `log` is '' in the foreground, where the log goes to stderr."""

    mountpoint: str
    source: str
    already_mounted: bool
    log: str
    status: Status


def mount(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="s3://bucket/prefix or file:///directory")],
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="An empty directory.")],
    hot: Annotated[
        list[str] | None, typer.Option("--hot", metavar="DIR", help="Cache directory on a local disk; may be repeated.")
    ] = None,
    hot_size: Annotated[
        str | None, typer.Option("--hot-size", metavar="SIZE", help="What the cache may use, as in 100GB.")
    ] = None,
    replica: Annotated[
        str | None, typer.Option("--replica", metavar="DIR", help="A directory that holds the same files.")
    ] = None,
    warm_target: Annotated[
        list[str] | None,
        typer.Option(
            "--warm-target", metavar="DIR", help="Directory (flash, Lustre) for what falls out of the cache; may be repeated."
        ),
    ] = None,
    ec: Annotated[
        str | None, typer.Option("--ec", metavar="K+M", help="Data and parity shards of the warm targets, as in 4+2 (default).")
    ] = None,
    endpoint_url: Annotated[str | None, typer.Option("--endpoint-url", metavar="URL", help="Of a store other than AWS.")] = None,
    region: Annotated[str | None, typer.Option("--region", help="Region of the bucket.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", metavar="NAME", help="Profile of ~/.aws/config.")] = None,
    no_sign_request: Annotated[bool, typer.Option("--no-sign-request", help="Public bucket: use no credentials.")] = False,
    requester_pays: Annotated[
        bool, typer.Option("--requester-pays", help="Accept the costs of a requester-pays bucket.")
    ] = False,
    immutable: Annotated[bool, typer.Option("--immutable", help="The source never changes: never ask again.")] = False,
    name: Annotated[str | None, typer.Option("--name", help="Of the dataset, in `dataset/key` and metrics.")] = None,
    options: Annotated[list[str] | None, typer.Option("-o", metavar="OPTS", help="Comma list, as in /etc/fstab.")] = None,
    foreground: Annotated[bool, typer.Option("-f", help="Stay in the foreground; log to stderr.")] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Mount SOURCE, read-only, on MOUNTPOINT. Returns when it can be read."""
    from tiercache.cli.target import listening_socket, mount_point, places_of, refuse_inside
    from tiercache.config import from_mount

    flags = parse_mount_options(options or [])
    point = mount_point(mountpoint)
    config = from_mount(
        source,
        point,
        hot=hot or (),
        hot_size=hot_size,
        replica=replica,
        warm_targets=warm_target or (),
        ec=ec,
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
        anonymous=no_sign_request,
        requester_pays=requester_pays,
        immutable=immutable,
        name=name,
        allow_other=flags.allow_other,
        uid=flags.uid,
        gid=flags.gid,
        file_mode=flags.file_mode,
        dir_mode=flags.dir_mode,
        read_path=flags.read_path,
        socket=listening_socket(socket),
    )
    refuse_inside(point, places_of(config))
    return _mounted(config, source, socket, foreground=foreground, as_json=as_json)


def _mounted(config: Config, source: str, socket: str | None, *, foreground: bool, as_json: bool) -> int:
    present = _already(source, config.mount.point, socket)
    if present is not None:
        _show(Mounted(config.mount.point, source, True, "", present), as_json)
        return 0
    if foreground:
        return _in_foreground(config, source, as_json)
    return _in_background(config, source, socket, as_json)


def serve(
    config_file: Annotated[str, typer.Option("--config", metavar="FILE", help="tiercache.toml")],
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Mount what a configuration file says, in the foreground (for systemd)."""
    from tiercache.cli.target import listening_socket, mount_point, places_of, refuse_inside
    from tiercache.config import load

    try:
        config = load(config_file, socket=listening_socket(socket))
        refuse_inside(mount_point(config.mount.point), places_of(config))
    except TiercacheError:
        _end_what_was_kept()
        raise
    return _in_foreground(config, ", ".join(dataset.cold for dataset in config.datasets), as_json)


def _end_what_was_kept() -> None:
    """No next start can take the mount of the daemon before us over: its readers must not wait."""
    if "LISTEN_FDS" not in os.environ:
        return
    from tiercache.detaching import is_connected
    from tiercache.fuse.takeover import end_connection
    from tiercache.supervision import found

    kept = found().kept
    if kept is not None and is_connected(kept.fuse_fd):
        end_connection(kept.number)


def _already(source: str, point: str, socket: str | None) -> Status | None:
    """The status of a daemon that serves `source` there. Raises SetupError when it serves something else."""
    from tiercache.admin.client import Client
    from tiercache.admin.locate import daemon_of_mountpoint
    from tiercache.config.location import parse_source
    from tiercache.mountinfo import mounts

    if all(mount.path != point for mount in mounts()):
        return None
    address = daemon_of_mountpoint(socket, point)
    if address is None:
        return None
    try:
        with Client(address) as client:
            status = client.status()
    except (NoDaemon, Unavailable):
        return None
    if status.mountpoint != point:
        return None
    sources = [dataset.source for dataset in status.datasets]
    if len(sources) == 1 and parse_source(sources[0]) == parse_source(source):
        return status
    raise SetupError(
        f"{point} is mounted already, with {', '.join(sources)}",
        hint=f"run `tiercache umount {point}` first, or choose another directory",
    )


def _in_background(config: Config, source: str, socket: str | None, as_json: bool) -> int:
    from tiercache.cli.spawn import keeper_of, log_path, start_daemon
    from tiercache.cli.target import refuse_inside
    from tiercache.config import encode

    point = config.mount.point
    log: Path = log_path(point)
    refuse_inside(point, [("the log", str(log))])
    outcome = start_daemon(encode(config), log, arguments=keeper_of(point))
    if outcome.report.ready is not None:
        _show(Mounted(point, source, False, str(log), outcome.report.ready), as_json)
        return 0
    present = _already(source, point, socket)
    if present is not None:  # another `mount` was quicker
        _show(Mounted(point, source, True, "", present), as_json)
        return 0
    _show_failure(outcome.report, as_json)
    for text in outcome.last_lines:
        output.complaint(f"log: {text}")
    return FAILED


def _in_foreground(config: Config, source: str, as_json: bool) -> int:
    from tiercache.daemon import run

    def report(start: StartReport) -> None:
        if start.ready is None:
            _show_failure(start, as_json)
            return
        try:
            _show(Mounted(config.mount.point, source, False, "", start.ready), as_json)
        except OSError:  # nobody listens any more; the mount is there all the same
            output.silence()

    return run(config, report=report)


def _show(mounted: Mounted, as_json: bool) -> None:
    if as_json:
        output.json_document(mounted)
        output.flush()
        return
    status = mounted.status
    already = "already " if mounted.already_mounted else ""
    if len(status.datasets) == 1:
        output.line(f"{mounted.source} is {already}mounted on {mounted.mountpoint}")
    else:
        output.line(f"{len(status.datasets)} datasets are {already}mounted on {mounted.mountpoint}")
        output.facts({f"  {dataset.name}": dataset.source for dataset in status.datasets})
    hot = status.tiers.hot
    places = ", ".join(directory.path for directory in hot.directories)
    limit = "" if hot.capacity_bytes is None else f"up to {size(hot.capacity_bytes)}"
    reason = f" ({status.path.reason})" if status.path.reason else ""
    warm = "" if status.tiers.warm.state == "absent" else status.tiers.warm.detail
    output.facts(
        {
            "  reads": status.path.kind + reason,
            "  hot": f"{places}, {limit}".strip(", "),
            "  warm": warm,
            "  socket": status.socket,
            "  log": mounted.log,
        }
    )
    for notice in status.notices:
        output.line(f"notice: {notice}")
    output.flush()


def _show_failure(start: StartReport, as_json: bool) -> None:
    output.failure(TiercacheError(start.error, hint=start.hint))
    if as_json:
        output.json_document({}, error=start.error, hint=start.hint)
        output.flush()
