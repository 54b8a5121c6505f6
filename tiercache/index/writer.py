"""The single writer: a thread that commits in groups.

Whatever has come in while one transaction was being flushed goes into the next one together, so that the rate of flushes
is the disk's and not the callers'. A batch is all or nothing. When it fails, exactly its waiters get the error,
and what nobody waits for is dropped: the callers' own memory stays right, the index only knows less (a chunk that is
fetched again, a name that is listed again). A sick disk (HotSick) leaves the writer at work for the next batch; damage in
the file (IndexDamaged) and a bug end it, every later `commit` says so, and `watch` tells the daemon.

Totals and pins are published after each commit as one frozen record: readers take them without a lock.

The sidecar log is written after the commit and is best effort, because the commit stands: a frame that could not be written
costs a fetch after a later damage. Only `sync` promises more, so its waiters get the error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import trio

from tiercache.core.record import Pin
from tiercache.errors import HotSick, HotTierError, IndexDamaged
from tiercache.index.changes import Applying, Pruned, PruneStep
from tiercache.index.compaction import MIN_LOG_BYTES, PAUSE_SECONDS, Compaction, is_due
from tiercache.index.environment import Environment, View
from tiercache.index.index import Change, Touch
from tiercache.index.queue import Queue, Ticket, Work
from tiercache.index.records import RESTART, Meta
from tiercache.index.sidecar import ObjectLog

MAX_WAITING_COMMITS = 1024
LOG_GROWTH_RATIO = 1.25
"""How much the log must grow before it is looked at again."""


class Published(msgspec.Struct, frozen=True):
    """What was true after the last commit."""

    meta: Meta
    pins: dict[bytes, Pin]


class Writer:
    def __init__(self, environment: Environment, log: ObjectLog, published: Published, touch_seconds: float) -> None:
        self.published = published
        self._environment = environment
        self._log = log
        self._queue = Queue(touch_seconds)
        self._slots = trio.Semaphore(MAX_WAITING_COMMITS)
        self._token = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        self._failure: BaseException | None = None
        self._compaction: Compaction | None = None
        self._look_at_bytes = 0
        self._thread = threading.Thread(target=self._run, name="tiercache-index-writer", daemon=True)
        self._thread.start()

    async def commit(self, changes: Sequence[Change | PruneStep], *, sync: bool) -> Pruned | None:
        """Cancelling the wait does not take the changes back. Raises HotSick, IndexDamaged."""
        async with self._slots:
            ticket = Ticket(self._token)
            if not self._queue.put(Work(tuple(changes), sync, ticket)):
                raise self._refusal()
            await ticket.done.wait()
        if ticket.error is not None:
            raise ticket.error
        return ticket.pruned

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def log_bytes(self) -> int:
        return self._log.size_bytes

    def submit(self, changes: Sequence[Change]) -> None:
        lasting = []
        for change in changes:
            if isinstance(change, Touch):
                self._queue.touch(change)
            else:
                lasting.append(change)
        if lasting:
            self._queue.put(Work(lasting))

    async def watch(self) -> None:
        """Returns when the writer was closed; raises what ended it otherwise (IndexDamaged, or IndexDamaged from a bug)."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._refusal()

    async def aclose(self) -> None:
        """Commit what is queued and end the thread. Idempotent."""
        self._queue.close()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join)

    # the writer's thread

    def _run(self) -> None:
        try:
            while (batch := self._queue.take(PAUSE_SECONDS if self._compaction else None)) is not None:
                if batch:
                    self._carry_out(batch)
                self._tend_log()
        except IndexDamaged as damage:
            self._failure = damage
        except BaseException as bug:
            self._failure = bug
            raise
        finally:
            self._refuse_the_rest()
            if self._compaction is not None:
                self._compaction.abandon()
            self._log.close()

    def _carry_out(self, batch: list[Work]) -> None:
        try:
            applied, results = self._environment.write(lambda view: self._apply(view, batch))
        except HotSick as sick:
            _settle(batch, sick)
            return
        except BaseException as fatal:
            self._failure = fatal
            _settle(batch, self._refusal())
            raise
        self.published = Published(applied.meta, applied.pins)
        promise_broken = self._keep_promises(applied.logged, any(work.sync for work in batch))
        for work in batch:
            if work.ticket is not None:
                work.ticket.pruned = results.get(id(work))
                work.ticket.settle(promise_broken if work.sync else None)

    def _apply(self, view: View, batch: list[Work]) -> tuple[Applying, dict[int, Pruned]]:
        applying = Applying(view, self.published.meta, self.published.pins)
        results: dict[int, Pruned] = {}
        for work in batch:
            for change in work.changes:
                if isinstance(change, PruneStep):
                    results[id(work)] = applying.prune(change)
                else:
                    applying.apply(change)
        applying.finish()
        return applying, results

    def _keep_promises(self, frames: list[bytes], sync: bool) -> HotSick | None:
        """Log and flush after a commit. The commit stands whatever happens here, so the error is for `sync` waiters only."""
        try:
            if frames:
                self._log.append(frames)
            if sync:
                self._environment.sync()
                self._log.sync()
        except HotSick as sick:
            return sick
        return None

    def _tend_log(self) -> None:
        """One slice of a running compaction, or a look at whether one is due. A sick disk puts it off."""
        try:
            if self._compaction is not None:
                rewritten = self._compaction.step(self._environment)
                if rewritten is not None:
                    self._log, self._compaction = rewritten, None
                    self._look_at_bytes = self._next_look()
            elif self._log.size_bytes >= self._look_at_bytes:
                self._look_at_bytes = self._next_look()
                pins = list(self.published.pins.values())
                if is_due(self._log, self._environment, self.published.meta.hot_count, pins):
                    self._compaction = Compaction(self._log, pins)
        except HotSick:
            if self._compaction is not None:
                self._compaction.abandon()
                self._compaction = None
            self._look_at_bytes = self._next_look()

    def _next_look(self) -> int:
        return max(MIN_LOG_BYTES, int(self._log.size_bytes * LOG_GROWTH_RATIO))

    def _refuse_the_rest(self) -> None:
        self._queue.close()
        while rest := self._queue.take(0.0):
            _settle(rest, self._refusal())
        with suppress(trio.RunFinishedError):  # nobody is left to be told
            self._token.run_sync_soon(self._ended.set)

    def _refusal(self) -> HotTierError:
        match self._failure:
            case None:
                return HotSick("the index is closed")
            case IndexDamaged() as damage:
                return IndexDamaged(str(damage), hint=damage.hint)
            case bug:
                refusal = IndexDamaged(f"the index writer stopped: {bug!r}", hint=RESTART)
                refusal.__cause__ = bug
                return refusal


def _settle(batch: list[Work], error: HotTierError) -> None:
    for work in batch:
        if work.ticket is not None:
            work.ticket.settle(error)
