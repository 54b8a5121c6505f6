"""What every cold tier must do, as functions over a `Store`: run by `test_conformance.py` on each implementation.

A check uses keys of its own below `store.prefix`, so that all checks may share one bucket.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import pytest
import trio

from tiercache.core.record import Listed, ObjectRef, Page, object_id
from tiercache.errors import NotFound, TierError, Unavailable, VersionChanged
from tiercache.tiers.tier import MAX_PAGE, Cold, MemorySink, SinkClosed

DEADLINE_SECONDS = 20.0
BLOB = random.Random(7).randbytes(3_000_003)


class Store(Protocol):
    """A cold tier and a way to change what it shows. `prefix` is '' or ends in '/'.

    `is_exact`: keys are sorted by their bytes, and no two of them are taken for one (SeaweedFS does neither).
    """

    cold: Cold
    prefix: str
    is_exact: bool

    async def put(self, key: str, data: bytes) -> None: ...

    async def delete(self, key: str) -> None: ...


def ref_of(cold: Cold, found: Listed) -> ObjectRef:
    identity = object_id(cold.source_id, found.key, found.version)
    return ObjectRef("data", found.key, found.version, found.size_bytes, found.mtime_seconds, identity)


async def put(store: Store, name: str, data: bytes) -> ObjectRef:
    await store.put(store.prefix + name, data)
    return ref_of(store.cold, await store.cold.head(store.prefix + name))


async def read(cold: Cold, ref: ObjectRef, offset: int, length: int) -> bytes:
    sink = MemorySink(length)
    await cold.read(ref, offset, length, sink)
    assert sink.received_bytes == length
    return bytes(sink.view)


async def pages(cold: Cold, prefix: str, *, delimiter: bool, limit: int) -> list[Page]:
    found = [await cold.list(prefix, delimiter=delimiter, limit=limit)]
    while found[-1].token:
        found.append(await cold.list(prefix, delimiter=delimiter, token=found[-1].token, limit=limit))
    return found


async def reads_exact_ranges(store: Store) -> None:
    ref = await put(store, "ranges", BLOB)
    size = len(BLOB)
    ranges = [(0, size), (0, 1), (size - 1, 1), (1, size - 1), (4095, 4098), (1 << 20, 1 << 20), (size - 4097, 4097)]
    rng = random.Random(11)
    for _ in range(12):
        offset = rng.randrange(size)
        ranges.append((offset, rng.randint(1, size - offset)))
    for offset, length in ranges:
        assert await read(store.cold, ref, offset, length) == BLOB[offset : offset + length]


async def reads_at_once(store: Store) -> None:
    ref = await put(store, "at-once", BLOB)
    got: dict[int, bytes] = {}

    async def one(offset: int) -> None:
        got[offset] = await read(store.cold, ref, offset, min(400_000, len(BLOB) - offset))

    async with trio.open_nursery() as nursery:
        for offset in range(0, len(BLOB), 400_000):
            nursery.start_soon(one, offset)
    assert b"".join(got[offset] for offset in sorted(got)) == BLOB


async def resumes_in_the_same_sink(store: Store) -> None:
    ref = await put(store, "resume", BLOB)
    sink = MemorySink(len(BLOB))
    await store.cold.read(ref, 0, 1_234_567, sink)
    assert sink.received_bytes == 1_234_567
    await store.cold.read(ref, 1_234_567, len(BLOB) - 1_234_567, sink)
    assert bytes(sink.view) == BLOB


async def case_16_reads_small_objects(store: Store) -> None:
    empty = await put(store, "small/empty", b"")
    single = await put(store, "small/single", b"x")
    assert (empty.size_bytes, single.size_bytes) == (0, 1)
    assert await read(store.cold, single, 0, 1) == b"x"
    page = await store.cold.list(store.prefix + "small/")
    assert [(found.key, found.size_bytes) for found in page.objects] == [(empty.key, 0), (single.key, 1)]


async def case_3_overwrite_is_version_changed(store: Store) -> None:
    old = await put(store, "changing", b"a" * 100_000)
    new = await put(store, "changing", b"b" * 100_000)
    assert new.version != old.version
    sink = MemorySink(100_000)
    with pytest.raises(VersionChanged):
        await store.cold.read(old, 0, 100_000, sink)
    assert sink.received_bytes == 0
    assert await read(store.cold, new, 0, 100_000) == b"b" * 100_000


async def case_3_growing_and_shrinking_is_version_changed(store: Store) -> None:
    first = await put(store, "sized", b"a" * 10_000)
    grown = await put(store, "sized", b"a" * 20_000)
    with pytest.raises(VersionChanged):
        await read(store.cold, first, 0, 10_000)
    await put(store, "sized", b"a" * 5_000)
    with pytest.raises(VersionChanged):
        await read(store.cold, grown, 0, 10_000)
    with pytest.raises(VersionChanged):
        await read(store.cold, grown, 15_000, 5_000)


async def case_2_deleted_is_not_found(store: Store) -> None:
    ref = await put(store, "leaving/file", b"data")
    await store.delete(ref.key)
    sink = MemorySink(4)
    with pytest.raises(NotFound):
        await store.cold.read(ref, 0, 4, sink)
    assert sink.received_bytes == 0
    with pytest.raises(NotFound):
        await store.cold.head(ref.key)
    assert (await store.cold.list(ref.key)).objects == ()


async def never_serves_a_mixture(store: Store) -> None:
    """Whatever a read gives while its object is overwritten again and again is of one version."""
    size = 600_000
    versions = [await put(store, "mixing", bytes([letter]) * size) for letter in b"AB"]
    done = trio.Event()

    async def overwrite() -> None:
        for turn in range(12):
            await store.put(store.prefix + "mixing", bytes([b"AB"[turn % 2]]) * size)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(overwrite)
        while not done.is_set():
            try:
                ref = ref_of(store.cold, await store.cold.head(store.prefix + "mixing"))
            except NotFound:
                ref = versions[0]
            if ref.size_bytes == 0:
                continue  # just truncated
            sink = MemorySink(ref.size_bytes)
            with suppress(VersionChanged, NotFound):
                await store.cold.read(ref, 0, ref.size_bytes, sink)
            assert len(set(sink.view)) <= 1


async def head_agrees_with_listing(store: Store) -> None:
    await put(store, "heads/one", b"1")
    await put(store, "heads/two", b"22")
    page = await store.cold.list(store.prefix + "heads/")
    assert len(page.objects) == 2
    for found in page.objects:
        head = await store.cold.head(found.key)
        assert (head.key, head.version, head.size_bytes) == (found.key, found.version, found.size_bytes)
        assert head.mtime_seconds == found.mtime_seconds
    for absent in ("heads", "heads/three", "heads/one/below", *(("heads/",) if store.is_exact else ())):
        with pytest.raises(NotFound):
            await store.cold.head(store.prefix + absent)


TREE = ("t/a", "t/a-b", "t/a/x", "t/a/y/z", "t/b/1", "t/b/2", "t/b0", "t/c", "t/é", "t/z/deep/er/leaf")
CLASHING = frozenset({"t/a"})  # a file and a directory: no filesystem can hold both


async def _plant(store: Store) -> list[str]:
    keys = [key for key in TREE if key not in CLASHING]
    for key in keys:
        await store.put(store.prefix + key, key.encode())
    return keys


async def lists_one_level(store: Store) -> None:
    await _plant(store)
    page = await store.cold.list(store.prefix + "t/")
    assert [found.key for found in page.objects] == [store.prefix + key for key in ("t/a-b", "t/b0", "t/c", "t/é")]
    assert list(page.prefixes) == [store.prefix + key for key in ("t/a/", "t/b/", "t/z/")]
    assert page.token == ""


async def lists_every_level(store: Store) -> None:
    keys = await _plant(store)
    for limit in (1, 2, 3, MAX_PAGE):
        found = await pages(store.cold, store.prefix + "t/", delimiter=False, limit=limit)
        assert all(len(page.objects) <= limit and not page.prefixes for page in found)
        listed = [item.key for page in found for item in page.objects]
        wanted = sorted((store.prefix + key for key in keys), key=str.encode)
        assert (listed if store.is_exact else sorted(listed, key=str.encode)) == wanted


async def lists_in_pages(store: Store) -> None:
    await _plant(store)
    for limit in (1, 2, 3, 5):
        found = await pages(store.cold, store.prefix + "t/", delimiter=True, limit=limit)
        assert all(len(page.objects) + len(page.prefixes) <= limit for page in found)
        names = [name for page in found for name in sorted([*(item.key for item in page.objects), *page.prefixes])]
        if not store.is_exact:
            names.sort()
        wanted = ("t/a-b", "t/a/", "t/b/", "t/b0", "t/c", "t/z/", "t/é")
        assert names == [store.prefix + name for name in wanted]


async def lists_by_beginning_of_a_name(store: Store) -> None:
    await _plant(store)
    page = await store.cold.list(store.prefix + "t/a", limit=16)
    assert [found.key for found in page.objects] == [store.prefix + "t/a-b"]
    assert list(page.prefixes) == [store.prefix + "t/a/"]
    deep = await store.cold.list(store.prefix + "t/b", delimiter=False)
    assert [found.key for found in deep.objects] == [store.prefix + key for key in ("t/b/1", "t/b/2", "t/b0")]


async def case_5_nothing_there_is_an_empty_page(store: Store) -> None:
    await _plant(store)
    for prefix in ("nowhere/", "nowhere", "t/c/", "t/a/x/y/"):
        for delimiter in (True, False):
            assert await store.cold.list(store.prefix + prefix, delimiter=delimiter) == Page((), (), "")


async def lists_more_than_a_page(store: Store) -> None:
    names = [f"many/{number:05}" for number in range(MAX_PAGE + 7)]
    async with trio.open_nursery() as nursery:
        limiter = trio.CapacityLimiter(8)

        async def plant(name: str) -> None:
            async with limiter:
                await store.put(store.prefix + name, b"")

        for name in names:
            nursery.start_soon(plant, name)
    found = await pages(store.cold, store.prefix + "many/", delimiter=True, limit=MAX_PAGE)
    assert [len(page.objects) for page in found] == [MAX_PAGE, 7]
    assert [item.key for page in found for item in page.objects] == [store.prefix + name for name in names]


async def closed_sink_ends_a_read(store: Store) -> None:
    """Quietly: SinkClosed or a plain return, never another error."""
    ref = await put(store, "closed", BLOB)
    sink = MemorySink(len(BLOB))
    sink.close()
    with trio.fail_after(DEADLINE_SECONDS):
        with suppress(SinkClosed):
            await store.cold.read(ref, 0, len(BLOB), sink)
    assert sink.received_bytes == 0


class LeavingSink(MemorySink):
    """Says when the first piece has come."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.began = trio.Event()
        self._token = trio.lowlevel.current_trio_token()

    def advance(self, count: int) -> None:
        super().advance(count)
        self._token.run_sync_soon(self.began.set)


async def cancellation_leaves_nothing_running(store: Store) -> None:
    ref = await put(store, "cancelled", BLOB)
    for _ in range(5):
        sink = LeavingSink(len(BLOB))
        with trio.fail_after(DEADLINE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.cold.read, ref, 0, len(BLOB), sink)
                await sink.began.wait()
                nursery.cancel_scope.cancel()
        after = sink.received_bytes
        assert bytes(sink.view) == BLOB[:after]
        assert await read(store.cold, ref, 5, 70_000) == BLOB[5:70_005]
        assert sink.received_bytes == after


async def closing_is_idempotent_and_final(store: Store) -> None:
    ref = await put(store, "last", b"last")
    await store.cold.aclose()
    await store.cold.aclose()
    with pytest.raises(Unavailable):
        await read(store.cold, ref, 0, 4)


async def unusual_names_read_or_say_not_found(store: Store) -> None:
    """CASES 15 at this level: keys that do not exist, or cannot, are NotFound, and nothing else happens."""
    odd = ("../x", "/x", "a//b", "a/../../etc/passwd", ".", "..")
    for key in ("x%2fy", " x y ", "x+y", *(odd if store.is_exact else ())):
        with pytest.raises(NotFound):
            await store.cold.head(store.prefix + key)
        ref = ObjectRef("data", store.prefix + key, "1-1-1", 1, 1, object_id("s", key, "1-1-1"))
        with pytest.raises(TierError) as caught:
            await read(store.cold, ref, 0, 1)
        assert isinstance(caught.value, NotFound | VersionChanged)


Check = Callable[[Store], Awaitable[None]]

CHECKS: tuple[Check, ...] = (
    reads_exact_ranges,
    reads_at_once,
    resumes_in_the_same_sink,
    case_16_reads_small_objects,
    case_3_overwrite_is_version_changed,
    case_3_growing_and_shrinking_is_version_changed,
    case_2_deleted_is_not_found,
    never_serves_a_mixture,
    head_agrees_with_listing,
    lists_one_level,
    lists_every_level,
    lists_in_pages,
    lists_by_beginning_of_a_name,
    case_5_nothing_there_is_an_empty_page,
    lists_more_than_a_page,
    closed_sink_ends_a_read,
    cancellation_leaves_nothing_running,
    unusual_names_read_or_say_not_found,
    closing_is_idempotent_and_final,
)

NAME_CHECKS: tuple[Check, ...] = (
    head_agrees_with_listing,
    lists_one_level,
    lists_every_level,
    lists_in_pages,
    lists_by_beginning_of_a_name,
    case_5_nothing_there_is_an_empty_page,
    unusual_names_read_or_say_not_found,
)
