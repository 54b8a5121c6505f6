"""What waits for the writer: work in its order, and last accesses on the side.

Work that nobody waits for lingers a moment: a small file that is filled makes three changes, and a transaction (and a wake-up of
the writer's thread) for each would cost more than fetching it. A waiter takes everything before it along at once.

A `Touch` is not worth a transaction of its own: they are added up per object and go along every
`touch_seconds`. `MAX_TOUCHED` objects are remembered; beyond that the oldest are dropped (eviction then
believes these objects a little older than they are). Everything else is kept whatever happens, in the order in which it came:
what may wait is bounded by those who give it, because fills hold reservations and `commit` holds a slot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import trio

from tiercache.core.record import ObjectId
from tiercache.errors import HotTierError
from tiercache.index.changes import Pruned, PruneStep
from tiercache.index.index import Change, Touch

LINGER_SECONDS = 0.05
"""How long work that nobody waits for may wait for more. If the process dies before, a chunk is fetched again."""

MAX_TOUCHED = 65_536
MAX_BATCH_CHANGES = 8_192
"""Changes a transaction takes together; one `commit` is never split, so a longer one goes alone."""


class Ticket:
    """What one waiter waits for. Settled by the writer's thread, seen on the event loop."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self.done = trio.Event()
        self.error: HotTierError | None = None
        self.pruned: Pruned | None = None

    def settle(self, error: HotTierError | None) -> None:
        self.error = error
        with suppress(trio.RunFinishedError):  # the loop ended, and its waiters with it
            self._token.run_sync_soon(self.done.set)


class Work(msgspec.Struct, frozen=True):
    """Changes of one `commit` or `submit`; a `submit` has no ticket."""

    changes: Sequence[Change | PruneStep]
    sync: bool = False
    ticket: Ticket | None = None


class Queue:
    """Filled from any thread, emptied by the writer's."""

    def __init__(self, touch_seconds: float) -> None:
        self._touch_seconds = touch_seconds
        self._changed = threading.Condition(threading.Lock())
        self._works: deque[Work] = deque()
        self._works_due = 0.0
        self._awaited_count = 0
        self._touches: dict[ObjectId, Touch] = {}
        self._touches_due = 0.0
        self._closed = False

    def put(self, work: Work) -> bool:
        """False when the writer takes no more."""
        with self._changed:
            if self._closed:
                return False
            if not self._works:
                self._works_due = time.monotonic() + LINGER_SECONDS
            self._works.append(work)
            self._awaited_count += work.ticket is not None
            if work.ticket is not None or len(self._works) == 1:
                self._changed.notify()
            return True

    def touch(self, touch: Touch) -> None:
        with self._changed:
            former = self._touches.pop(touch.object_id, None)
            if former is not None:
                newest = max(former.accessed_seconds, touch.accessed_seconds)
                touch = Touch(touch.object_id, newest, former.accesses + touch.accesses)
            elif len(self._touches) >= MAX_TOUCHED:
                del self._touches[next(iter(self._touches))]
            elif not self._touches:
                self._touches_due = time.monotonic() + self._touch_seconds
                self._changed.notify()
            self._touches[touch.object_id] = touch

    def close(self) -> None:
        """Nothing more comes in; what is there is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, at_most_seconds: float | None) -> list[Work] | None:
        """The next batch, as soon as there is one; empty after `at_most_seconds`; None when closed and empty."""
        deadline = None if at_most_seconds is None else time.monotonic() + at_most_seconds
        with self._changed:
            while True:
                now = time.monotonic()
                batch = self._batch(now)
                if batch:
                    return batch
                if self._closed:
                    return None
                if deadline is not None and now >= deadline:
                    return []
                due = (deadline, self._touches_due if self._touches else None, self._works_due if self._works else None)
                wake = [at for at in due if at is not None]
                self._changed.wait(max(0.0, min(wake) - now) if wake else None)

    def _batch(self, now: float) -> list[Work]:
        batch: list[Work] = []
        room = MAX_BATCH_CHANGES
        is_due = self._awaited_count > 0 or self._closed or now >= self._works_due
        while is_due and self._works and (not batch or len(self._works[0].changes) <= room):
            work = self._works.popleft()
            room -= len(work.changes)
            self._awaited_count -= work.ticket is not None
            batch.append(work)
        if self._touches and (self._closed or now >= self._touches_due):
            batch.append(Work(list(self._touches.values())))
            self._touches.clear()
        return batch
