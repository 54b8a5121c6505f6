"""The disks of the hot directories: asked in threads, with a deadline, and left alone for a while when they fail.

Two kinds of trouble, because they call for different things:

* *hung*: an operation did not return. Nobody asks that disk for anything for SICK_SECONDS, or every reader would wait
  DEADLINE_SECONDS for every piece; then whoever comes next tries it again. Its thread is abandoned.
* *sick*: it refused bytes. Nothing new is put there for SICK_SECONDS, or every fill would be fetched twice. What lies there is
  still read: one bad sector is not a dead disk, and an error comes at once and costs the reader nothing but the way past.

Overload is not taken for death. An operation's clock starts when it has its thread; THREADS run at once in each directory, so
that a disk that hangs takes no thread from the others. Abandoned ones are bounded by ABANDONED: beyond that an operation gets no
thread, which is taken for the hang that it is. `syncfs` has no deadline: writing back gigabytes may take minutes, and a call
that was abandoned would keep its verdict on the written bytes to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import structlog
import trio

from tiercache.errors import HotSick
from tiercache.tiers.hot import HotFile, Placed, place, read, read_resident

log = structlog.get_logger()
T = TypeVar("T")

SICK_SECONDS = 10.0
DEADLINE_SECONDS = 10.0
THREADS = 32
ABANDONED = 32
PLACED_LEAST_BYTES = 32 << 10
"""A shorter read is copied sooner than a thread is woken for it."""


def find_resident(file: HotFile, offset: int, length: int, *, may_place: bool) -> bytes | Placed | None:
    """These bytes, or (`may_place`) where they lie, if they are in the page cache. Never waits for a disk. Raises HotSick."""
    if may_place and length >= PLACED_LEAST_BYTES:
        return place(file, offset, length)
    return read_resident(file, offset, length)


class Disks:
    """One disk for each of `count` hot directories, by position. `clock` gives Unix seconds."""

    def __init__(self, count: int, clock: Callable[[], float], *, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self.deadline_seconds = deadline_seconds
        self._clock = clock
        self._turns = [trio.Semaphore(THREADS) for _ in range(count)]
        self._threads = [trio.CapacityLimiter(THREADS + ABANDONED) for _ in range(count)]
        self._sick_until = [-math.inf] * count
        self._hung_until = [-math.inf] * count

    async def run(self, directory: int, work: Callable[..., T], *args: object) -> T:
        """What the blocking `work` returns or raises. Raises HotSick when it does not return, at once while the disk is hung."""
        async with self._turns[directory]:
            self._refuse_hung(directory)
            with trio.move_on_after(self.deadline_seconds):
                job = partial(work, *args)
                return await trio.to_thread.run_sync(job, abandon_on_cancel=True, limiter=self._threads[directory])
        self._hung_until[directory] = self._clock() + SICK_SECONDS
        log.error("hot_directory_hangs", directory=directory, waited_seconds=self.deadline_seconds, retry_seconds=SICK_SECONDS)
        raise HotSick(f"hot directory {directory} did not answer for {self.deadline_seconds:g} s")

    async def read(self, file: HotFile, offset: int, length: int, *, may_place: bool) -> bytes | Placed:
        """These bytes, or (`may_place`) where they lie. In a thread only what is not in the page cache. Raises HotSick."""
        found = find_resident(file, offset, length, may_place=may_place)
        if found is None:
            found = await self.run(file.directory, read, file, offset, length)
        return found

    async def wait_for(self, directory: int, work: Callable[..., T], *args: object) -> T:
        """Like `run`, however long it takes. One at a time for a directory: the caller sees to that."""
        self._refuse_hung(directory)
        return await trio.to_thread.run_sync(partial(work, *args), abandon_on_cancel=True)

    def _refuse_hung(self, directory: int) -> None:
        if self.is_hung(directory):
            raise HotSick(f"hot directory {directory} did not answer a moment ago")

    def failed(self, directory: int, error: HotSick) -> None:
        """The disk did not take bytes."""
        self._sick_until[directory] = self._clock() + SICK_SECONDS
        log.error("hot_directory_sick", directory=directory, error=error.line, retry_seconds=SICK_SECONDS)

    def is_hung(self, directory: int) -> bool:
        """Did it leave an operation without an answer a moment ago?"""
        return self._is_before(self._hung_until[directory])

    def is_sick(self, directory: int) -> bool:
        """Did it hang, or refuse bytes, a moment ago? Then nothing new belongs there."""
        return self._is_before(self._sick_until[directory]) or self.is_hung(directory)

    def _is_before(self, until_seconds: float) -> bool:
        return 0.0 < until_seconds - self._clock() <= SICK_SECONDS  # further off: the clock was set back
