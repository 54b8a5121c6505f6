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
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import structlog
import trio

from tiercache.core.health import PROBING, Health, State, Usage
from tiercache.errors import Damaged, NotHeld, TargetFull, TiercacheError, TierError, Unavailable
from tiercache.mountinfo import mounts
from tiercache.tiers.measured import Estimate
from tiercache.tiers.place import mount_number, resolve
from tiercache.tiers.warm import files
from tiercache.tiers.warm.files import Blocked, Buffer, DraftFile, Found, Vanished
from tiercache.tiers.warm.marking import NO_ROOM, READ_ONLY, Foreign, Identity, NotThere, Probed, probe, refuse_nesting
from tiercache.tiers.warm.patience import Hung, Patience

log = structlog.get_logger()

T = TypeVar("T")

THREADS_COUNT = 16
ABANDONED_LIMIT = 4
DISCARD_SECONDS = 1.0


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
        self.estimate = Estimate(clock)  # of reads
        self.create_estimate = Estimate(clock)  # of new drafts: what a write costs at least
        self.deadlines = deadlines
        self._observe = observe
        self._rng = rng
        self._clock = clock
        self._told: tuple[State, bool] = ("up", False)
        self._closed = False
        self._patience = self._new_patience()
        self._outstanding_count = 0
        self._hung_mount: int | None = None
        self._leftovers: list[DraftFile] = []

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

    async def read(self, relative: str, offset: int, length: int, *, checksum: int | None = None) -> memoryview:
        """Exactly `length` bytes; fewer are Damaged, and so are bytes that have not this xxh3-64."""
        assert length > 0
        job = partial(files.read, self.path, relative, offset, length, checksum)
        timed = await self._call("read", job, self._seconds(self.deadlines.read_seconds, length), length)
        self.estimate.add(timed.first_seconds, timed.rest_seconds, length - files.FIRST_PIECE_BYTES)
        return timed.data

    async def read_whole(self, relative: str, limit_bytes: int) -> bytes:
        """A file of at most `limit_bytes`; more are Damaged."""
        return await self._call("read", partial(files.read_whole, self.path, relative, limit_bytes), self.deadlines.read_seconds)

    async def names(self, relative: str) -> list[str]:
        """What the directory holds; nothing when there is none."""
        return await self._call("list", partial(files.names, self.path, relative), self.deadlines.read_seconds)

    async def scan(self, relative: str) -> list[Found]:
        return await self._call("list", partial(files.scan, self.path, relative), self.deadlines.write_seconds)

    async def begin(self) -> Draft:
        self._require_room()
        draft, began = Draft(self), self._clock()
        await draft.begin()
        self.create_estimate.add(self._clock() - began, 0.0, 0)
        return draft

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

    async def is_silent(self, seconds: float) -> bool:
        """Does it leave a call without an answer, now or since it was given up? Such a call keeps the process from ending."""
        if self._patience.outstanding_count:
            return True
        with trio.move_on_after(seconds):
            try:
                await self.filesystem()
            except TiercacheError:
                return self._patience.outstanding_count > 0
            return False
        return True

    # -- probes

    def probe_due(self) -> bool:
        """Is it time, or has a call come back that had been given up?"""
        now, outstanding_count = self._clock(), self._patience.outstanding_count
        if outstanding_count < self._outstanding_count and self.state != "up":
            self.health.wish_probe(now)
        self._outstanding_count = outstanding_count
        if self._closed or not self.health.probe_due(now):
            return False
        if self._patience.hanging_count >= 2 * ABANDONED_LIMIT and not self._is_mounted_anew():
            self._probe_failed("does not answer", is_gone=False)
            self.tell()
        return self._patience.may_probe

    def _is_mounted_anew(self) -> bool:
        """No thread is left to probe with. Those that hang in a mount that is not there any more are written off."""
        table = mounts()
        number = mount_number(resolve(Path(self.path), table), table)
        if self._hung_mount in (None, number):
            self._hung_mount = number
            return False
        self._hung_mount = None
        self._patience = self._new_patience()
        return True

    async def open(self, remembered: Identity | None) -> None:
        """The first probe: whatever fails makes it down. Raises Foreign for what is no target and is not to be made one."""

        def job() -> Probed:
            refuse_nesting(self.path)
            return probe(self.path, remembered, may_write=True)

        self.identity = remembered
        await self._probed(job, is_first=True)

    async def probe(self, remembered: Identity | None) -> None:
        """Find out how it is, and who. Raises nothing: the outcome shows in `health`, `identity` and `usage`."""
        if not self._patience.may_probe:
            return
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
            self._answered(found)
        self.tell()
        if self.state == "up":
            await self._discard_leftovers()

    def _answered(self, found: Probed) -> None:
        if self.identity is not None and (found.was_marked or self.identity.uuid != found.identity.uuid):
            log.warning("warm_target_was_emptied", path=self.path, uuid=found.identity.uuid.hex(), marked_by_us=found.was_marked)
        self.identity, self.usage = found.identity, found.usage
        self.health.probe_succeeded(self._clock(), self._rng.random(), found.usage, found.writing, found.reason)

    def not_usable(self, reason: str) -> None:
        """It answers, but this is not a target that can be used."""
        self._probe_failed(reason, is_gone=True)
        self.tell()

    def _probe_failed(self, reason: str, *, is_gone: bool) -> None:
        self.health.probe_failed(self._clock(), self._rng.random(), reason, is_gone=is_gone)

    def tell(self) -> None:
        """Log a state that is new."""
        before, now = self._told, (self.state, self.is_full)
        if now != before:
            write = log.info if now == ("up", False) else log.warning
            write("warm_target", path=self.path, state=self.state, before=before[0], detail=self.detail, full=self.is_full)
            self._told = now

    def _new_patience(self) -> Patience:
        return Patience(
            f"warm target {self.path}",
            threads_count=THREADS_COUNT,
            abandoned_limit=ABANDONED_LIMIT,
            policy=PROBING,
            rng=self._rng,
            clock=self._clock,
        )

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
        except Blocked as error:
            self.health.damaged()
            raise Unavailable(f"warm target {self.path}: {error}") from None
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

    # -- for drafts

    async def draft_call(self, operation: str, job: Callable[[], None], transferred_bytes: int, unsynced_bytes: int) -> None:
        """One step of a draft; the last one may have to wait until all of it is written."""
        least_seconds = self.deadlines.short_seconds if operation == "create" else self.deadlines.write_seconds
        seconds = self._seconds(least_seconds, unsynced_bytes)
        await self._call(operation, job, seconds, transferred_bytes, is_write=True)

    async def discard(self, file: DraftFile) -> None:
        """Waits a moment at most. A target that is not up is not asked before it is."""
        self._leftovers.append(file)
        if self.state == "up" and not self._closed:
            with trio.CancelScope(shield=True):
                await self._discard_leftovers()

    def leave(self, file: DraftFile) -> None:
        """A draft that nobody wants, to be discarded some time."""
        self._leftovers.append(file)

    async def _discard_leftovers(self) -> None:
        """In one thread. If that hangs, it goes on when it comes back."""
        leftovers, self._leftovers = self._leftovers, []

        def job() -> None:
            for file in leftovers:
                file.discard()

        if leftovers:
            try:
                await self._patience.run(job, DISCARD_SECONDS)
            except Hung:
                return
            except Unavailable:
                self._leftovers += leftovers


class Draft:
    """A file in the making. Nobody sees it before `commit`; one whose target failed is of no use any more."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.size_bytes = 0
        self._file: DraftFile | None = DraftFile(target.path)

    async def begin(self) -> None:
        await self._call("create", lambda file: file.begin(), 0)

    async def append(self, buffers: Sequence[Buffer]) -> None:
        """The buffers one behind the other. When this fails, they may still be read from, later."""
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        await self._call("write", lambda file: file.append(buffers), length)
        self.size_bytes += length

    async def commit(self, relative: str) -> None:
        """Durable under this name, in place of what may have it now."""
        await self._call("commit", lambda file: file.commit(relative), 0)
        self._file = None

    async def abandon(self) -> None:
        """Best effort, without waiting for a target that fails: what stays is collected later. Idempotent."""
        file, self._file = self._file, None
        if file is not None and file.give_up():
            await self.target.discard(file)

    async def _call(self, operation: str, act: Callable[[DraftFile], None], length: int) -> None:
        file = self._file
        if file is None:
            raise Unavailable(f"warm target {self.target.path}: the draft was given up")
        try:
            await self.target.draft_call(operation, partial(act, file), length, self.size_bytes + length)
        except (TierError, trio.Cancelled):
            self._file = None
            if file.give_up():
                self.target.leave(file)
            raise


def _text(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
