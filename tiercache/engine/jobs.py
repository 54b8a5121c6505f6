"""Work that an operator started and that outlasts the request: it goes on when the one who asked has gone.

A job is a task of the engine's nursery, so it ends with the daemon. At most `MAX_RUNNING` run at a time, and the last `MAX_ENDED`
that have ended can still be asked for. They are numbered from 1 in each daemon.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import structlog
import trio

from tiercache.engine.progress import Snapshot
from tiercache.errors import NotFound, TiercacheError, Unavailable, UsageError

log = structlog.get_logger()

MAX_RUNNING = 8
MAX_ENDED = 64

State = Literal["running", "done", "failed"]


class Job:
    """`terms` are what it was started with. `error` is why it was given up; single failures are in the snapshot."""

    def __init__(self, number: int, kind: str, terms: str, show: Callable[[], Snapshot]) -> None:
        self.number = number
        self.kind = kind
        self.terms = terms
        self.show = show
        self.state: State = "running"
        self.error: TiercacheError | None = None


class Jobs:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._jobs: dict[int, Job] = {}
        self._last_number = 0

    def start(self, kind: str, work: Callable[[], Awaitable[None]], show: Callable[[], Snapshot], *, terms: str = "") -> Job:
        """Begin, and return at once. Raises Unavailable when too many run."""
        if sum(job.state == "running" for job in self._jobs.values()) >= MAX_RUNNING:
            raise Unavailable(f"{MAX_RUNNING} jobs are running already", hint="wait until one of them has ended")
        self._last_number += 1
        job = self._jobs[self._last_number] = Job(self._last_number, kind, terms, show)
        self._nursery.start_soon(self._run, job, work)
        return job

    def running(self, kind: str, terms: str) -> Job | None:
        """One of this kind that was started on the same terms."""
        jobs = (job for job in self._jobs.values() if job.state == "running")
        return next((job for job in jobs if job.kind == kind and job.terms == terms), None)

    def join(self, kind: str, *, terms: str = "") -> Job | None:
        """The job of this kind that runs, of which there is one at a time. Raises UsageError when it runs on other terms."""
        running = next((job for job in self._jobs.values() if job.kind == kind and job.state == "running"), None)
        if running is not None and running.terms != terms:
            terms_text = f" {running.terms}" if running.terms else ""
            raise UsageError(f"a {kind}{terms_text} is running", hint="wait until it has ended, or give the same options")
        return running

    def find(self, number: int) -> Job:
        """Raises NotFound."""
        job = self._jobs.get(number)
        if job is None:
            raise NotFound(f"there is no job {number}", hint="the daemon was started again since, or the job ended long ago")
        return job

    async def _run(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        log.info("job_started", job=job.number, kind=job.kind)
        try:
            await work()
        except TiercacheError as error:
            job.error = error
            job.state = "failed"
            log.warning("job_failed", job=job.number, kind=job.kind, error=error.line)
        else:
            job.state = "done"
            log.info("job_done", job=job.number, kind=job.kind)
        ended = [each.number for each in self._jobs.values() if each.state != "running"]
        for number in ended[:-MAX_ENDED]:
            del self._jobs[number]
