"""`pin`, `unpin`, `pins`: keep what a job needs on the local disk."""

from __future__ import annotations

import os
import pwd
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiercache.admin.messages import PinAnswer, PinProgress, PinRequest, PinStatus
from tiercache.cli import output
from tiercache.cli.human import moment, size
from tiercache.cli.options import Json, PathArguments, Socket
from tiercache.cli.output import Column
from tiercache.errors import UsageError

if TYPE_CHECKING:
    from tiercache.admin.client import Client

FAILED = 1
POLL_SECONDS = 0.5


def pin(
    paths: PathArguments,
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="TIME", help="Unpin by itself after this time, as in 3d or 12h.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown by `pins`.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say whether there is room.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when everything is on the local disk.")] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Fetch files, directories or datasets to the local disk and keep them there."""
    from tiercache.admin.client import Client
    from tiercache.cli.target import target_of

    if wait and dry_run:
        raise UsageError("--wait has nothing to wait for with --dry-run", hint="leave one of them out")
    ttl_seconds = _ttl_seconds(ttl)
    target = target_of(socket, paths)
    with Client(target.socket) as client:
        answer = client.pin(PinRequest(target.paths, _owner(), reason, ttl_seconds, dry_run))
        progress = _wait(client, target.paths) if wait and answer.admitted else None
    error = (
        answer.refusal if not answer.admitted else progress.last_error if progress is not None and progress.failed_count else ""
    )
    hint = (
        ""
        if answer.admitted
        else f"of {size(answer.pinnable_bytes)} that may be pinned {size(answer.pinned_bytes)} are; unpin something"
    )
    if as_json:
        output.json_document({**msgspec.to_builtins(answer), "progress": msgspec.to_builtins(progress)}, error=error, hint=hint)
    else:
        _show(answer, progress)
    if error:
        output.complaint(f"{error}; {hint}" if hint else error)
    return FAILED if error else 0


def unpin(paths: PathArguments, as_json: Json = False, socket: Socket = None) -> None:
    """Let files be evicted again. Not pinned is fine."""
    from tiercache.admin.client import Client
    from tiercache.cli.target import target_of

    target = target_of(socket, paths)
    with Client(target.socket) as client:
        answer = client.unpin(target.paths)
    if as_json:
        output.json_document(answer)
        return
    for removed in answer.removed:
        output.line(f"{removed.path}: unpinned ({size(removed.hot_bytes)} may be evicted)")
    for path in answer.not_pinned:
        output.line(f"{path}: was not pinned")


def pins(as_json: Json = False, socket: Socket = None) -> None:
    """List what is pinned, by whom and until when."""
    from tiercache.admin.client import Client
    from tiercache.admin.locate import only_daemon

    with Client(only_daemon(socket)) as client:
        answer = client.pins()
    if as_json:
        output.json_document(answer)
    elif answer.pins:
        columns = [
            Column("PATH"),
            Column("WANTED", right=True),
            Column("HOT", right=True),
            Column("UNTIL"),
            Column("OWNER"),
            Column("REASON"),
        ]
        output.table(columns, [_row(one) for one in answer.pins])
    else:
        output.line("nothing is pinned")


def _wait(client: Client, paths: list[str]) -> PinProgress:
    """Poll until nothing more will come. Without a bound: the user chose to wait, and Ctrl-C leaves the pin as it is."""
    with output.progress_bar("fetching") as update:
        while not (progress := client.pin_progress(paths)).done:
            update(progress.hot_bytes, progress.wanted_bytes)
            time.sleep(POLL_SECONDS)
    return progress


def _show(answer: PinAnswer, progress: PinProgress | None) -> None:
    wants = f"{answer.objects_count} files, {size(answer.wanted_bytes)}, of which {size(answer.hot_bytes)} are hot already"
    if not answer.admitted:
        return
    if answer.dry_run:
        room = size(max(answer.pinnable_bytes - answer.pinned_bytes, 0))
        output.line(f"there is room: {wants}; {room} more may be pinned")
        return
    for one in answer.pins:
        until = "until unpinned" if one.expires_seconds is None else f"until {moment(one.expires_seconds)}"
        output.line(f"{one.path}: pinned {until}")
    if progress is None:
        output.line(f"{wants}; the rest is being fetched")
    else:
        failed = f", {progress.failed_count} failed" if progress.failed_count else ""
        output.line(f"{progress.hot_objects_count} of {progress.objects_count} files are hot, {size(progress.hot_bytes)}{failed}")


def _row(one: PinStatus) -> list[str]:
    path = one.path if one.exact or one.path.endswith("/") else one.path + "/"
    return [path, size(one.wanted_bytes), size(one.hot_bytes), moment(one.expires_seconds), one.owner, one.reason]


def _ttl_seconds(text: str | None) -> float | None:
    from tiercache.config.quantity import parse_duration

    if text is None:
        return None
    try:
        seconds = parse_duration(text)
    except UsageError as error:
        raise UsageError(f"--ttl: {error}", hint=error.hint) from error
    if seconds < 1:
        raise UsageError(
            f"--ttl: {text!r} is less than a second", hint="write a time such as 12h, or leave it out to pin until `unpin`"
        )
    return seconds


def _owner() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
