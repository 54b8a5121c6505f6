"""Can a plain file be trusted to hold an object's bytes? What would prove it, and what was found.

The proof depends on the version tag. An S3 ETag of 32 hexadecimal digits is normally the MD5 of the object, so the file's own
MD5 decides. (Under SSE-KMS and SSE-C it is not; then nothing matches and the file is not used, which is safe.) An ETag with
'-' comes from a multipart upload and proves nothing without the part sizes. A directory's version tag has
the modification time in nanoseconds, which copying tools preserve, and equal size and time are taken as proof.

A verdict holds for one identity of the file: (device, inode, size, mtime_ns, ctime_ns). ctime cannot be set by a user, so
a changed file has another identity.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from typing import Protocol

import msgspec

from tiercache.core.record import ObjectId, ObjectRef

Identity = tuple[int, int, int, int, int]

_MD5 = re.compile(r"([0-9a-f]{32}):\d+")
_TIMES = re.compile(r"\d+-(-?\d+)-(-?\d+)")


class HasMd5(msgspec.Struct, frozen=True):
    digest: str


class HasMtime(msgspec.Struct, frozen=True):
    nanoseconds: int


def proof_of(ref: ObjectRef) -> HasMd5 | HasMtime | None:
    """What a file must have to be this version; None when nothing short of the operator's word can tell."""
    if plain := _MD5.fullmatch(ref.version):
        return HasMd5(plain[1])
    if times := _TIMES.fullmatch(ref.version):
        return HasMtime(int(times[1]))
    return None


def identity_of(found: os.stat_result) -> Identity:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class OnVerdict(Protocol):
    def __call__(self, object_id: ObjectId, identity: Identity, trusted: bool) -> None:
        """A file was examined: for whoever keeps verdicts across restarts."""


class Verdicts:
    """What verification found, for the last `capacity_count` objects (about 300 B each). Used on the event loop only."""

    def __init__(self, capacity_count: int = 65_536, on_verdict: OnVerdict | None = None) -> None:
        assert capacity_count > 0
        self._capacity_count = capacity_count
        self._on_verdict = on_verdict
        self._known: OrderedDict[ObjectId, tuple[Identity, bool]] = OrderedDict()

    def get(self, object_id: ObjectId, identity: Identity) -> bool | None:
        """True: the file holds the object; False: it does not; None: not known for this identity."""
        known = self._known.get(object_id)
        if known is None or known[0] != identity:
            return None
        self._known.move_to_end(object_id)
        return known[1]

    def put(self, object_id: ObjectId, identity: Identity, trusted: bool) -> None:
        self.restore(object_id, identity, trusted)
        if self._on_verdict is not None:
            self._on_verdict(object_id, identity, trusted)

    def restore(self, object_id: ObjectId, identity: Identity, trusted: bool) -> None:
        """A verdict of an earlier run."""
        self._known[object_id] = (identity, trusted)
        self._known.move_to_end(object_id)
        if len(self._known) > self._capacity_count:
            self._known.popitem(last=False)
