"""Jobs: they outlast who started them, are bounded, and tell how they ended."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tiercache.engine.jobs import MAX_ENDED, MAX_RUNNING, Jobs
from tiercache.engine.progress import MAX_FAILURES, MAX_LINES, EvictProgress, ScrubProgress
from tiercache.errors import HotSick, NotFound, Unavailable, UsageError


async def nothing() -> None:
    await trio.lowlevel.checkpoint()


async def refused() -> None:
    raise HotSick("the disk failed", hint="replace it")


async def test_a_job_runs_and_tells_how_it_ended(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        jobs = Jobs(nursery)
        progress = EvictProgress(total_count=1)
        good, bad = jobs.start("evict", nothing, progress.snapshot), jobs.start("evict", refused, progress.snapshot)
        assert (good.number, good.state, bad.state) == (1, "running", "running")
        await trio.testing.wait_all_tasks_blocked()
        assert jobs.find(good.number).state == "done"
        assert jobs.find(bad.number).state == "failed"
        assert bad.error is not None
        assert bad.error.line == "the disk failed; replace it"
        assert good.show().total_count == 1
        with pytest.raises(NotFound, match="no job 3"):
            jobs.find(3)


async def test_running_and_ended_jobs_are_bounded() -> None:
    async with trio.open_nursery() as nursery:
        jobs = Jobs(nursery)
        first = jobs.start("evict", trio.sleep_forever, EvictProgress().snapshot)
        for _ in range(2 * MAX_ENDED):
            jobs.start("evict", nothing, EvictProgress().snapshot)
            await trio.testing.wait_all_tasks_blocked()
        assert jobs.find(first.number).state == "running"
        assert jobs.find(2 * MAX_ENDED + 1).state == "done"
        with pytest.raises(NotFound):
            jobs.find(2)
        for _ in range(MAX_RUNNING - 1):
            jobs.start("evict", trio.sleep_forever, EvictProgress().snapshot)
        with pytest.raises(Unavailable, match="8 jobs are running"):
            jobs.start("evict", nothing, EvictProgress().snapshot)
        nursery.cancel_scope.cancel()


async def test_one_of_a_kind_is_joined_and_other_terms_are_refused() -> None:
    async with trio.open_nursery() as nursery:
        jobs = Jobs(nursery)
        assert jobs.join("scrub of the warm tier") is None
        job = jobs.start("scrub of the warm tier", trio.sleep_forever, ScrubProgress().snapshot, terms="with --repair")
        assert jobs.join("scrub of the warm tier", terms="with --repair") is job
        assert jobs.join("scrub of the hot tier", terms="with --repair") is None
        with pytest.raises(UsageError, match="a scrub of the warm tier with --repair is running"):
            jobs.join("scrub of the warm tier")
        assert jobs.running("scrub of the warm tier", "with --repair") is job
        assert jobs.running("scrub of the warm tier", "") is None
        nursery.cancel_scope.cancel()


def test_what_is_remembered_is_bounded() -> None:
    evict, scrub = EvictProgress(), ScrubProgress()
    for number in range(2 * MAX_FAILURES):
        evict.failures.add(str(number), HotSick("sick"))
    for number in range(2 * MAX_LINES):
        scrub.say(str(number))
    assert (evict.snapshot().failed_count, len(evict.snapshot().failures)) == (2 * MAX_FAILURES, MAX_FAILURES)
    assert len(scrub.snapshot().lines) == MAX_LINES
