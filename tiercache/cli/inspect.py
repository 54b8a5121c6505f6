"""`status`, `where`, `targets`, `refresh`: look at a daemon, and have it look again."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.admin.messages import DatasetStatus, Failure, Status, TargetsAnswer, TargetStatus, TierStatus, Where
from tiercache.cli import output
from tiercache.cli.human import duration, ratio, size, size_or_dash
from tiercache.cli.options import Json, PathArguments, Socket
from tiercache.cli.output import Column

FAILED = 1


def status(as_json: Json = False, socket: Socket = None) -> None:
    """Show tiers, datasets, hit ratios and health."""
    from tiercache.admin.client import Client
    from tiercache.admin.locate import only_daemon

    with Client(only_daemon(socket)) as client:
        answer = client.status()
    if as_json:
        output.json_document(answer)
    else:
        _show_status(answer)


def where(paths: PathArguments, as_json: Json = False, socket: Socket = None) -> int:
    """Show in which tiers files are, how much of them, in which version, and whether they are pinned."""
    from tiercache.admin.client import Client
    from tiercache.cli.target import target_of

    target = target_of(socket, paths)
    with Client(target.socket) as client:
        answer = client.where(target.paths)
    if as_json:
        output.json_document(answer, **_first(answer.failures))
    elif answer.files:
        _show_files(answer.files)
    return _complain(answer.failures)


def targets(as_json: Json = False, socket: Socket = None) -> None:
    """List the targets of the warm tier: whether they work, how full they are, and what failed there."""
    from tiercache.admin.client import Client
    from tiercache.admin.locate import only_daemon

    with Client(only_daemon(socket)) as client:
        answer = client.targets()
    if as_json:
        output.json_document(answer)
    elif answer.targets:
        _show_targets(answer)
    else:
        output.line("there is no warm tier: it has no targets")


def refresh(paths: PathArguments, as_json: Json = False, socket: Socket = None) -> int:
    """Ask the source again now what is there, instead of when the metadata's time to live is over."""
    from tiercache.admin.client import Client
    from tiercache.cli.target import target_of

    target = target_of(socket, paths)
    with Client(target.socket) as client:
        answer = client.refresh(target.paths)
    if as_json:
        output.json_document(answer, **_first(answer.failures))
    else:
        for one in answer.refreshed:
            output.line(f"{one.path}: {one.changed_count} changed, {one.dropped_count} gone")
    return _complain(answer.failures)


def show_mount(status: Status) -> dict[str, str]:
    """The facts about one mount that `mount` and `status` have in common."""
    return {
        "reads": status.path.kind + (f" ({status.path.reason})" if status.path.reason else ""),
        "socket": status.socket,
    }


def _supervision(status: Status) -> str:
    """Who starts the daemon again, and what came of it."""
    supervisor = status.supervisor or "nobody starts it again when it dies"
    restarts = "" if not status.restarts_count else f", restarted {status.restarts_count} time(s)"
    stall = "" if status.stall_seconds is None else f", readers waited {status.stall_seconds * 1000:.0f} ms at the last takeover"
    return supervisor + restarts + stall


def _show_status(status: Status) -> None:
    output.line(f"{status.mountpoint}: tiercache {status.version}, pid {status.pid}, up {duration(status.uptime_seconds)}")
    output.facts({**show_mount(status), "supervisor": _supervision(status)})
    output.line()
    hot, *others = _tier_row("hot", status.tiers.hot), _tier_row("warm", status.tiers.warm), _tier_row("cold", status.tiers.cold)
    output.table(
        [Column("TIER"), Column("STATE"), *(Column(title, right=True) for title in ("USED", "CAPACITY", "FULL")), Column("")],
        [hot, *_directory_rows(status.tiers.hot), *others],
    )
    output.line()
    output.table(
        [
            Column("DATASET"),
            *(
                Column(title, right=True)
                for title in ("FILES HOT", "BYTES HOT", "HITS", "FROM HOT", "FROM WARM", "FROM COLD", "PINNED")
            ),
            Column("UNREACHABLE", right=True),
            Column("SOURCE"),
        ],
        [_dataset_row(dataset) for dataset in status.datasets],
    )
    for notice in status.notices:
        output.line(f"notice: {notice}")


def _tier_row(name: str, tier: TierStatus) -> list[str]:
    used = "-" if tier.state == "absent" else size(tier.used_bytes)
    places = [tier.directories[0].path] if len(tier.directories) == 1 else []
    return [name, tier.state, used, *_limits(tier.used_bytes, tier.capacity_bytes), "; ".join([*places, tier.detail]).strip("; ")]


def _directory_rows(hot: TierStatus) -> list[list[str]]:
    """One for each hot directory; where there is only one, the row of the tier says it all."""
    if len(hot.directories) == 1:
        return []
    return [
        [
            "  dir",
            directory.state,
            size(directory.used_bytes),
            *_limits(directory.used_bytes, directory.capacity_bytes),
            "; ".join([directory.path, directory.detail]).strip("; "),
        ]
        for directory in hot.directories
    ]


def _limits(used_bytes: int, capacity_bytes: int | None) -> list[str]:
    return [size_or_dash(capacity_bytes), ratio(used_bytes / capacity_bytes if capacity_bytes else None)]


def _dataset_row(dataset: DatasetStatus) -> list[str]:
    source = (
        dataset.source
        + (f", replica {dataset.replica}" if dataset.replica else "")
        + (", immutable" if dataset.immutable else "")
    )
    return [
        dataset.name,
        str(dataset.hot_objects_count),
        size(dataset.hot_bytes),
        ratio(dataset.hits_ratio),
        *(size(sum(dataset.read_bytes.get(tier, 0) for tier in tiers)) for tiers in (["hot"], ["replica", "warm"], ["cold"])),
        size(dataset.pinned_bytes),
        str(dataset.unreachable_count),
        source,
    ]


def _show_targets(answer: TargetsAnswer) -> None:
    shards_count = answer.data_shards + answer.parity_shards
    loss = f"{answer.parity_shards} of them may fail" if answer.parity_shards else "none of them may fail"
    geometry = f"{answer.data_shards}+{answer.parity_shards} shards"
    output.line(f"{geometry}: an object lies on {shards_count} of {len(answer.targets)} targets, {loss}")
    columns = [
        Column("TARGET"),
        Column("STATE"),
        *(Column(title, right=True) for title in ("USED", "FREE", "SIZE", "ERRORS")),
        Column(""),
    ]
    output.table(columns, [_target_row(target) for target in answer.targets])


def _target_row(target: TargetStatus) -> list[str]:
    state: str = target.state
    if state == "up":
        state = "full" if target.is_full else "up" if target.is_writable else "read-only"
    return [
        target.path,
        state,
        size_or_dash(target.used_bytes),
        size_or_dash(target.free_bytes),
        size_or_dash(target.total_bytes),
        str(target.errors_count),
        target.detail,
    ]


def _show_files(files: Sequence[Where]) -> None:
    columns = [
        Column("PATH"),
        Column("SIZE", right=True),
        Column("TIERS"),
        Column("HOT", right=True),
        Column("CHUNKS", right=True),
        Column("PIN"),
        Column("INODE", right=True),
        Column("VERSION"),
    ]
    output.table(columns, [_file_row(file) for file in files])


def _file_row(file: Where) -> list[str]:
    pin = "-" if file.pin is None else file.pin.owner + (f": {file.pin.reason}" if file.pin.reason else "")
    if file.kind == "directory":
        return [file.path.rstrip("/") + "/", "-", "-", size(file.hot_bytes), "-", pin, str(file.inode), "-"]
    chunks = f"{file.chunks_present}/{file.chunks_total}"
    return [
        file.path,
        size(file.size_bytes),
        " ".join(file.residency),
        size(file.hot_bytes),
        chunks,
        pin,
        str(file.inode),
        file.version,
    ]


def _first(failures: Sequence[Failure]) -> dict[str, str]:
    return {"error": failures[0].error, "hint": failures[0].hint} if failures else {}


def _complain(failures: Sequence[Failure]) -> int:
    for one in failures:
        output.complaint(f"{one.error}; {one.hint}" if one.hint else one.error)
    return FAILED if failures else 0
