"""At most n operations of a tier at once, first come first served, in two classes.

Why limit below the retries and not above: `Retrying(Limited(Measured(tier)))` gives the slot back
while a retry sleeps, so a few failing reads cannot keep healthy ones waiting.

Two classes: somebody waits for a *foreground* operation, nobody (yet) for a *background* one. The same
tier is seen through two views that share the slots (`Limited.background()`): a parameter in the protocol would burden
every tier with it, and a context variable would be invisible at the call site. Rules:

* A free slot goes to the longest waiting foreground operation, else to the longest waiting background one.
* Background operations never hold all slots: a quarter (at least one, of more than one) stays free for
  foreground, which therefore does not wait for the end of a long transfer that nobody needs now.
* After `TURN_COUNT` foreground grants in a row over a waiting background operation, one of those goes first: a
  reader may have joined a fill that was begun in the background, and pins must get on under load.
"""

from __future__ import annotations

import copy

import trio

from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.tiers.begun import Begun, Ended, begin_of
from tiercache.tiers.tier import MAX_PAGE, Cold, Sink

TURN_COUNT = 8


class Slots:
    """The slots that the two views share. Used on the event loop only."""

    def __init__(self, concurrency: int) -> None:
        assert concurrency >= 1
        self.background_limit = max(1, concurrency - max(1, concurrency // 4))
        self._free = concurrency
        self._background_running = 0
        self._turns = 0
        self._foreground = trio.lowlevel.ParkingLot()
        self._background = trio.lowlevel.ParkingLot()

    @property
    def waiting_count(self) -> int:
        return len(self._foreground) + len(self._background)

    def held(self, *, background: bool) -> Slot:
        """One slot for the length of an `async with`; waits for it in turn. Cancellation while waiting costs nothing."""
        return Slot(self, background)

    def enter_now(self, *, background: bool) -> bool:
        """Take a slot, if it need not be waited for; `leave` gives it back."""
        is_free = not (self._background if background else self._foreground) and self._may_begin(background)
        if is_free:
            self._take(background)
        return is_free

    async def _enter(self, background: bool) -> None:
        if not self.enter_now(background=background):
            await (self._background if background else self._foreground).park()

    def leave(self, background: bool) -> None:
        self._free += 1
        self._background_running -= background
        self._hand_over()

    def _may_begin(self, background: bool) -> bool:
        return self._free > 0 and (not background or self._background_running < self.background_limit)

    def _take(self, background: bool) -> None:
        self._free -= 1
        self._background_running += background
        assert self._free >= 0

    def _hand_over(self) -> None:
        """Give free slots to those who wait; the slot is theirs before they run, so nobody can slip in between."""
        while self._free > 0:
            background_next = bool(self._background) and self._may_begin(True)
            if self._foreground and not (background_next and self._turns >= TURN_COUNT):
                self._turns = self._turns + 1 if background_next else 0
                self._take(False)
                self._foreground.unpark()
            elif background_next:
                self._turns = 0
                self._take(True)
                self._background.unpark()
            else:
                return


class Slot:
    """A class, because a decorated generator takes five times as long to enter and leave, for every read of a small file."""

    __slots__ = ("_background", "_slots")

    def __init__(self, slots: Slots, background: bool) -> None:
        self._slots = slots
        self._background = background

    async def __aenter__(self) -> None:
        await self._slots._enter(self._background)

    async def __aexit__(self, *_: object) -> None:
        self._slots.leave(self._background)


class Limited:
    """A `Cold` tier of which at most `concurrency` operations run at once; this is the foreground view."""

    def __init__(self, cold: Cold, concurrency: int) -> None:
        self.name = cold.name
        self.source_id = cold.source_id
        self.slots = Slots(concurrency)
        self._cold = cold
        self._begin = begin_of(cold)
        self._is_background = False

    def background(self) -> Limited:
        """The same tier and the same slots, for operations that nobody waits for."""
        view = copy.copy(self)
        view._is_background = True
        return view

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        async with self.slots.held(background=self._is_background):
            await self._cold.read(ref, offset, length, sink)

    def begin(self, ref: ObjectRef, sink: Sink, ended: Ended) -> Begun | None:
        is_background = self._is_background
        if not self.slots.enter_now(background=is_background):
            return None

        def left(error: Exception | None) -> None:
            self.slots.leave(is_background)
            ended(error)

        begun = self._begin(ref, sink, left)
        if begun is None:
            self.slots.leave(is_background)
        return begun

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        async with self.slots.held(background=self._is_background):
            return await self._cold.list(prefix, delimiter=delimiter, token=token, limit=limit)

    async def head(self, key: str) -> Listed:
        async with self.slots.held(background=self._is_background):
            return await self._cold.head(key)

    async def aclose(self) -> None:
        await self._cold.aclose()
