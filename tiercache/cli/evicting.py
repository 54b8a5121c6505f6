"""`evict`: make room on the local disk by hand."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tiercache.admin.messages import EvictRequest, JobStatus
from tiercache.cli import output
from tiercache.cli.human import size
from tiercache.cli.options import Json, PathArguments, Socket

OUTCOMES = (
    ("demoted", "written to the warm tier"),
    ("already", "in the warm tier already"),
    ("dropped", "dropped"),
    ("in_use", "kept: in use"),
    ("pinned", "kept: pinned"),
)


def evict(
    paths: PathArguments,
    to: Annotated[
        Literal["warm", "drop"] | None,
        typer.Option("--to", help="Where to: `warm` (default, when there are warm targets), or nowhere (`drop`)."),
    ] = None,
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Remove files, directories or datasets from the local disk, to the warm tier if there is one. Returns when it is done."""
    from tiercache.admin.client import Client
    from tiercache.cli.following import conclude, follow
    from tiercache.cli.target import target_of

    target = target_of(socket, paths)
    with Client(target.socket) as client:
        status = follow(client, client.evict(EvictRequest(target.paths, to)))
    if not as_json and status.state == "done" and (status.total_count or not status.failures):
        output.line(_summary(status))
    return conclude(status, as_json=as_json)


def _summary(status: JobStatus) -> str:
    if not status.total_count:
        return "nothing of it is hot"
    parts = [f"{status.counts[key]} {text}" for key, text in OUTCOMES if status.counts.get(key)]
    failed_count = status.total_count - sum(status.counts.values())
    if failed_count > 0:
        parts.append(f"{failed_count} failed")
    files = "1 file" if status.total_count == 1 else f"{status.total_count} files"
    return f"{files}, {size(status.total_bytes)}: {', '.join(parts)}"
