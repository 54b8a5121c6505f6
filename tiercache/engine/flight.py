"""Single flight: tasks that want the same thing at the same time share one piece of work.

The work runs in a task of its own, in the nursery that was given at the start, so a waiter that is cancelled
takes nothing away from the others. Every waiter gets the result, or its own copy of the error (an
exception that is raised in several tasks would collect the traceback of all). Only TiercacheErrors are delivered: anything
else is a bug and ends the nursery.

`anew` is for callers who know that what is in flight may be too old (an object has just turned out to be
overwritten): they share only work that was started after they came.

There are never more flights than waiting tasks plus those whose waiters went away; each ends within the
deadline of the tier below.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import trio

from tiercache.errors import TiercacheError, Unavailable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    def __init__(self, era: int) -> None:
        self.era = era
        self.landed = trio.Event()
        self.values: list[V] = []
        self.error: TiercacheError = Unavailable("the daemon is stopping")


class Flights(Generic[K, V]):
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._running: dict[K, _Flight[V]] = {}
        self._era = 0

    async def join(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """The result of the work in flight for `key`, which is started if there is none. Raises what it raised."""
        flight = self._running.get(key)
        while flight is not None and flight.era < self._era:
            await flight.landed.wait()
            flight = self._running.get(key)
        if flight is None:
            flight = self._running[key] = _Flight(self._era)
            self._nursery.start_soon(self._fly, key, work, flight)
        await flight.landed.wait()
        if not flight.values:
            raise copy.copy(flight.error) from flight.error
        return flight.values[0]

    def close_boarding(self) -> None:
        """Nobody joins any more what is in flight now: what it will bring may be too old for those who come."""
        self._era += 1

    async def anew(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """Like `join`, but with work that was started after this call."""
        flight = self._running.get(key)
        if flight is not None:
            await flight.landed.wait()
        return await self.join(key, work)

    async def _fly(self, key: K, work: Callable[[], Awaitable[V]], flight: _Flight[V]) -> None:
        try:
            flight.values.append(await work())
        except TiercacheError as error:
            flight.error = error
        finally:
            del self._running[key]
            flight.landed.set()
