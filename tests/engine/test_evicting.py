"""Eviction by hand: what is meant by a path, what may go, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.engine.engines import CHUNK_BYTES, DATASET, Lagging, Mounted, content, engine_on, until
from tiercache.core.record import HotRecord, Pin
from tiercache.engine.demotion import Outcome
from tiercache.engine.evicting import Evicting, Scope
from tiercache.engine.pinning import key_of
from tiercache.engine.progress import EvictProgress
from tiercache.errors import HotSick, Unavailable
from tiercache.index.memory import MemoryIndex
from tiercache.tiers.memory import MemoryCold

FILES = {name: content(number, CHUNK_BYTES) for number, name in enumerate(("a", "ab", "a/b/c", "a/b/d", "a/e", "f"))}


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    for key, data in FILES.items():
        store.put(key, data)
    return store


def evicting(mount: Mounted) -> Evicting:
    return Evicting(mount.engine.index, mount.engine.holdings, "{}/{}".format)


async def warm(mount: Mounted, *keys: str) -> None:
    for key in keys:
        await mount.cat(key)
    await mount.settled()


def hot_keys(mount: Mounted) -> set[str]:
    return {record.key for record in mount.engine.index.all_hot()}


@pytest.mark.parametrize(
    ("scope", "meant"),
    [
        (Scope(prefixes={(DATASET, "")}), {"a/b/c", "a/b/d", "a/e", "ab", "f"}),
        (Scope(prefixes={(DATASET, "a/b/"), (DATASET, "a/")}), {"a/b/c", "a/b/d", "a/e"}),
        (Scope(prefixes={(DATASET, "a/b/")}), {"a/b/c", "a/b/d"}),
        (Scope(prefixes={("other", "")}), set()),
        (Scope(keys={(DATASET, "ab")}), {"ab"}),
        (Scope(), set()),
    ],
)
async def test_a_prefix_means_what_is_hot_below_it(tmp_path: Path, cold: MemoryCold, scope: Scope, meant: set[str]) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warm(mount, "a/b/c", "a/b/d", "a/e", "ab", "f")
        progress = EvictProgress()
        ids, found = await evicting(mount).find(scope, progress)
        assert progress.total_count == len(meant)
        assert progress.total_bytes == len(meant) * CHUNK_BYTES
        assert bool(found) == bool(meant)
        await evicting(mount).drop(ids, progress)
        assert hot_keys(mount) == {"a/b/c", "a/b/d", "a/e", "ab", "f"} - meant
        assert (progress.dropped_count, progress.done_count, progress.done_bytes) == (
            len(meant),
            len(meant),
            len(meant) * CHUNK_BYTES,
        )


async def test_an_object_that_is_meant_twice_counts_once(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warm(mount, "a/e", "f")
        progress = EvictProgress()
        ids, _ = await evicting(mount).find(Scope({cold.ref("a/e").object_id}, {(DATASET, "")}), progress)
        await evicting(mount).drop(ids, progress)
        assert (progress.total_count, progress.dropped_count) == (2, 2)


async def test_what_is_in_use_or_pinned_stays(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        pin = Pin(DATASET, "a/e", True, "me", "", 0, 0, CHUNK_BYTES)
        await mount.engine.pinning.add([pin])
        await until(lambda: mount.engine.pinning.progress(key_of(pin)).done)
        await warm(mount, "a/b/c", "a/e", "f")
        held = await mount.engine.holdings.acquire(cold.ref("f"))
        progress = EvictProgress()
        hand = evicting(mount)
        ids, _ = await hand.find(Scope(prefixes={(DATASET, "")}), progress)
        await hand.drop(ids, progress)
        mount.engine.holdings.release(held)
        assert (progress.dropped_count, progress.in_use_count, progress.pinned_count) == (1, 1, 1)
        assert progress.done_count == progress.total_count == 3
        assert hot_keys(mount) == {"a/e", "f"}


async def test_demotion_comes_before_removal_and_a_failure_leaves_the_copy(tmp_path: Path, cold: MemoryCold) -> None:
    outcomes = {"a/b/c": Outcome.WRITTEN, "a/b/d": Outcome.ALREADY, "a/e": Outcome.SKIPPED, "f": Outcome.FAILED}

    async def demote(records: Sequence[HotRecord], settled: Callable[[HotRecord, Outcome], None]) -> None:
        for record in records:
            assert mount.engine.index.hot(record.object_id) is not None
            settled(record, outcomes[record.key])

    async with engine_on(tmp_path, cold) as mount:
        await warm(mount, *outcomes)
        progress = EvictProgress()
        hand = evicting(mount)
        ids, _ = await hand.find(Scope(prefixes={(DATASET, "")}), progress)
        await hand.demote(ids, demote, progress)
        assert progress.snapshot().counts == {"demoted": 1, "already": 1, "dropped": 1, "in_use": 0, "pinned": 0}
        assert progress.done_count == 4
        [(path, error)] = progress.failures.kept
        assert path == f"{DATASET}/f"
        assert "no warm copy could be written" in error.line
        assert hot_keys(mount) == {"f"}


async def test_what_is_settled_goes_while_others_are_still_written(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warm(mount, "a/e", "f")

        def is_gone(record: HotRecord) -> bool:
            return mount.engine.index.hot(record.object_id) is None

        async def demote(records: Sequence[HotRecord], settled: Callable[[HotRecord, Outcome], None]) -> None:
            for record in records:
                settled(record, Outcome.WRITTEN)
                await until(partial(is_gone, record))

        progress = EvictProgress()
        ids, _ = await evicting(mount).find(Scope(prefixes={(DATASET, "")}), progress)
        await evicting(mount).demote(ids, demote, progress)
        assert progress.demoted_count == 2


async def test_what_was_evicted_while_it_should_be_demoted_is_no_failure(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warm(mount, "a/e", "f")

        async def demote(records: Sequence[HotRecord], settled: Callable[[HotRecord, Outcome], None]) -> None:
            await mount.engine.holdings.evict([record.object_id for record in records if record.key == "f"])
            for record in records:
                settled(record, Outcome.FAILED)

        progress = EvictProgress()
        ids, _ = await evicting(mount).find(Scope(prefixes={(DATASET, "")}), progress)
        await evicting(mount).demote(ids, demote, progress)
        assert (progress.dropped_count, progress.failures.count) == (1, 1)
        assert hot_keys(mount) == {"a/e"}


async def test_a_failure_of_demotion_comes_alone_after_what_was_settled_is_gone(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warm(mount, "a/e", "f")

        async def demote(records: Sequence[HotRecord], settled: Callable[[HotRecord, Outcome], None]) -> None:
            settled(records[0], Outcome.WRITTEN)
            raise Unavailable("no targets")

        progress = EvictProgress()
        ids, _ = await evicting(mount).find(Scope(prefixes={(DATASET, "")}), progress)
        with pytest.raises(Unavailable, match="no targets"):
            await evicting(mount).demote(ids, demote, progress)
        assert progress.demoted_count == 1


async def test_an_index_that_fails_is_a_failure_of_each(tmp_path: Path, cold: MemoryCold) -> None:
    index = Lagging(MemoryIndex())
    async with engine_on(tmp_path, cold, index=index) as mount:
        await warm(mount, "a/e", "f")
        progress = EvictProgress()
        hand = evicting(mount)
        ids, _ = await hand.find(Scope(prefixes={(DATASET, "")}), progress)
        index.failing = lambda: HotSick("no space left")
        await hand.drop(ids, progress)
        index.failing = None
        assert (progress.failures.count, progress.dropped_count, progress.done_count) == (2, 0, 2)
