"""Jobs over a real engine: what a path means, who is joined, and what is refused without a warm tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio

from tests.engine.engines import CHUNK_BYTES, DATASET, Mounted, content, engine_on, until
from tiercache.admin.answers import Answers
from tiercache.admin.answers import Mounted as Mount
from tiercache.admin.messages import EvictRequest, JobStatus, ReadPath, ScrubRequest
from tiercache.admin.places import Places
from tiercache.admin.work import EngineWork
from tiercache.core.record import HotRecord, ObjectRef
from tiercache.engine.demotion import Outcome
from tiercache.engine.progress import RebuildProgress, ScrubProgress
from tiercache.engine.warm_controls import TargetFacts, WarmControls, WarmFacts
from tiercache.errors import Unavailable, UsageError
from tiercache.tiers.faulty import Fault, Faulty
from tiercache.tiers.memory import MemoryCold

POINT = "/mnt/a"
FILES = {name: content(number, CHUNK_BYTES) for number, name in enumerate(("d/x", "d/y", "e", "de"))}


@pytest.fixture
def cold() -> MemoryCold:
    store = MemoryCold()
    for key, data in FILES.items():
        store.put(key, data)
    return store


class FakeWarm:
    """A warm tier that takes everything, and scrubs until it is let go."""

    def __init__(self) -> None:
        self.demoted: list[str] = []
        self.may_end = trio.Event()
        self.repairs: list[bool] = []
        self.is_down = False

    def controls(self) -> WarmControls:
        target = TargetFacts("/flash", "ab", "up", "", 1, 2, 3, 0, False, True)
        return WarmControls(lambda: WarmFacts(1, 0, [target]), self.holds, self.demote, self.scrub, self.rebuild)

    async def holds(self, ref: ObjectRef) -> bool:
        if self.is_down:
            raise Unavailable("only 0 of 1 warm targets answer")
        return ref.key in self.demoted

    async def demote(self, records: Sequence[HotRecord], settled: Callable[[HotRecord, Outcome], None]) -> None:
        for record in records:
            self.demoted.append(record.key)
            settled(record, Outcome.WRITTEN)

    async def scrub(self, repair: bool, progress: ScrubProgress) -> None:
        self.repairs.append(repair)
        progress.damaged_count = 1
        progress.say("a shard is missing")
        await self.may_end.wait()

    async def rebuild(self, progress: RebuildProgress) -> None:
        progress.copies_count = 7
        raise Unavailable("all targets are down", hint="mount them")


class Away:
    """A store that cannot be reached when it is away."""

    is_away = False

    def draw(self, operation: str, key: str) -> Fault | None:
        return Fault(operation, error=lambda: Unavailable("the store is away")) if self.is_away else None


def work_on(mount: Mounted, warm: FakeWarm | None = None) -> EngineWork:
    places = Places(mount.engine, POINT, single=True)
    return EngineWork(mount.engine, places, None if warm is None else warm.controls())


async def warmed(mount: Mounted) -> None:
    for key in FILES:
        await mount.cat(key)
    await mount.settled()


async def ended(work: EngineWork, number: int) -> JobStatus:
    await until(lambda: work.job(number).state != "running")
    return work.job(number)


@pytest.mark.parametrize(
    ("paths", "left"),
    [
        ([POINT], set()),
        ([f"{POINT}/d"], {"e", "de"}),
        ([f"{POINT}/d/"], {"e", "de"}),
        ([f"{DATASET}/d/x", f"{POINT}/e", f"{POINT}/e"], {"d/y", "de"}),
    ],
)
async def test_paths_mean_files_and_what_is_below_directories(
    tmp_path: Path, cold: MemoryCold, paths: list[str], left: set[str]
) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warmed(mount)
        work = work_on(mount)
        status = await ended(work, work.evict(EvictRequest(paths)).job)
        assert (status.state, status.failed_count) == ("done", 0)
        assert status.counts["dropped"] == status.done_count == status.total_count == len(FILES) - len(left)
        assert {record.key for record in mount.engine.index.all_hot()} == left


async def test_a_path_that_is_not_there_is_a_failure_beside_the_others(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warmed(mount)
        work = work_on(mount)
        paths = [f"{POINT}/none", "/elsewhere", "other/x", f"{POINT}/e"]
        status = await ended(work, work.evict(EvictRequest(paths)).job)
        assert (status.state, status.failed_count, status.counts["dropped"]) == ("done", 3, 1)
        assert [failure.path for failure in status.failures] == [f"{POINT}/none", "/elsewhere", "other/x"]
        assert ["does not exist" in failure.error for failure in status.failures] == [True, False, False]
        again = await ended(work, work.evict(EvictRequest([f"{POINT}/e"])).job)
        assert (again.total_count, again.failed_count) == (0, 0)


async def test_what_is_hot_goes_while_the_store_is_down(tmp_path: Path, cold: MemoryCold) -> None:
    store = Away()
    async with engine_on(tmp_path, Faulty(cold, store), ttl_seconds=1.0) as mount:
        await warmed(mount)
        mount.clock.pass_seconds(1e6)
        store.is_away = True
        work = work_on(mount)
        status = await ended(work, work.evict(EvictRequest([f"{POINT}/d", f"{POINT}/e", f"{POINT}/z"])).job)
        assert {record.key for record in mount.engine.index.all_hot()} == {"de"}
        assert status.counts["dropped"] == 3
        assert [failure.path for failure in status.failures] == [f"{POINT}/z"]


async def test_the_warm_tier_is_where_evicted_files_go_unless_they_are_dropped(tmp_path: Path, cold: MemoryCold) -> None:
    warm = FakeWarm()
    async with engine_on(tmp_path, cold) as mount:
        await warmed(mount)
        work = work_on(mount, warm)
        status = await ended(work, work.evict(EvictRequest([f"{POINT}/d"])).job)
        assert status.counts["demoted"] == 2
        assert sorted(warm.demoted) == ["d/x", "d/y"]
        status = await ended(work, work.evict(EvictRequest([f"{POINT}/e"], "drop")).job)
        assert (status.counts["demoted"], status.counts["dropped"]) == (0, 1)
        await ended(work, work.evict(EvictRequest([f"{POINT}/de"], "warm")).job)
        assert sorted(warm.demoted) == ["d/x", "d/y", "de"]
        assert mount.engine.index.hot_count() == 0


async def test_one_scrub_of_a_tier_at_a_time(tmp_path: Path, cold: MemoryCold) -> None:
    warm = FakeWarm()
    async with engine_on(tmp_path, cold) as mount:
        await warmed(mount)
        work = work_on(mount, warm)
        first = work.scrub(ScrubRequest())
        assert not first.joined
        joined = work.scrub(ScrubRequest("warm"))
        assert (joined.job, joined.joined) == (first.job, True)
        with pytest.raises(UsageError, match="a scrub of the warm tier without --repair is running"):
            work.scrub(ScrubRequest("warm", repair=True))
        hot = await ended(work, work.scrub(ScrubRequest("hot")).job)
        assert (hot.kind, hot.done_count, hot.damaged_count) == ("scrub of the hot tier", len(FILES), 0)
        warm.may_end.set()
        status = await ended(work, first.job)
        assert (status.state, status.damaged_count, status.repaired_count) == ("done", 1, 0)
        assert status.lines == ["a shard is missing"]
        await ended(work, work.scrub(ScrubRequest("warm", repair=True)).job)
        assert warm.repairs == [False, True]


async def test_the_same_eviction_is_joined(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        await warmed(mount)
        work = work_on(mount)
        first = work.evict(EvictRequest([f"{POINT}/d"]))
        assert work.evict(EvictRequest([f"{POINT}/d"])).job == first.job
        other = work.evict(EvictRequest([f"{POINT}/e"]))
        assert (other.joined, other.job) == (False, first.job + 1)
        assert (await ended(work, first.job)).counts["dropped"] == 2
        assert not work.evict(EvictRequest([f"{POINT}/d"])).joined


async def test_a_job_that_gives_up_says_why(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        work = work_on(mount, FakeWarm())
        status = await ended(work, work.rebuild_index().job)
        assert (status.state, status.error, status.hint) == ("failed", "all targets are down", "mount them")
        assert status.counts["copies"] == 7
        assert [target.path for target in work.targets().targets] == ["/flash"]


def answers_on(mount: Mounted, warm: FakeWarm) -> Answers:
    mounted = Mount(
        mountpoint=POINT,
        socket="",
        path=lambda: ReadPath("plain"),
        native_counts=lambda: None,
        hot_paths=["/hot"],
        notices=[],
        forget_names=lambda _: None,
        unmount=trio.lowlevel.checkpoint,
        hand_over=no_successor,
        supervisor=lambda: None,
        restarts_count=0,
        stall_seconds=lambda: None,
    )
    return Answers(mount.engine, mount.tally, mounted, single=True, warm=warm.controls())


async def no_successor() -> str:
    raise AssertionError("nobody asked for one")


async def test_where_status_and_metrics_know_the_warm_tier(tmp_path: Path, cold: MemoryCold) -> None:
    warm = FakeWarm()
    async with engine_on(tmp_path, cold) as mount:
        await warmed(mount)
        answers = answers_on(mount, warm)
        assert (await answers.where(f"{POINT}/e")).residency == ["hot", "cold"]
        await ended(answers.work, answers.work.evict(EvictRequest([f"{POINT}/e"])).job)
        assert (await answers.where(f"{POINT}/e")).residency == ["warm", "cold"]
        warm.is_down = True
        assert (await answers.where(f"{POINT}/e")).residency == ["cold"]
        assert answers.status().tiers.warm.state == "ok"
        assert b'tiercache_target_state{target="/flash"} 2.0' in answers.metrics()


async def test_without_a_warm_tier_only_the_hot_one_can_be_asked_for(tmp_path: Path, cold: MemoryCold) -> None:
    async with engine_on(tmp_path, cold) as mount:
        work = work_on(mount)
        for ask in (
            lambda: work.evict(EvictRequest([POINT], "warm")),
            lambda: work.scrub(ScrubRequest("warm")),
            work.rebuild_index,
        ):
            with pytest.raises(UsageError, match="no warm tier") as caught:
                ask()
            assert "--warm-target" in caught.value.hint
        with pytest.raises(UsageError, match="no paths"):
            work.evict(EvictRequest([]))
        assert work.scrub(ScrubRequest()).kind == "scrub of the hot tier"
        assert work.targets().targets == []
