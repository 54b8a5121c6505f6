"""The seam between the admin interface and the daemon: what an operator may ask for.

The daemon implements `Control`; `app.py` translates HTTP to it and knows nothing else. Every method
runs on the daemon's event loop, so the synchronous ones only read what is in memory. Any of them may
raise a TiercacheError, which reaches the user with its class and hint.

A path is absolute and under the mount point, or `dataset/key`; only the daemon resolves it, by its own
namespace and never through the kernel (a daemon that stats its own mount waits for itself). `app.py`
calls once for each path of `where` and `refresh`, so that one bad path does not spoil the others;
pins are admitted together, hence in one call. A request whose client has gone is not cancelled:
a method bounds its own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiercache.admin.messages import (
    EvictRequest,
    HandingOver,
    JobStarted,
    JobStatus,
    PinAnswer,
    PinProgress,
    PinRequest,
    Pins,
    Refreshed,
    ScrubRequest,
    Status,
    TargetsAnswer,
    Unpinned,
    Where,
)


class Work(Protocol):
    """What takes long: a request starts a job, which goes on by itself and is asked for by its number."""

    def evict(self, request: EvictRequest) -> JobStarted:
        """Raises UsageError when it names the warm tier and there is none. Paths that lead nowhere are failures of the job."""

    def scrub(self, request: ScrubRequest) -> JobStarted:
        """Joins the scrub of this tier that runs. Raises UsageError when that one has other options, or there is no such tier."""

    def rebuild_index(self) -> JobStarted: ...

    def job(self, number: int) -> JobStatus:
        """Raises NotFound."""

    def targets(self) -> TargetsAnswer: ...


class Control(Protocol):
    @property
    def work(self) -> Work: ...

    def status(self) -> Status: ...

    async def where(self, path: str) -> Where:
        """Raises UsageError (not ours), NotFound, or what the cold store said."""

    async def refresh(self, path: str) -> Refreshed:
        """Re-list and re-validate everything known below `path`, and let the kernel forget what changed."""

    async def pin(self, request: PinRequest) -> PinAnswer:
        """Durable when it returns (except for a dry run); a refusal for want of room is an answer, not an error."""

    async def unpin(self, paths: Sequence[str]) -> Unpinned: ...

    async def pin_progress(self, paths: Sequence[str]) -> PinProgress:
        """Of the pins that exactly these paths made. Raises NotFound when one is not pinned."""

    def pins(self) -> Pins: ...

    def metrics(self) -> bytes:
        """Prometheus text format."""

    async def stop(self) -> None:
        """Unmount (not lazily) and let the daemon end soon after this returns.

        Raises SetupError, with nothing changed, when the mount is busy.
        """

    async def hand_over(self) -> HandingOver:
        """Let this process become the program that is installed now, soon after this returns; the mount stays.

        Raises SetupError, with nothing changed, when the successor cannot be started or nothing can be handed over.
        """
