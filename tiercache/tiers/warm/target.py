"""One warm target: a directory that several nodes share, and one failure domain.

Every operation runs in a thread with a deadline (`patience.py`), and what it came to decides on the target's health
(`core/health.py`). Operations raise NotHeld (no such file), Damaged (bytes are not what was written), TargetFull, and
Unavailable for all else: an error of the file system, a hang, a target that is down. None waits longer than its deadline,
and none of them ever blocks the event loop.

A call that was given up may still happen, at any time: a late rename brings a file that nobody counts on, a late removal
takes one away that was written again meanwhile. Both are what scrub is for. Buffers that were lent to a given-up
`append` are its own: they must not be used again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import structlog
import trio

from tiercache.core.health import PROBING, Health, State, Usage
from tiercache.errors import Damaged, NotHeld, TargetFull, TiercacheError, Unavailable
from tiercache.tiers.measured import Estimate
from tiercache.tiers.warm import files
from tiercache.tiers.warm.files import Buffer, Found, Vanished
from tiercache.tiers.warm.marking import NO_ROOM, READ_ONLY, Foreign, Identity, NotThere, Probed, probe, refuse_nesting
from tiercache.tiers.warm.patience import Hung, Patience

log = structlog.get_logger()

T = TypeVar("T")

THREADS_COUNT = 8
ABANDONED_LIMIT = 4
ABANDON_SECONDS = 1.0


class Observe(Protocol):
    def __call__(
        self, target: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None
    ) -> None:
        """One operation has ended. `error` is None for success, else the class (trio.Cancelled for a caller that left)."""


class Deadlines(msgspec.Struct, frozen=True):
    """Of one call. Reads and writes get a second more for every `rate_bytes`."""

    short_seconds: float = 5.0
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    probe_seconds: float = 5.0
    rate_bytes: int = 1 << 20


class Target:
    """`path` is the directory as configured, `identity` who it is: None as long as a target that was not there at the start has
    not told. `usage` is what the last probe saw of the file system."""

    def __init__(
        self,
        path: str,
        *,
        identity: Identity | None,
        observe: Observe,
        deadlines: Deadlines,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self.path = path
        self.identity = identity
        self.usage = Usage(0, 0)
        self.health = Health(clock())
        self.estimate = Estimate(clock)
        self.deadlines = deadlines
        self._observe = observe
        self._rng = rng
        self._clock = clock
        self._told: tuple[State, str, bool] = ("up", "", False)
        self._outstanding_count = 0
        self._closed = False
        self._patience = Patience(
            f"warm target {path}",
            threads_count=THREADS_COUNT,
            abandoned_limit=ABANDONED_LIMIT,
            policy=PROBING,
            rng=rng,
            clock=clock,
        )

    # -- what is known of it

    @property
    def uuid(self) -> bytes:
        """b'' when it is not known yet."""
        return b"" if self.identity is None else self.identity.uuid

    @property
    def weight_bytes(self) -> int:
        return 0 if self.identity is None else self.identity.weight_bytes

    @property
    def state(self) -> State:
        return self.health.state

    @property
    def detail(self) -> str:
        return self.health.detail

    @property
    def errors_count(self) -> int:
        return self.health.errors_count

    @property
    def is_full(self) -> bool:
        return self.health.is_full

    @property
    def is_writable(self) -> bool:
        return self.health.is_writable

    @property
    def latency_seconds(self) -> float:
        return self.estimate.latency_seconds

    def read_seconds(self, length: int) -> float:
        """What a read of `length` bytes is expected to take; 0.0 when nothing is known."""
        return self.estimate.read_seconds(length)

    # -- operations

    async def read(self, relative: str, offset: int, length: int, *, checksum: int | None = None) -> bytearray:
        """Exactly `length` bytes; fewer are Damaged, and so are bytes that have not this xxh3-64."""
        assert length > 0
        job = partial(files.read, self.path, relative, offset, length, checksum)
        timed = await self._call("read", job, self._seconds(self.deadlines.read_seconds, length), length)
        self.estimate.add(timed.first_seconds, timed.rest_seconds, length - files.FIRST_PIECE_BYTES)
        return timed.data

    async def read_whole(self, relative: str, limit_bytes: int) -> bytes:
        """A file of at most `limit_bytes`; more are Damaged."""
        job = partial(files.read_whole, self.path, relative, limit_bytes)
        return await self._call("read", job, self._seconds(self.deadlines.read_seconds, limit_bytes))

    async def names(self, relative: str) -> list[str]:
        """What the directory holds; nothing when there is none."""
        return await self._call("list", partial(files.names, self.path, relative), self.deadlines.read_seconds)

    async def scan(self, relative: str) -> list[Found]:
        return await self._call("list", partial(files.scan, self.path, relative), self.deadlines.write_seconds)

    async def begin(self) -> Draft:
        self._require_room()
        job = partial(_begin, self.path)
        return Draft(self, await self._call("create", job, self.deadlines.short_seconds, is_write=True))

    async def put(self, relative: str, data: bytes) -> None:
        """A whole file, durable, in place of what may have the name now."""
        self._require_writable()
        job = partial(files.put, self.path, relative, data)
        await self._call("write", job, self._seconds(self.deadlines.write_seconds, len(data)), len(data), is_write=True)

    async def remove(self, relative: str) -> None:
        """Missing is fine."""
        job = partial(files.remove, self.path, relative)
        await self._call("remove", job, self.deadlines.short_seconds, is_write=True)

    async def now_seconds(self) -> float:
        """The target's own clock, by which its files have their times."""
        job = partial(files.now_seconds, self.path)
        return await self._call("create", job, self.deadlines.short_seconds, is_write=True)

    async def filesystem(self) -> Usage:
        self.usage = await self._call("stat", partial(files.usage, self.path), self.deadlines.short_seconds)
        return self.usage

    def close(self) -> None:
        """Nothing is begun any more. Threads that were given up are left to themselves."""
        self._closed = True

    # -- probes

    def probe_due(self) -> bool:
        """Is it time, or has a call come back that had been given up?"""
        now, outstanding_count = self._clock(), self._patience.outstanding_count
        if outstanding_count < self._outstanding_count and self.state != "up":
            self.health.wish_probe(now)
        self._outstanding_count = outstanding_count
        return self.health.probe_due(now) and self._patience.may_probe and not self._closed

    async def open(self, remembered: Identity | None) -> None:
        """The first probe: whatever fails makes it down. Raises Foreign for what is no target and is not to be made one."""

        def job() -> Probed:
            refuse_nesting(self.path)
            return probe(self.path, remembered, may_write=True)

        self.identity = remembered
        await self._probed(job, is_first=True)

    async def probe(self, remembered: Identity | None) -> None:
        """Find out how it is, and who. Raises nothing: the outcome shows in `health`, `identity` and `usage`."""
        may_write = self.health.wants_write(self._clock())
        try:
            await self._probed(partial(probe, self.path, remembered, may_write=may_write), is_first=False)
        except Foreign as error:
            self.not_usable(str(error))

    async def _probed(self, job: Callable[[], Probed], *, is_first: bool) -> None:
        try:
            found = await self._patience.attempt(job, self.deadlines.probe_seconds)
        except Foreign:
            raise
        except (NotThere, Vanished) as error:
            self._probe_failed(str(error), is_gone=True)
        except Hung:
            self._probe_failed("does not answer", is_gone=is_first)
        except Unavailable as busy:
            self._probe_failed(str(busy), is_gone=is_first)
        except OSError as error:
            self._probe_failed(_text(error), is_gone=is_first)
        else:
            self.identity, self.usage = found.identity, found.usage
            self.health.probe_succeeded(self._clock(), self._rng.random(), found.usage, found.writing, found.reason)
        self.tell()

    def not_usable(self, reason: str) -> None:
        """It answers, but this is not a target that can be used."""
        self._probe_failed(reason, is_gone=True)
        self.tell()

    def _probe_failed(self, reason: str, *, is_gone: bool) -> None:
        self.health.probe_failed(self._clock(), self._rng.random(), reason, is_gone=is_gone)

    def tell(self) -> None:
        """Log a state that is new."""
        now = (self.state, self.detail, self.is_full)
        if now[0] != self._told[0] or now[2] != self._told[2]:
            write = log.info if now[0] == "up" else log.warning
            write("warm_target", path=self.path, state=self.state, before=self._told[0], detail=self.detail, full=self.is_full)
            self._told = now

    # -- one call

    def require_up(self) -> None:
        if self._closed:
            raise Unavailable(f"warm target {self.path} is closed")
        if self.state == "down":
            raise Unavailable(f"warm target {self.path} is down: {self.detail}", hint="see `tiercache targets`")

    def _require_writable(self) -> None:
        self.require_up()
        if not self.is_writable:
            raise Unavailable(f"warm target {self.path} cannot be written: {self.detail}", hint="see `tiercache targets`")

    def _require_room(self) -> None:
        self._require_writable()
        if self.is_full:
            raise TargetFull(f"warm target {self.path} is full", hint="free space there, or add targets")

    def _seconds(self, least_seconds: float, length: int) -> float:
        return least_seconds + length / self.deadlines.rate_bytes

    async def _call(
        self, operation: str, job: Callable[[], T], seconds: float, transferred_bytes: int = 0, *, is_write: bool = False
    ) -> T:
        self.require_up()
        began = self._clock()
        try:
            result = await self._watched(job, seconds, is_write)
        except (TiercacheError, trio.Cancelled) as error:
            self._observe(self.path, operation, self._clock() - began, 0, type(error))
            raise
        finally:
            self.tell()
        self._observe(self.path, operation, self._clock() - began, transferred_bytes, None)
        return result

    async def _watched(self, job: Callable[[], T], seconds: float, is_write: bool) -> T:
        """The job's result; what it raises is put down to the target's health, and raised as an error of ours."""
        try:
            return await self._patience.run(job, seconds)
        except Hung:
            self.health.failed(self._clock(), "does not answer")
            raise
        except NotHeld as error:
            raise NotHeld(f"warm target {self.path}: {error}") from None
        except Damaged as error:
            self.health.damaged()
            raise Damaged(f"warm target {self.path}: {error}") from None
        except Vanished as error:
            self.health.vanished(self._clock(), str(error))
            raise Unavailable(f"warm target {self.path}: {error}", hint="is it mounted?") from error
        except OSError as error:
            raise self._judged(error, is_write) from error

    def _judged(self, error: OSError, is_write: bool) -> TargetFull | Unavailable:
        now, text = self._clock(), _text(error)
        if is_write and error.errno in NO_ROOM:
            self.health.filled(now)
            return TargetFull(f"warm target {self.path}: {text}", hint="free space there, or add targets")
        if is_write and error.errno in READ_ONLY:
            self.health.write_refused(now, f"not writable: {text}")
        else:
            self.health.failed(now, text)
        return Unavailable(f"warm target {self.path}: {text}", hint="check the file system that it lies on")

    async def draft_call(self, job: Callable[[], None], transferred_bytes: int) -> None:
        seconds = self._seconds(self.deadlines.write_seconds, transferred_bytes)
        await self._call("write", job, seconds, transferred_bytes, is_write=True)

    async def unlink_draft(self, job: Callable[[], None]) -> None:
        """Waits a moment at most; a target that is not up is not asked."""
        if self.state != "up" or self._closed:
            return
        with trio.CancelScope(shield=True):
            try:
                await self._patience.run(job, ABANDON_SECONDS)
            except Unavailable:
                return


class Draft:
    """A file in the making. Nobody sees it before `commit`; one whose target failed is of no use any more."""

    def __init__(self, target: Target, file: files.DraftFile) -> None:
        self.target = target
        self.size_bytes = 0
        self._file: files.DraftFile | None = file

    async def append(self, buffers: Sequence[Buffer]) -> None:
        """The buffers one behind the other. When this fails, they may still be read from, later."""
        file = self._take()
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        await self._attempt(file, partial(file.append, buffers), length)
        self._file = file
        self.size_bytes += length

    async def commit(self, relative: str) -> None:
        """Durable under this name, in place of what may have it now."""
        file = self._take()
        await self._attempt(file, partial(file.commit, relative), self.size_bytes)

    async def abandon(self) -> None:
        """Best effort, without waiting for a target that fails: what stays is collected later. Idempotent."""
        if self._file is not None:
            file = self._take()
            await self.target.unlink_draft(file.unlink)

    def _take(self) -> files.DraftFile:
        if self._file is None:
            raise Unavailable(f"warm target {self.target.path}: the draft was given up")
        file, self._file = self._file, None
        return file

    async def _attempt(self, file: files.DraftFile, job: Callable[[], None], length: int) -> None:
        try:
            await self.target.draft_call(job, length)
        except (TargetFull, Unavailable, trio.Cancelled):
            await self.target.unlink_draft(file.unlink)
            raise


def _begin(path: str) -> files.DraftFile:
    return files.DraftFile(files.open_root(path))


def _text(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
