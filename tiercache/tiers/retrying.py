"""A cold tier that is asked again when it fails in a way that may pass.

Retried: what its class calls `retryable` (Unavailable, BadResponse). Never retried: NotFound,
VersionChanged, AccessDenied, Archived, and whatever the sink raises (SinkClosed, HotFull, HotSick): those
would be no different the next time. Numbers come from `core/backoff.py`.

A read goes on where it stopped: what a sink has accepted is right (see `tier.py`). The one exception is a
BadResponse *after* bytes were accepted in that attempt (a whole-object checksum that did not match at the
end): those bytes are suspect, so the read fails at once and its receiver throws them away.

The deadline is the time without a new byte, not the length of the read: a slow line that moves is not
a failure, and a caller of a dead store hears of it in `deadline_seconds`. It also ends an attempt that
hangs inside the tier. Nothing runs per piece for that but one look at the clock: only when a piece arrives
more than 1/16 of the deadline after the last extension is the event loop asked to extend it. (A watching
task for every read would cost more than the rest of this file, and most reads last milliseconds.) An
attempt ended by the deadline is never followed by another one on the same sink, because a thread that was
given up may still hold the sink's memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import trio

from tiercache.core.backoff import Again, Backoff, after_failure
from tiercache.core.record import Listed, ObjectRef, Page
from tiercache.errors import BadResponse, TierError, Unavailable
from tiercache.tiers.begun import Anew, Begun, BrokenOff, Ended, begin_of
from tiercache.tiers.tier import MAX_PAGE, Cold, Place, Sink

T = TypeVar("T")


class OnRetry(Protocol):
    def __call__(self, operation: str, error: TierError) -> None:
        """`operation` failed with `error` and will be tried again."""


class _Patience:
    """How much longer one operation may wait for its next byte (or its answer)."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float]) -> None:
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._last_byte = clock()
        self._last_extension = self._last_byte
        self._token = trio.lowlevel.current_trio_token()
        self._scope: trio.CancelScope | None = None

    @property
    def waited_seconds(self) -> float:
        return self._clock() - self._last_byte

    @property
    def is_over(self) -> bool:
        return self.waited_seconds >= self._limit_seconds

    def attempt(self) -> trio.CancelScope:
        """The scope of the next attempt: it ends when patience does."""
        self._scope = scope = trio.CancelScope(deadline=trio.current_time() + self._limit_seconds - self.waited_seconds)
        return scope

    def byte_came(self) -> None:
        """Called from whichever thread feeds the sink."""
        self._last_byte = self._clock()
        if self._last_byte - self._last_extension > self._limit_seconds / 16:
            self._last_extension = self._last_byte
            self._token.run_sync_soon(self._extend)

    def _extend(self) -> None:
        assert self._scope is not None
        self._scope.deadline = trio.current_time() + self._limit_seconds - self.waited_seconds


class _Begun:
    """A read that was begun without a task, and the patience that there is with it."""

    __slots__ = ("_begun", "_is_cancelled", "is_late", "patience")

    def __init__(self, patience: _Patience) -> None:
        self.patience = patience
        self.is_late = False
        self._is_cancelled = False
        self._begun: Begun | None = None

    def on(self, begun: Begun) -> _Begun:
        self._begun = begun
        return self

    def cancel(self) -> None:
        assert self._begun is not None
        self._is_cancelled = True
        self._begun.cancel()

    def abandon(self) -> None:
        assert self._begun is not None
        self._begun.abandon()

    def look(self) -> None:
        if self._is_cancelled:
            self.abandon()
        elif self.patience.is_over:
            self.is_late = True
            self.cancel()


class _Watched:
    """The caller's sink, with the arrival of bytes noted."""

    def __init__(self, sink: Sink, patience: _Patience) -> None:
        self._sink = sink
        self._patience = patience

    @property
    def received_bytes(self) -> int:
        return self._sink.received_bytes

    def buffer(self, wanted_bytes: int) -> memoryview:
        return self._sink.buffer(wanted_bytes)

    def advance(self, count: int) -> None:
        self._sink.advance(count)
        self._patience.byte_came()

    def place(self, length: int) -> Place:
        return self._sink.place(length)

    def landed(self, count: int, digest: int | None = None) -> None:
        self._sink.landed(count, digest)
        self._patience.byte_came()


class Retrying:
    """A `Cold` tier that retries. `clock` must be safe to call from any thread (trio's is, if nothing else runs it)."""

    def __init__(
        self,
        cold: Cold,
        policy: Backoff,
        *,
        rng: random.Random,
        on_retry: OnRetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = cold.name
        self.source_id = cold.source_id
        self._cold = cold
        self._policy = policy
        self._rng = rng
        self._on_retry = on_retry
        self._clock = clock
        self._closed = trio.Event()
        self._begin = begin_of(cold)
        self._failed: WeakKeyDictionary[Sink, tuple[_Patience, Exception]] = WeakKeyDictionary()

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        at_start = sink.received_bytes
        before = at_start
        patience, failure = self._failed.pop(sink, None) or (_Patience(self._policy.deadline_seconds, self._clock), None)
        watched = _Watched(sink, patience)

        async def rest() -> None:
            nonlocal before, failure
            if failure is not None:
                first, failure = failure, None
                raise first
            before = sink.received_bytes
            done_bytes = before - at_start
            if done_bytes < length:  # else the attempt before failed after its last byte
                await self._cold.read(ref, offset + done_bytes, length - done_bytes, watched)

        def spoilt(error: TierError) -> bool:
            return isinstance(error, BadResponse) and sink.received_bytes > before

        await self._persist("read", ref.key, rest, patience, spoilt)

    def begin(self, ref: ObjectRef, sink: Sink, ended: Ended) -> Begun | None:
        patience = _Patience(self._policy.deadline_seconds, self._clock)
        mine = _Begun(patience)

        def judged(error: Exception | None) -> None:
            if isinstance(error, BrokenOff):
                error = self._no_answer("read", ref.key) if mine.is_late else Unavailable(f"{self.name}: the read was broken off")
            if error is not None and not isinstance(error, Anew):
                self._failed[sink] = patience, error
            ended(error)

        begun = self._begin(ref, sink, judged)
        return None if begun is None else mine.on(begun)

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        patience = _Patience(self._policy.deadline_seconds, self._clock)
        return await self._persist(
            "list", prefix, lambda: self._cold.list(prefix, delimiter=delimiter, token=token, limit=limit), patience, _never
        )

    async def head(self, key: str) -> Listed:
        patience = _Patience(self._policy.deadline_seconds, self._clock)
        return await self._persist("head", key, lambda: self._cold.head(key), patience, _never)

    async def aclose(self) -> None:
        """Nothing is retried from now on; who waits for another attempt makes it now, and hears that the tier is closed."""
        self._closed.set()
        await self._cold.aclose()

    async def _persist(
        self,
        operation: str,
        key: str,
        attempt: Callable[[], Awaitable[T]],
        patience: _Patience,
        spoilt: Callable[[TierError], bool],
    ) -> T:
        """Attempt until it succeeds, fails for good, or patience ends; then the last error is raised."""
        failures_count = 0
        last: TierError | None = None
        while True:
            with patience.attempt():
                try:
                    return await attempt()
                except TierError as error:
                    if not error.retryable or spoilt(error) or self._closed.is_set():
                        raise
                    last = error
                    failures_count += 1
                    after_seconds = self._wait_after(error, failures_count, patience)
                self._on_retry(operation, last)
                with trio.move_on_after(after_seconds):
                    await self._closed.wait()
                continue
            if last is not None:
                raise last
            raise self._no_answer(operation, key)

    def _no_answer(self, operation: str, key: str) -> Unavailable:
        return Unavailable(
            f"{self.name}: {operation} of {key!r} had no answer for {self._policy.deadline_seconds:g} s",
            hint="check that the store is reachable",
        )

    def _wait_after(self, error: TierError, failures_count: int, patience: _Patience) -> float:
        """Seconds to wait before the next attempt; raises `error` when there is to be none."""
        retry_after = error.retry_after_seconds if isinstance(error, Unavailable) else None
        verdict = after_failure(self._policy, failures_count, patience.waited_seconds, self._rng.random(), retry_after)
        if isinstance(verdict, Again):
            return verdict.after_seconds
        raise error


def _never(error: TierError) -> bool:
    return False
