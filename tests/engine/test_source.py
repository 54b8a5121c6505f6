"""Which tier below the hot one serves, and who has the last word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.engines import MIB, content, dataset_on, engine_on
from tiercache.core.record import ObjectRef
from tiercache.engine.source import EXPLORE_EVERY, Source, WarmCopies
from tiercache.errors import BadResponse, HotSick, NotHeld, TierError, Unavailable, VersionChanged
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.measured import Estimate, MeasuredTier
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.tier import MemorySink

DATA = content(1, MIB)


class Pair:
    """A cold store and a replica that hold the same object, and what the source reported."""

    def __init__(self, replica_faults: Script | None = None, cold_faults: Script | None = None) -> None:
        self.cold = MemoryCold(name="cold")
        self.replica = MemoryCold(name="replica")
        self.ref = self.cold.put("a", DATA)
        self.replica.put("a", DATA)
        self.served: list[tuple[str, int]] = []
        self.passed: list[str] = []
        self.cold_seconds = self.replica_seconds = 0.0
        dataset = dataset_on(Faulty(self.cold, cold_faults or Script()), replica=Faulty(self.replica, replica_faults or Script()))
        object.__setattr__(dataset, "cold_cost", lambda length: self.cold_seconds)
        object.__setattr__(dataset, "replica_cost", lambda length: self.replica_seconds)
        self.source = Source(dataset, self._served, self._passed)

    def _served(self, dataset: str, tier: str, count: int) -> None:
        self.served.append((tier, count))

    def _passed(self, dataset: str, tier: str, error: TierError) -> None:
        self.passed.append(type(error).__name__)

    async def read(self, ref: ObjectRef | None = None) -> tuple[str, bytes]:
        sink = MemorySink(MIB)
        tier = await self.source.read(ref or self.ref, 0, MIB, sink, background=False)
        return tier, bytes(sink.view)


async def test_the_replica_serves_while_it_can() -> None:
    pair = Pair()
    assert await pair.read() == ("replica", DATA)
    assert pair.cold.requests["read"] == 0
    assert pair.served == [("replica", MIB)]


@pytest.mark.parametrize(
    ("error", "passed"),
    [
        (NotHeld("not here"), []),
        (Unavailable("it hangs"), ["Unavailable"]),
        (BadResponse("nonsense"), ["BadResponse"]),
        (VersionChanged("of the replica only"), ["VersionChanged"]),
    ],
)
async def test_a_replica_that_fails_falls_through_and_cold_goes_on_where_it_stopped(error: TierError, passed: list[str]) -> None:
    pair = Pair(Script(Fault("read", after_bytes=100_000, error=lambda: error)))
    assert await pair.read() == ("cold", DATA)
    assert pair.served == [("replica", 100_000), ("cold", MIB - 100_000)]
    assert pair.cold.sent_bytes == MIB - 100_000
    assert pair.passed == passed


async def test_the_cold_store_has_the_last_word() -> None:
    pair = Pair(Script(Fault("read", error=lambda: NotHeld("not here"))))
    pair.cold.put("a", content(2, MIB))
    with pytest.raises(VersionChanged):
        await pair.read()


async def test_a_failure_of_the_cache_disk_is_not_the_replicas() -> None:
    class SickSink(MemorySink):
        def advance(self, count: int) -> None:
            raise HotSick("the cache disk failed")

    pair = Pair()
    with pytest.raises(HotSick):
        await pair.source.read(pair.ref, 0, MIB, SickSink(MIB), background=False)
    assert pair.cold.requests["read"] == 0


async def test_a_slower_replica_is_tried_now_and_then() -> None:
    pair = Pair()
    pair.cold_seconds, pair.replica_seconds = 0.1, 0.2
    for _ in range(2 * EXPLORE_EVERY):
        assert (await pair.read())[1] == DATA
    assert pair.replica.requests["read"] == 2


async def test_a_replica_that_dies_half_way_does_not_show_in_what_is_read(tmp_path: Path) -> None:
    cold, replica = MemoryCold(name="cold"), MemoryCold(name="replica")
    data = content(3, 3 * MIB)
    cold.put("a", data)
    replica.put("a", data)
    faults = Script(*(Fault("read", after_bytes=70_000 * n, error=lambda: Unavailable("gone")) for n in range(20)))
    async with engine_on(tmp_path, cold, replica=Faulty(replica, faults)) as mount:
        assert await mount.cat("a") == data
        await mount.settled()
        assert await mount.cat("a") == data
        assert cold.sent_bytes + replica.sent_bytes == len(data)


class WithWarm:
    """A cold store and a warm tier that hold the same object."""

    def __init__(self, warm_faults: Script | None = None, cold_faults: Script | None = None) -> None:
        self.cold = MemoryCold(name="cold")
        self.warm = MemoryCold(name="warm")
        self.ref = self.cold.put("a", DATA)
        self.warm.put("a", DATA)
        self.cold_seconds = 0.0
        self.trouble = ""
        dataset = dataset_on(Faulty(self.cold, cold_faults or Script()))
        object.__setattr__(dataset, "cold_usual", lambda length: self.cold_seconds)
        object.__setattr__(dataset, "trouble", lambda: self.trouble)
        self.tier = MeasuredTier(Faulty(self.warm, warm_faults or Script()), lambda *_: None)
        self.is_lacking = self.is_seen = False
        copies = WarmCopies(self.tier, lambda _: self.is_lacking, lambda _: self.is_seen)
        self.source = Source(dataset, lambda *_: None, lambda *_: None, copies)

    def took(self, seconds: float) -> None:
        """Warm reads take that long."""
        self.tier.estimate = Estimate(lambda: 0.0)
        self.tier.estimate.add(seconds, 0.0, 0)

    async def read(self) -> str:
        sink = MemorySink(MIB)
        tier = await self.source.read(self.ref, 0, MIB, sink, background=False)
        assert bytes(sink.view) == DATA
        return tier


async def test_a_warm_copy_spares_the_store_unless_it_is_much_slower() -> None:
    pair = WithWarm()
    assert await pair.read() == "warm"
    pair.took(0.5)
    assert await pair.read() == "warm", "nobody knows how fast the store is"
    pair.cold_seconds = 0.3
    assert await pair.read() == "warm", "less than twice as long"
    pair.took(0.5)
    pair.cold_seconds = 0.2
    assert await pair.read() == "cold"
    pair.took(0.015)
    pair.cold_seconds = 0.001
    assert await pair.read() == "warm", "a few milliseconds are no reason"


async def test_only_a_warm_copy_that_will_be_read_stands_in_for_the_stores_word() -> None:
    pair = WithWarm()
    assert not pair.source.has_warm(pair.ref)
    pair.is_seen = True
    assert pair.source.has_warm(pair.ref)
    pair.took(0.5)
    pair.cold_seconds = 0.2
    assert not pair.source.has_warm(pair.ref), "the store is faster, and may find that the version is gone"


async def test_where_there_is_no_copy_the_warm_tier_is_not_asked() -> None:
    pair = WithWarm()
    pair.is_lacking = True
    assert await pair.read() == "cold"
    assert pair.warm.requests["read"] == 0


async def test_a_store_that_cannot_be_reached_is_stood_in_for_by_a_slow_warm_copy() -> None:
    pair = WithWarm(cold_faults=Script(*[Fault("read", error=lambda: Unavailable("gone"))] * 9))
    pair.took(0.5)
    pair.cold_seconds = 0.1
    assert await pair.read() == "warm"
    pair.trouble = "the last read failed"
    assert await pair.read() == "warm"


async def test_what_the_store_says_of_the_version_stands_whatever_is_warm() -> None:
    pair = WithWarm(cold_faults=Script(Fault("read", error=lambda: VersionChanged("overwritten"))))
    pair.took(0.5)
    pair.cold_seconds = 0.1
    with pytest.raises(VersionChanged):
        await pair.read()


async def test_when_neither_has_it_the_stores_error_is_told() -> None:
    nowhere = Script(*[Fault("read", error=lambda: NotHeld("none"))] * 9)
    pair = WithWarm(nowhere, Script(*[Fault("read", error=lambda: Unavailable("the store is gone"))] * 9))
    pair.took(0.5)
    pair.cold_seconds = 0.1
    with pytest.raises(Unavailable, match="the store is gone"):
        await pair.read()


def test_large_reads_that_come_at_once_do_not_count_against_small_ones() -> None:
    estimate = Estimate(lambda: 0.0)
    estimate.add_whole(0.08, 8 * MIB)
    estimate.add_whole(0.001, 100_000)
    for _ in range(50):
        estimate.add_whole(0.081, 8 * MIB)
    assert estimate.read_seconds(100_000) < 0.003
    assert estimate.read_seconds(8 * MIB) == pytest.approx(0.081, rel=0.1)
