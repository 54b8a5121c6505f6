"""What a tier costs, seen from outside: every operation is reported, and reads feed an estimate.

`Measured` wraps a `Cold`, `MeasuredTier` a plain `Tier` (a replica). Both report through an `Observe`, so that
no tier knows of metrics, and both keep an `Estimate`, by which the engine picks the cheapest tier.

The estimate has two parts, because reads differ in size by a factor of a thousand: the time to the first
byte (`latency_seconds`) and the rate after it, each an exponentially weighted mean (weight 1/8 for the
newest: about the last dozen reads count). A tier that was slow once and is therefore not asked any more would
never get a chance to show better, so an estimate *fades*: it is halved for every `HALF_LIFE_SECONDS` without a
read, and gives way the faster to the next one. Failed reads do not count here: health is another question.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import trio

from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import TiercacheError
from tiercache.tiers.begun import Anew, Begun, BrokenOff, Ended, begin_of
from tiercache.tiers.tier import MAX_PAGE, Cold, Place, Sink, Tier

WEIGHT_RATIO = 1 / 8
HALF_LIFE_SECONDS = 60.0
RATE_SAMPLE_BYTES = 64 << 10  # the rate of shorter reads is all latency and noise
WHOLE_SAMPLE_BYTES = 1 << 20
"""Of reads whose bytes come all at once, warm ones, the time for less than this is taken for latency, for more for the rate."""


class Observe(Protocol):
    def __call__(
        self, tier: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None
    ) -> None:
        """One operation has ended. `error` is None for success, else the class (trio.Cancelled for a reader that left)."""


class Estimate:
    """Running estimate of what a read costs. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._latency_seconds = 0.0
        self._seconds_per_byte = 0.0
        self._updated = clock()

    def add(self, first_byte_seconds: float, rest_seconds: float, rest_bytes: int) -> None:
        """Count a successful read: time to its first piece, then the time and size of the rest."""
        weight = 1 - (1 - WEIGHT_RATIO) * self._faded
        self._latency_seconds = _blend(self._latency_seconds, first_byte_seconds, weight)
        if rest_bytes >= RATE_SAMPLE_BYTES:
            self._seconds_per_byte = _blend(self._seconds_per_byte, rest_seconds / rest_bytes, weight)
        self._updated = self._clock()

    def add_whole(self, seconds: float, count: int) -> None:
        """Count a successful read whose bytes came all at once: what it took longer than a short one is its rate."""
        if count < WHOLE_SAMPLE_BYTES:
            self.add(seconds, 0.0, 0)
        else:
            known_seconds = min(self._latency_seconds, seconds)
            self.add(known_seconds, seconds - known_seconds, count)

    @property
    def _faded(self) -> float:
        """What is left of an old estimate: 1 just after a read, then halved again and again."""
        idle_seconds = max(0.0, self._clock() - self._updated)
        return math.exp2(-idle_seconds / HALF_LIFE_SECONDS)

    @property
    def latency_seconds(self) -> float:
        """Time to the first byte, faded; 0.0 as long as nothing is known, so that an untried tier is tried."""
        return self._latency_seconds * self._faded

    def usual_seconds(self, length: int) -> float:
        """What a read of `length` bytes took when reads were last measured, however long ago; 0.0 when none were."""
        return self._latency_seconds + length * self._seconds_per_byte

    def read_seconds(self, length: int) -> float:
        """What a read of `length` bytes is expected to take."""
        return self.latency_seconds + length * self._seconds_per_byte


def _blend(before: float, now: float, weight: float) -> float:
    return now if before == 0.0 else before + (now - before) * weight


class _Timed:
    """A sink that notes when the first piece came, and of what size it was."""

    def __init__(self, sink: Sink, clock: Callable[[], float]) -> None:
        self._sink = sink
        self._clock = clock
        self._at_start = sink.received_bytes
        self._last_count = 0
        self.started = clock()
        self.first: float | None = None
        self.first_bytes = 0

    @property
    def received_bytes(self) -> int:
        return self._sink.received_bytes

    @property
    def transferred_bytes(self) -> int:
        return self._sink.received_bytes - self._at_start

    def buffer(self, wanted_bytes: int) -> memoryview:
        return self._sink.buffer(wanted_bytes)

    def advance(self, count: int) -> None:
        self._note(count)
        self._sink.advance(count)

    def place(self, length: int) -> Place:
        return self._sink.place(length)

    def landed(self, count: int, digest: int | None = None) -> None:
        self._note(count)
        self._sink.landed(count, digest)

    def _note(self, count: int) -> None:
        if self.first is None:
            self.first = self._clock()
            self.first_bytes = count


class _Reported:
    """One operation, from the begin of a block to its end."""

    __slots__ = ("_clock", "_name", "_observe", "_operation", "_started", "_transferred")

    def __init__(
        self, name: str, operation: str, transferred: Callable[[], int], observe: Observe, clock: Callable[[], float]
    ) -> None:
        self._name = name
        self._operation = operation
        self._transferred = transferred
        self._observe = observe
        self._clock = clock
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        error = kind if kind is not None and issubclass(kind, TiercacheError | trio.Cancelled) else None
        self._observe(self._name, self._operation, self._clock() - self._started, self._transferred(), error)


class MeasuredTier:
    """A `Tier` whose reads are reported to `observe` and estimated."""

    def __init__(self, tier: Tier, observe: Observe, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = tier.name
        self.estimate = Estimate(clock)
        self._tier = tier
        self._observe = observe
        self._clock = clock
        self._begin = begin_of(tier)

    @property
    def latency_seconds(self) -> float:
        return self.estimate.latency_seconds

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        timed = _Timed(sink, self._clock)
        with self.reported("read", lambda: timed.transferred_bytes):
            await self._tier.read(ref, offset, length, timed)
        self._estimate(timed)

    def _estimate(self, timed: _Timed) -> None:
        if timed.first is None:
            return
        rest_bytes = timed.transferred_bytes - timed.first_bytes
        if rest_bytes:
            self.estimate.add(timed.first - timed.started, self._clock() - timed.first, rest_bytes)
        else:
            self.estimate.add_whole(self._clock() - timed.started, timed.first_bytes)

    def begin(self, ref: ObjectRef, sink: Sink, ended: Ended) -> Begun | None:
        timed = _Timed(sink, self._clock)

        def observed(error: Exception | None) -> None:
            if not isinstance(error, Anew):
                now = self._clock()
                kind = trio.Cancelled if isinstance(error, BrokenOff) else None if error is None else type(error)
                self._observe(self.name, "read", now - timed.started, timed.transferred_bytes, kind)
                if error is None:
                    self._estimate(timed)
            ended(error)

        return self._begin(ref, timed, observed)

    async def aclose(self) -> None:
        await self._tier.aclose()

    def reported(self, operation: str, transferred: Callable[[], int]) -> _Reported:
        """For a `with`: report the block as one operation, whichever way it ends."""
        return _Reported(self.name, operation, transferred, self._observe, self._clock)


class Measured:
    """A `Cold` tier whose operations are reported to `observe` and whose reads are estimated."""

    def __init__(self, cold: Cold, observe: Observe, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = cold.name
        self.source_id = cold.source_id
        self._cold = cold
        self._tier = MeasuredTier(cold, observe, clock=clock)

    @property
    def estimate(self) -> Estimate:
        return self._tier.estimate

    @property
    def latency_seconds(self) -> float:
        return self._tier.latency_seconds

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        await self._tier.read(ref, offset, length, sink)

    def begin(self, ref: ObjectRef, sink: Sink, ended: Ended) -> Begun | None:
        return self._tier.begin(ref, sink, ended)

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        with self._tier.reported("list", _nothing):
            return await self._cold.list(prefix, delimiter=delimiter, token=token, limit=limit)

    async def head(self, key: str) -> Listed:
        with self._tier.reported("head", _nothing):
            return await self._cold.head(key)

    async def aclose(self) -> None:
        await self._cold.aclose()


def _nothing() -> int:
    return 0
