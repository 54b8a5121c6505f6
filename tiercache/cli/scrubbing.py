"""`scrub`, `rebuild-index`: look whether what is kept is what was written, and what is there."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tiercache.admin.messages import JobStatus, ScrubRequest
from tiercache.cli import output
from tiercache.cli.human import size
from tiercache.cli.options import Json, Socket

_WITHOUT_REPAIR = "run it again with --repair"
_AFTER_REPAIR = "`tiercache targets` shows whether a target is missing"


def scrub(
    tier: Annotated[
        Literal["hot", "warm"] | None,
        typer.Option("--tier", help="What to look at; without it the warm tier, or the hot one when there are no warm targets."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Rebuild what is damaged or missing. (Damage of the hot tier is always mended.)")
    ] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> int:
    """Read everything that a tier holds and compare it with its checksums. Fails when damage is left."""
    from tiercache.admin.client import Client
    from tiercache.admin.locate import only_daemon
    from tiercache.cli.following import conclude, follow

    with Client(only_daemon(socket)) as client:
        status = follow(client, client.scrub(ScrubRequest(tier, repair)))
    if not as_json:
        for line in status.lines:
            output.line(line)
        if status.state == "done":
            output.line(_summary(status))
    return conclude(status, as_json=as_json, unrepaired_hint=_AFTER_REPAIR if repair else _WITHOUT_REPAIR)


def rebuild_index(as_json: Json = False, socket: Socket = None) -> int:
    """Forget what the daemon knows of copies in the warm tier, and read it again from all targets."""
    from tiercache.admin.client import Client
    from tiercache.admin.locate import only_daemon
    from tiercache.cli.following import conclude, follow

    with Client(only_daemon(socket)) as client:
        status = follow(client, client.rebuild_index())
    if not as_json and status.state == "done":
        count = status.counts
        packs = "1 pack" if count["packs"] == 1 else f"{count['packs']} packs"
        held = f"{count['copies']} objects by themselves, {count['members']} in {packs}, {size(status.done_bytes)}"
        output.line(f"{status.done_count} of {status.total_count} targets: {held}")
    return conclude(status, as_json=as_json)


def _summary(status: JobStatus) -> str:
    found = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(status.counts.items()) if count)
    damage = "no damage"
    if status.damaged_count:
        damage = f"{status.damaged_count} damaged, {status.repaired_count} repaired"
    return f"{status.done_count} objects, {size(status.done_bytes)}: {damage}" + (f"; {found}" if found else "")
