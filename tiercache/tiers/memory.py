"""A cold store in memory: for tests, the simulation and the reference model.

It is honest where it matters: keys sort by their UTF-8 bytes, a listing has pages and a delimiter, the
version tag is S3's (MD5 and size, so that putting equal bytes again is no change), a read that has
begun goes on with the version it began with (as a GET does), and every request and byte is counted.

A `Gate` holds matching operations at a chosen byte, so that a test decides what happens in between:
nothing here sleeps, and nothing needs a clock.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator

import msgspec
import trio

from tiercache.core.record import Listed, ObjectRef, Page, object_id
from tiercache.errors import Archived, NotFound, Unavailable, VersionChanged
from tiercache.tiers.tier import MAX_PAGE, Sink


class Stored(msgspec.Struct, frozen=True):
    """One object as it lies in the store."""

    data: bytes
    listed: Listed


class Gate:
    """Holds every matching operation until `release`. `reached` is set as soon as one waits here."""

    def __init__(self, operation: str, key: str | None, after_bytes: int) -> None:
        self.operation = operation
        self.key = key
        self.after_bytes = after_bytes
        self.reached = trio.Event()
        self._open = trio.Event()

    def release(self) -> None:
        self._open.set()

    def holds(self, operation: str, key: str, done_bytes: int) -> bool:
        """Is the gate shut for this operation, which has `done_bytes` behind it?"""
        matches = operation == self.operation and self.key in (None, key) and done_bytes >= self.after_bytes
        return matches and not self._open.is_set()

    async def passed(self) -> None:
        self.reached.set()
        await self._open.wait()


class MemoryCold:
    """A `Cold` tier of bytes in memory. Used on the event loop only.

    `requests` counts calls by operation ('read', 'list', 'head'), `reads` those of a key, and `sent_bytes` what reads gave.
    `piece_bytes` is how much a read hands over between two interleaving points.
    """

    def __init__(
        self, source_id: str = "memory", *, dataset: str = "data", name: str = "memory", piece_bytes: int = 64 << 10
    ) -> None:
        assert piece_bytes > 0
        self.name = name
        self.source_id = source_id
        self.requests: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.sent_bytes = 0
        self._dataset = dataset
        self._piece_bytes = piece_bytes
        self._objects: dict[bytes, Stored] = {}
        self._order: list[bytes] = []
        self._gates: list[Gate] = []
        self._closed = False

    def put(self, key: str, data: bytes, *, mtime_seconds: int = 1_700_000_000, archived: bool = False) -> ObjectRef:
        """Create or overwrite an object; what a read of this version needs is returned."""
        raw = _raw(key)
        if raw not in self._objects:
            insort(self._order, raw)
        version = f"{hashlib.md5(data, usedforsecurity=False).hexdigest()}:{len(data)}"
        self._objects[raw] = Stored(bytes(data), Listed(key, version, len(data), mtime_seconds, archived))
        return self.ref(key)

    def delete(self, key: str) -> None:
        """Remove an object. KeyError when it is not there."""
        raw = _raw(key)
        del self._objects[raw]
        del self._order[bisect_left(self._order, raw)]

    def ref(self, key: str) -> ObjectRef:
        """The object's present version. KeyError when it is not there. Not counted as a request."""
        found = self._objects[_raw(key)].listed
        identity = object_id(self.source_id, key, found.version)
        return ObjectRef(self._dataset, key, found.version, found.size_bytes, found.mtime_seconds, identity)

    def hold(self, operation: str, key: str | None = None, *, after_bytes: int = 0) -> Gate:
        """Shut a gate before matching operations, or in a read once `after_bytes` were handed over."""
        gate = Gate(operation, key, after_bytes)
        self._gates.append(gate)
        return gate

    async def read(self, ref: ObjectRef, offset: int, length: int, sink: Sink) -> None:
        assert offset >= 0
        assert length > 0
        assert offset + length <= ref.size_bytes
        self.reads[ref.key] += 1
        await self._begin("read", ref.key)
        data = memoryview(self._current(ref).data)[offset : offset + length]
        done_bytes = 0
        while done_bytes < length:
            room = sink.buffer(min(length - done_bytes, self._piece_bytes))
            count = len(room)  # `advance` may release the view
            room[:] = data[done_bytes : done_bytes + count]
            sink.advance(count)
            self.sent_bytes += count
            done_bytes += count
            await self._interleave("read", ref.key, done_bytes)

    async def list(self, prefix: str, *, delimiter: bool = True, token: str = "", limit: int = MAX_PAGE) -> Page:
        await self._begin("list", prefix)
        objects: list[Listed] = []
        prefixes: list[str] = []
        last = ""
        for name in self._names(_raw(prefix), delimiter, token):
            if len(objects) + len(prefixes) == min(limit, MAX_PAGE):
                return Page(tuple(objects), tuple(prefixes), last)
            last = _text(name)
            if _is_prefix(name, _raw(prefix), delimiter):
                prefixes.append(last)
            else:
                objects.append(self._objects[name].listed)
        return Page(tuple(objects), tuple(prefixes), "")

    async def head(self, key: str) -> Listed:
        await self._begin("head", key)
        found = self._objects.get(_raw(key))
        if found is None:
            raise NotFound(f"{self.name}: no object {key!r}")
        return found.listed

    async def aclose(self) -> None:
        self._closed = True

    def _names(self, prefix: bytes, delimiter: bool, token: str) -> Iterator[bytes]:
        """Keys and, with a delimiter, prefixes below `prefix` in byte order, beginning after `token`."""
        at = bisect_left(self._order, prefix)
        if token:
            at = self._after(_raw(token), prefix, delimiter)
        while at < len(self._order) and self._order[at].startswith(prefix):
            raw = self._order[at]
            cut = raw.find(b"/", len(prefix)) if delimiter else -1
            name = raw if cut < 0 else raw[: cut + 1]
            yield name
            at = self._after(name, prefix, delimiter)

    def _after(self, name: bytes, prefix: bytes, delimiter: bool) -> int:
        if _is_prefix(name, prefix, delimiter):
            return bisect_left(self._order, name[:-1] + b"0")  # '0' follows '/'
        return bisect_right(self._order, name)

    def _current(self, ref: ObjectRef) -> Stored:
        found = self._objects.get(_raw(ref.key))
        if found is None:
            raise NotFound(f"{self.name}: no object {ref.key!r}")
        if found.listed.version != ref.version:
            raise VersionChanged(f"{self.name}: {ref.key!r} is no longer version {ref.version}")
        if found.listed.archived:
            raise Archived(f"{self.name}: {ref.key!r} is archived", hint="restore it first")
        return found

    async def _begin(self, operation: str, key: str) -> None:
        self.requests[operation] += 1
        await self._interleave(operation, key, 0)

    async def _interleave(self, operation: str, key: str, done_bytes: int) -> None:
        await trio.lowlevel.checkpoint()
        for gate in tuple(self._gates):
            if gate.holds(operation, key, done_bytes):
                await gate.passed()
        if self._closed:
            raise Unavailable(f"{self.name}: closed")


def _is_prefix(name: bytes, prefix: bytes, delimiter: bool) -> bool:
    return delimiter and len(name) > len(prefix) and name.endswith(b"/")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
