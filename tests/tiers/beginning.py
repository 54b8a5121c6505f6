"""A tier that offers `begin` (`tiers/begun.py`) over any other, by a task behind the scenes."""

from __future__ import annotations

import trio

from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import TiercacheError
from tiercache.tiers.begun import Begun, BrokenOff, Ended
from tiercache.tiers.tier import MAX_PAGE, Cold, MemorySink, Sink

SMALL_BYTES = 1 << 20


class _Running:
    def __init__(self, ended: Ended) -> None:
        self.scope = trio.CancelScope()
        self._ended = ended
        self._has_ended = False

    def look(self) -> None:
        """It has no deadline."""

    def cancel(self) -> None:
        self.scope.cancel()

    def abandon(self) -> None:
        self.end(BrokenOff())

    def end(self, error: Exception | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._ended(error)


class Beginning:
    """`deaf`: what was begun does not hear that it is cancelled, as a thread inside a hanging disk."""

    def __init__(self, cold: Cold, *, deaf: bool = False) -> None:
        self.name = cold.name
        self.source_id = cold.source_id
        self.begun_count = 0
        self._cold = cold
        self._deaf = deaf

    def begin(self, ref: ObjectRef, sink: Sink, ended: Ended) -> Begun | None:
        if ref.size_bytes > SMALL_BYTES:
            return None
        self.begun_count += 1
        running = _Running(ended)
        trio.lowlevel.spawn_system_task(self._run, ref, sink, running)
        return running

    async def _run(self, ref: ObjectRef, sink: Sink, running: _Running) -> None:
        error: Exception | None = BrokenOff()
        memory = MemorySink(ref.size_bytes)
        with running.scope if not self._deaf else trio.CancelScope():
            try:
                await self._cold.read(ref, 0, ref.size_bytes, memory)
                while sink.received_bytes < ref.size_bytes:
                    room = sink.buffer(ref.size_bytes)
                    count = len(room)
                    room[:] = memory.view[sink.received_bytes : sink.received_bytes + count]
                    sink.advance(count)
                error = None
            except TiercacheError as failure:
                error = failure
        running.end(error)

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        await self._cold.read(ref, offset, length, sink)

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        return await self._cold.list(prefix, delimiter=delimiter, token=token, limit=limit)

    async def head(self, key: str) -> Listed:
        return await self._cold.head(key)

    async def aclose(self) -> None:
        await self._cold.aclose()
