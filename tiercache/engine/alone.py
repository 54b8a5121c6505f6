"""Things that only one task at a time may have in hand, each with others or alone. Used on the event loop only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import trio

K = TypeVar("K", bound=Hashable)


class Alone(Generic[K]):
    def __init__(self) -> None:
        self._busy: dict[K, trio.Event] = {}

    @asynccontextmanager
    async def with_all(self, keys: Collection[K]) -> AsyncIterator[None]:
        """Wait until nobody has any of these. All are taken at once, so that no two wait for each other."""
        while (key := next(filter(self._busy.__contains__, keys), None)) is not None:
            await self._busy[key].wait()
        event = trio.Event()
        self._busy |= dict.fromkeys(keys, event)
        try:
            yield
        finally:
            for key in set(keys):
                del self._busy[key]
            event.set()
