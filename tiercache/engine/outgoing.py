"""Hot copies that may go at once, because they were demoted or are not worth it: demotion puts them here, eviction takes them.

Demotion works ahead of need (`engine/demotion.py`), so that who makes room for a fill finds enough here and waits for nothing.
Otherwise he waits: a reader that is slowed down to the speed of the warm tier is better off than the next one, who would fetch
from the cold store what was dropped. He waits WAIT_SECONDS at most; then copies go that are nowhere but cold, and nobody else
waits until demotion has got on. Used on the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from tiercache.core.eviction import Evict
from tiercache.core.record import ObjectId

WAIT_SECONDS = 2.0
IN_VAIN_SECONDS = 0.2  # what was just filled or closed can be demoted in a moment


class Outgoing:
    def __init__(self, directories_count: int) -> None:
        self._ready: list[OrderedDict[ObjectId, Evict]] = [OrderedDict() for _ in range(directories_count)]
        self._ready_bytes = [0] * directories_count
        self._wanted_bytes = [0] * directories_count
        self._wanted_since = [0.0] * directories_count
        self._is_open = False
        self._is_stalled = False
        self._changed = trio.Event()
        self._wanted = trio.Event()

    # -- demotion's side

    def open(self) -> None:
        """From now on there is somebody worth waiting for."""
        self._is_open = True

    def close(self) -> None:
        """Nothing will come for a while: nobody waits."""
        self._is_open = False
        self._change()

    def put(self, directory: int, victim: Evict) -> None:
        before = self._ready[directory].pop(victim.object_id, None)
        self._is_stalled = False
        self._ready_bytes[directory] += victim.held_bytes - (before.held_bytes if before else 0)
        self._ready[directory][victim.object_id] = victim
        self._change()

    def nothing_more(self, directory: int) -> None:
        """There is nothing to demote: who has waited for IN_VAIN_SECONDS is told that it is in vain."""
        if trio.current_time() - self._wanted_since[directory] >= IN_VAIN_SECONDS:
            self._wanted_bytes[directory] = 0
            self._change()

    def ready_bytes(self, directory: int) -> int:
        return self._ready_bytes[directory]

    def wanted_bytes(self, directory: int) -> int:
        """What somebody waits for."""
        return self._wanted_bytes[directory]

    @property
    def is_wanted(self) -> bool:
        return any(self._wanted_bytes)

    async def until_wanted(self) -> None:
        if not self.is_wanted:
            await self._wanted.wait()

    # -- eviction's side

    def __contains__(self, object_id: object) -> bool:
        return any(object_id in ready for ready in self._ready)

    async def take(self, directory: int, need_bytes: int, is_in_use: Callable[[ObjectId], bool]) -> list[Evict]:
        """Victims of about `need_bytes`; none when there are none and none will come soon. What is in use is left out."""
        taken = self._take(directory, need_bytes, is_in_use)
        if taken or not self._is_open or self._is_stalled:
            return taken
        self._wanted_bytes[directory] = need_bytes
        self._wanted_since[directory] = trio.current_time()
        wanted, self._wanted = self._wanted, trio.Event()
        wanted.set()
        with trio.move_on_after(WAIT_SECONDS) as waiting:
            while self._is_open and self._wanted_bytes[directory] and not taken:
                await self._changed.wait()
                taken = self._take(directory, need_bytes, is_in_use)
        self._wanted_bytes[directory] = 0
        self._is_stalled = waiting.cancelled_caught and not taken
        return taken

    def _take(self, directory: int, need_bytes: int, is_in_use: Callable[[ObjectId], bool]) -> list[Evict]:
        ready, taken, taken_bytes = self._ready[directory], [], 0
        while ready and taken_bytes < need_bytes:
            object_id, victim = ready.popitem(last=False)
            self._ready_bytes[directory] -= victim.held_bytes
            if not is_in_use(object_id):
                taken.append(victim)
                taken_bytes += victim.held_bytes
        return taken

    def _change(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()
