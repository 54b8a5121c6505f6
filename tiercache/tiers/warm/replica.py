"""A directory that already holds a dataset's files (flash, Lustre, any mounted filesystem), read in place.

The files are the user's: they are never written, and never believed without proof (`verify.py`). The
file for a key is the key without the dataset's prefix, opened without ever leaving the directory (`beneath.py`).
Whatever cannot be used is NotHeld, with a reason that is counted in `ignored`, and the next tier is asked:

    missing      no such file                    unverifiable  no proof exists for this version tag
    size         it has another size             verifying     a large file is being hashed in the background
    mtime        it has another time             differs       hashed, and it is something else
    irregular    not a regular file              changed       it changed while it was read
    outside      the key cannot name a file here, or a link leads out of the directory
    unreadable   no permission                   suspect       too many calls hang (`patience.py`)

Verifying costs a full read. Up to `inline_bytes` (8 MiB: 15 ms of MD5) that is done before the first read; larger
files are hashed in the background, one at a time, while their readers are served from below.

The filesystem may hang, and cold must still be reached. So every call has a deadline, and bytes are read into memory of our
own and only then copied into the sink: a thread that was given up must not hold memory into which the next tier already
receives. Measured: 8 MiB take 2.2 ms instead of 1.2 ms straight into the sink; 100 KiB take 0.23 ms, most of it three
changes of thread (0.05 ms each; opening takes 0.01 ms).
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import trio

from tiercache.core.backoff import Backoff
from tiercache.core.record import ObjectRef
from tiercache.errors import NotHeld, Unavailable
from tiercache.tiers.beneath import ABSENT, components, open_file, wait_out_tick
from tiercache.tiers.tier import Sink
from tiercache.tiers.warm.patience import Patience
from tiercache.tiers.warm.verify import HasMtime, Identity, Verdicts, identity_of, proof_of

PIECE_BYTES = 1 << 20
FIRST_PIECE_BYTES = 256 << 10  # the caller gets its first bytes early
HASH_PIECE_BYTES = 8 << 20
INLINE_BYTES = 8 << 20
SPARE_BUFFERS = 8
PROBING = Backoff(first_seconds=1.0, ceiling_seconds=60.0, floor_seconds=0.5)


class OnIgnored(Protocol):
    def __call__(self, reason: str) -> None:
        """A file of the replica was not used."""


class _Ignored(Exception):
    """Carries the reason from a thread to the event loop."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _File:
    """An open file. The descriptor is closed with the last reference: a thread that was given up still has one."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.status = os.fstat(descriptor)
        self.identity: Identity = identity_of(self.status)

    def __del__(self) -> None:
        os.close(self.descriptor)

    def read(self, memory: memoryview, offset: int) -> int:
        """Fill `memory`, or as much of it as one call gives; the file is the same before and after. Blocks."""
        count = os.preadv(self.descriptor, [memory], offset)
        if count == 0 or identity_of(os.fstat(self.descriptor)) != self.identity:
            raise _Ignored("changed")
        return count


class Replica:
    """A `Tier` over `directory` for keys that begin with `prefix`.

    `trust='verify'` wants proof, `trust='mtime'` takes equal size and equal whole-second mtime for it. Verification of large
    files and probes run in `nursery`; they raise nothing.
    """

    def __init__(
        self,
        directory: str | Path,
        prefix: str,
        *,
        nursery: trio.Nursery,
        trust: Literal["verify", "mtime"] = "verify",
        verdicts: Verdicts | None = None,
        on_ignored: OnIgnored | None = None,
        open_seconds: float = 2.0,
        read_seconds: float = 5.0,
        threads_count: int = 16,
        abandoned_limit: int = 4,
        inline_bytes: int = INLINE_BYTES,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = "replica"
        self.path = os.path.abspath(directory)
        self.ignored: Counter[str] = Counter()
        self.verdicts = verdicts if verdicts is not None else Verdicts()
        self._prefix = prefix
        self._trust = trust
        self._nursery = nursery
        self._on_ignored = on_ignored
        self._open_seconds = open_seconds
        self._read_seconds = read_seconds
        self._inline_bytes = inline_bytes
        self._patience = Patience(
            f"replica {self.path}",
            threads_count=threads_count,
            abandoned_limit=abandoned_limit,
            policy=PROBING,
            rng=rng if rng is not None else random.Random(),
            clock=clock,
        )
        self._deliveries = trio.CapacityLimiter(threads_count)
        self._spare: list[bytearray] = []
        self._is_verifying = False
        self._closed = False
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why nothing can be read from the directory, as of the last `look`; '' when something can."""
        return "does not answer" if self._patience.is_suspect else self._trouble

    @property
    def is_suspect(self) -> bool:
        """Are reads refused because too many calls hang?"""
        return self._patience.is_suspect

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        assert offset >= 0
        assert length > 0
        assert offset + length <= ref.size_bytes
        try:
            file = await self._trusted(ref)
            await self._copy(file, ref, offset, length, sink)
        except _Ignored as ignored:
            self.ignored[ignored.reason] += 1
            if self._on_ignored is not None:
                self._on_ignored(ignored.reason)
            raise NotHeld(f"replica {self.path}: {ref.key!r} is not used ({ignored.reason})") from None

    async def holds(self, ref: ObjectRef) -> bool:
        """Would a read be served, as far as is known without hashing? Raises Unavailable. Counts nothing."""
        try:
            return self._judge(ref, await self._open(ref)) is True
        except _Ignored:
            return False

    async def look(self) -> None:
        """Find out whether there is a directory with anything in it. Raises nothing: the outcome shows in `trouble`."""
        if self._closed or self._patience.is_suspect:
            return
        try:
            self._trouble = await self._patience.run(self._trouble_found, self._open_seconds)
        except Unavailable:
            self._trouble = "does not answer"

    async def aclose(self) -> None:
        self._closed = True
        self._spare.clear()

    async def _open(self, ref: ObjectRef) -> _File:
        if self._closed:
            raise Unavailable(f"replica {self.path}: closed")
        if self._patience.wants_probe:
            self._nursery.start_soon(self._patience.probe, self._look, self._open_seconds)
        if self._patience.is_suspect:
            raise _Ignored("suspect")
        parts = components(ref.key[len(self._prefix) :]) if ref.key.startswith(self._prefix) else None
        if parts is None:
            raise _Ignored("outside")
        return await self._patience.run(partial(self._open_blocking, parts, ref.size_bytes), self._open_seconds)

    def _open_blocking(self, parts: tuple[bytes, ...], size_bytes: int) -> _File:
        try:
            root = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            file = _File(open_file(root, parts))
        except OSError as error:
            raise self._refusal(error) from error
        finally:
            os.close(root)
        if not stat.S_ISREG(file.status.st_mode):
            raise _Ignored("irregular")
        if file.status.st_size != size_bytes:
            raise _Ignored("size")
        return file

    def _look(self) -> None:
        with os.scandir(self.path) as entries:
            next(entries, None)

    def _trouble_found(self) -> str:
        """A directory that may be searched but not listed will do: files are opened by name."""
        try:
            os.stat(os.path.join(self.path, "."))
            with os.scandir(self.path) as entries:
                return "" if next(entries, None) else "is empty"
        except FileNotFoundError:
            return "does not exist"
        except NotADirectoryError:
            return "is not a directory"
        except PermissionError:
            return "" if os.access(self.path, os.X_OK) else "cannot be read: no permission"
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    async def _trusted(self, ref: ObjectRef) -> _File:
        """The file, open and proved; raises _Ignored."""
        file = await self._open(ref)
        verdict = self._judge(ref, file)
        if verdict is None and ref.size_bytes <= self._inline_bytes:
            await self._hash(ref, file)
            verdict = self._judge(ref, file)
        if verdict is True:
            return file
        if not self._is_verifying and verdict is None:
            self._is_verifying = True
            self._nursery.start_soon(self._hash_later, ref, file)
        raise _Ignored("verifying" if verdict is None else "differs")

    def _judge(self, ref: ObjectRef, file: _File) -> bool | None:
        """Trusted, refused, or (None) still to be hashed. Raises _Ignored where hashing could not help."""
        if self._trust == "mtime":
            if file.status.st_mtime_ns // 1_000_000_000 != ref.mtime_seconds:
                raise _Ignored("mtime")
            return True
        proof = proof_of(ref)
        if proof is None:
            raise _Ignored("unverifiable")
        if isinstance(proof, HasMtime):
            if file.status.st_mtime_ns != proof.nanoseconds:
                raise _Ignored("mtime")
            return True
        return self.verdicts.get(ref.object_id, file.identity)

    async def _hash(self, ref: ObjectRef, file: _File) -> None:
        """Hash the file, piece by piece, and remember the verdict."""
        digest = hashlib.md5(usedforsecurity=False)
        memory = bytearray(min(ref.size_bytes, HASH_PIECE_BYTES))
        offset = 0

        def next_piece() -> int:
            if offset == 0:
                wait_out_tick(file.status)
            count = self._read_blocking(file, memoryview(memory)[: ref.size_bytes - offset], offset)
            digest.update(memoryview(memory)[:count])
            return count

        while offset < ref.size_bytes:
            offset += await self._patience.run(next_piece, self._read_seconds)
        self.verdicts.put(ref.object_id, file.identity, f"{digest.hexdigest()}:{ref.size_bytes}" == ref.version)

    async def _hash_later(self, ref: ObjectRef, file: _File) -> None:
        try:
            await self._hash(ref, file)
        except (_Ignored, Unavailable):
            return  # no verdict: a later read begins again
        finally:
            self._is_verifying = False

    async def _copy(self, file: _File, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        memory = self._spare.pop() if self._spare else bytearray(PIECE_BYTES)
        end = offset + length
        wanted = FIRST_PIECE_BYTES
        while offset < end:
            if self._closed:
                raise Unavailable(f"replica {self.path}: closed")
            piece = memoryview(memory)[: min(wanted, end - offset)]
            count = await self._patience.run(partial(self._read_blocking, file, piece, offset), self._read_seconds)
            await trio.to_thread.run_sync(_deliver, sink, piece[:count], limiter=self._deliveries)
            offset += count
            wanted = PIECE_BYTES
        if len(self._spare) < SPARE_BUFFERS and not self._closed:
            self._spare.append(memory)  # only here: after an error or a hang a thread may still write to it

    def _read_blocking(self, file: _File, piece: memoryview, offset: int) -> int:
        try:
            return file.read(piece, offset)
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> _Ignored | Unavailable:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return _Ignored("outside")
        if error.errno in ABSENT:
            return _Ignored("missing")
        if error.errno in (errno.EACCES, errno.EPERM):
            return _Ignored("unreadable")
        return self._unavailable(error)

    def _unavailable(self, error: OSError) -> Unavailable:
        return Unavailable(f"replica {self.path}: {error.strerror}", hint="check the filesystem that it lies on")


def _deliver(sink: Sink, piece: memoryview) -> None:
    """Copy a piece into the sink; blocks."""
    while piece:
        room = sink.buffer(len(piece))
        count = len(room)  # asked before `advance`, which takes the loan back
        room[:] = piece[:count]
        sink.advance(count)
        piece = piece[count:]
