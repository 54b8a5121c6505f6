"""Blocking calls on a filesystem that may hang: each has a deadline, and the threads given up are counted.

A thread inside a system call cannot be stopped, only given up. What was lent to it (descriptor, buffer) is
its own until it returns: jobs must hold references to all that they use and touch nothing that others use.

Every given-up thread is *outstanding* until it comes back. One whose caller was cancelled (a reader that left, a hedge that
lost) hangs only from its own deadline on: slow is not dead. From `abandoned_limit` hanging threads on the filesystem is
*suspect* and nobody is let in, until enough threads came back or a probe, made in the background after a back-off,
succeeds. Such a success is a trial: the next hang ends it, with a longer back-off, so that one dead server among many
costs one thread per trial, and never more than twice the limit. Overload is not taken for a hang: the clock of a call
starts when it has its thread, not while it queues for one, and a call that got no thread is refused as busy.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import TypeVar

import trio

from tiercache.core.backoff import Backoff, delay_seconds
from tiercache.errors import Unavailable

T = TypeVar("T")


class Hung(Unavailable):
    """The call was given up: it may still happen, at any time."""


class _Call:
    """One call in a thread: knows whether it was given up, and tells when such a one comes back. It hangs from `late_at` on."""

    def __init__(self, late_at: float, came_back: Callable[[_Call], None]) -> None:
        self.late_at = late_at
        self._came_back = came_back
        self._lock = threading.Lock()
        self.was_begun = False
        self._is_running = False
        self._is_given_up = False

    def run(self, job: Callable[[], T]) -> T:
        with self._lock:
            self.was_begun = self._is_running = True
        try:
            return job()
        finally:
            with self._lock:
                self._is_running = False
                is_late = self._is_given_up
            if is_late:
                self._came_back(self)

    def give_up(self) -> bool:
        """Is a thread left behind?"""
        with self._lock:
            self._is_given_up = True
            return self._is_running


class Patience:
    """Deadlines for one filesystem. `threads_count` calls run at once; `clock` gives seconds."""

    def __init__(
        self,
        name: str,
        *,
        threads_count: int,
        abandoned_limit: int,
        policy: Backoff,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._limit = abandoned_limit
        self._policy = policy
        self._rng = rng
        self._clock = clock
        self._slots = trio.Semaphore(threads_count)
        self._threads = trio.CapacityLimiter(2 * threads_count + 2 * abandoned_limit)  # always a free one
        self._lock = threading.Lock()
        self._outstanding: set[_Call] = set()
        self._hangs_count = 0
        self._probe_at = clock()
        self._is_probing = False
        self._on_trial = False

    @property
    def outstanding_count(self) -> int:
        """Threads that were given up and have not come back."""
        return len(self._outstanding)

    @property
    def hanging_count(self) -> int:
        """Those of them whose time is over."""
        now = self._clock()
        with self._lock:
            return sum(call.late_at <= now for call in self._outstanding)

    @property
    def is_suspect(self) -> bool:
        hanging_count = self.hanging_count
        if hanging_count < self._limit:
            return False
        return not self._on_trial or hanging_count >= 2 * self._limit

    @property
    def may_probe(self) -> bool:
        """Is there a thread to spare for a probe, and none under way?"""
        return self.hanging_count < 2 * self._limit and not self._is_probing

    @property
    def wants_probe(self) -> bool:
        return self.is_suspect and self.may_probe and self._clock() >= self._probe_at

    async def run(self, job: Callable[[], T], seconds: float) -> T:
        """What `job` returns or raises. Hung after `seconds`, Unavailable while nobody is let in.

        The job's thread is given up on a deadline and on cancellation.
        """
        async with self._slots:
            if self.is_suspect:
                raise Unavailable(f"{self._name} does not answer", hint="check the filesystem that it lies on")
            return await self._watched(job, seconds)

    async def attempt(self, job: Callable[[], T], seconds: float) -> T:
        """`run` a probe, past a suspicion: when it returns, others are let in on trial. For one caller at a time."""
        self._is_probing = True
        try:
            result = await self._watched(job, seconds)
        finally:
            self._is_probing = False
        self._on_trial = self.is_suspect
        return result

    async def probe(self, job: Callable[[], None], seconds: float) -> None:
        """Try whether a suspect filesystem answers again. Raises nothing: the outcome shows in `is_suspect`."""
        try:
            await self.attempt(job, seconds)
        except Unavailable:
            return  # counted as a hang
        except OSError:
            self._hung()

    async def _watched(self, job: Callable[[], T], seconds: float) -> T:
        call = _Call(self._clock() + seconds, self._came_back)
        with trio.move_on_after(seconds):
            try:
                return await trio.to_thread.run_sync(call.run, job, abandon_on_cancel=True, limiter=self._threads)
            except trio.Cancelled:
                self._left(call)
                raise
        if not call.was_begun:
            raise Unavailable(f"{self._name} is busy: too many calls are slow", hint="check the filesystem that it lies on")
        call.late_at = -math.inf
        self._hung()
        raise Hung(f"{self._name} did not answer within {seconds:.3g} s", hint="check the filesystem that it lies on")

    def _hung(self) -> None:
        self._on_trial = False
        self._hangs_count += 1
        self._probe_at = self._clock() + delay_seconds(self._policy, self._hangs_count, self._rng.random())

    def _left(self, call: _Call) -> None:
        with self._lock:
            if call.give_up():
                self._outstanding.add(call)

    def _came_back(self, call: _Call) -> None:
        with self._lock:
            self._outstanding.discard(call)
            if len(self._outstanding) < self._limit:
                self._hangs_count = 0
