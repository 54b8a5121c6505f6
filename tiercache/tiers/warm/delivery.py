"""A plain stripe on its way into a sink: its pieces are put there in order, each as soon as those before it have come.

Waiting for all k pieces instead costs the first byte of a file the time of a whole stripe, and leaves the disk that is written
idle while the others are read (measured: 64 MiB in 82 ms, and in 65 this way).

Every piece was verified by itself. That all of them together are what was written shows with the last one, which is not handed on
when they are not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import takewhile

import trio
import xxhash

from tiercache.core.stripe import Stripe
from tiercache.errors import Damaged, TierError
from tiercache.tiers.sink import put
from tiercache.tiers.tier import Place, Sink
from tiercache.tiers.warm.pieces import Piece

InThread = Callable[[partial[None]], Awaitable[None]]


class Delivery:
    """Of the data pieces of one stripe, all of it. Used on the event loop only; `in_thread` runs what blocks."""

    def __init__(self, stripe: Stripe, data_count: int, sink: Sink, in_thread: InThread) -> None:
        self._stripe = stripe
        self._piece_bytes = stripe.piece_bytes(data_count)
        self._sink = sink
        self._in_thread = in_thread
        self._hash = xxhash.xxh3_64()
        self._pieces: dict[int, Piece] = {}
        self._error: TierError | None = None
        self._changed = trio.Event()

    @property
    def indexes(self) -> range:
        """Of the pieces that have bytes of the stripe."""
        return range(-(-self._stripe.logical_bytes // self._piece_bytes))

    def offer(self, index: int, piece: Piece) -> None:
        """A piece that was verified. Parity pieces, and those that are known, do no harm."""
        self._pieces.setdefault(index, piece)
        self._changed.set()

    def fail(self, error: TierError) -> None:
        """No more pieces will come. What was put there before stays."""
        self._error = error
        self._changed.set()

    async def run(self) -> None:
        """Until all of the stripe has landed. Raises what it failed with, Damaged, and what the sink raises."""
        size_bytes = self._stripe.logical_bytes
        place = self._sink.place(size_bytes)
        done_bytes = 0
        while done_bytes < size_bytes:
            views = await self._next(done_bytes)
            length = sum(map(len, views))
            is_last = done_bytes + length == size_bytes
            await self._in_thread(partial(self._put, place, views, done_bytes, is_last))
            self._sink.landed(length, self._stripe.digest if is_last else None)
            done_bytes += length

    async def _next(self, begin: int) -> list[memoryview]:
        """All that have come of those that are next."""
        first = begin // self._piece_bytes
        while first not in self._pieces:
            if self._error is not None:
                raise self._error
            self._changed = trio.Event()
            await self._changed.wait()
        views = []
        for index in takewhile(self._pieces.__contains__, self.indexes[first:]):
            views.append(memoryview(self._pieces[index])[: self._stripe.logical_bytes - index * self._piece_bytes])
        return views

    def _put(self, place: Place, views: Sequence[memoryview], begin: int, is_last: bool) -> None:
        """In a thread, never two at once."""
        for view in views:
            self._hash.update(view)
        if is_last and self._hash.intdigest() != self._stripe.digest:
            raise Damaged("warm: a stripe's pieces are right, and their sum is not")
        put(place, views, begin)
