"""Following a job of the daemon to its end, and saying what became of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tiercache.admin.messages import Failure, JobStarted, JobStatus
from tiercache.cli import output
from tiercache.errors import NoDaemon, TiercacheError

if TYPE_CHECKING:
    from tiercache.admin.client import Client

FAILED = 1
POLL_SECONDS = 0.2


def follow(client: Client, started: JobStarted) -> JobStatus:
    """Poll until it has ended, without a bound. Ctrl-C leaves it running."""
    if started.joined:
        output.complaint(f"the {started.kind} is running already: this shows how far it is")
    try:
        with output.progress_bar(started.kind) as update:
            while (status := client.job(started.job)).state == "running":
                if status.total_bytes:
                    update(status.done_bytes, status.total_bytes)
                else:
                    update(status.done_count, status.total_count, str)
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        output.complaint(f"the {started.kind} goes on in the daemon; the same command again shows how far it is")
        raise
    except NoDaemon as error:
        hint = "when the daemon runs again (`tiercache status`), give the same command again"
        raise NoDaemon(f"the daemon ended before the {started.kind} did", hint=hint) from error
    return status


def trouble(status: JobStatus, unrepaired_hint: str = "") -> TiercacheError | None:
    """What went wrong first, if anything did. `unrepaired_hint` says what to do about damage that is left."""
    if status.state == "failed":
        return TiercacheError(status.error, hint=status.hint)
    if status.failures:
        first = status.failures[0]
        return TiercacheError(_named(first), hint=first.hint)
    unrepaired_count = status.damaged_count - status.repaired_count
    if unrepaired_count > 0:
        error = f"{unrepaired_count} of {status.damaged_count} damaged things are not repaired"
        return TiercacheError(error, hint=unrepaired_hint)
    return None


def conclude(status: JobStatus, *, as_json: bool, unrepaired_hint: str = "") -> int:
    """Tell all that went wrong; the exit code. With `as_json` this is also the document."""
    error = trouble(status, unrepaired_hint)
    if as_json:
        output.json_document(status, error="" if error is None else str(error), hint="" if error is None else error.hint)
    if error is None:
        return 0
    for failure in status.failures:
        output.failure(TiercacheError(_named(failure), hint=failure.hint))
    if status.failed_count > len(status.failures):
        output.complaint(f"and {status.failed_count - len(status.failures)} more failures; the log has them")
    if not status.failures:
        output.failure(error)
    return FAILED


def _named(failure: Failure) -> str:
    return failure.error if failure.path in failure.error else f"{failure.path}: {failure.error}"
