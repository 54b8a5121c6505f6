"""What `Patience` takes for a hang, and whom it lets in. (How a replica uses it: test_replica.py.)"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import trio

from tests.tiers.warm_target import DEADLINE_SECONDS, until
from tiercache.core.backoff import Backoff
from tiercache.errors import Unavailable
from tiercache.tiers.warm.patience import Hung, Patience


def _patience(clock: Callable[[], float], threads_count: int = 4) -> Patience:
    policy = Backoff(first_seconds=1.0, ceiling_seconds=8.0, floor_seconds=1.0)
    return Patience("disk", threads_count=threads_count, abandoned_limit=2, policy=policy, rng=random.Random(1), clock=clock)


class Blocker:
    """Jobs that block until they are let go; more than `count` begun."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun_count = 0

    def __call__(self) -> None:
        self.begun_count += 1
        assert self.go.wait(DEADLINE_SECONDS)


async def _leave(patience: Patience, blocker: Blocker, seconds: float) -> None:
    begun_count = blocker.begun_count
    async with trio.open_nursery() as nursery:
        nursery.start_soon(patience.run, blocker, seconds)
        await until(lambda: blocker.begun_count > begun_count)
        nursery.cancel_scope.cancel()


async def test_a_call_whose_caller_left_hangs_only_when_its_own_time_is_over() -> None:
    now = 0.0
    patience, blocker = _patience(lambda: now), Blocker()
    try:
        for _ in range(3):
            await _leave(patience, blocker, 10.0)
        assert (patience.outstanding_count, patience.hanging_count, patience.is_suspect) == (3, 0, False)
        assert await patience.run(lambda: "in", 5.0) == "in"
        now = 11.0
        assert (patience.hanging_count, patience.is_suspect) == (3, True)
        with pytest.raises(Unavailable, match="does not answer"):
            await patience.run(lambda: None, 5.0)
    finally:
        blocker.go.set()
    await until(lambda: patience.outstanding_count == 0)
    assert await patience.run(lambda: "in", 5.0) == "in"


async def test_who_queues_while_it_becomes_suspect_is_not_let_in() -> None:
    patience, blocker = _patience(trio.current_time, threads_count=2), Blocker()
    outcomes: list[type[BaseException]] = []

    async def one() -> None:
        try:
            await patience.run(blocker, 0.05)
        except Unavailable as error:
            outcomes.append(type(error))

    try:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
        assert sorted(kind.__name__ for kind in outcomes) == ["Hung"] * 2 + ["Unavailable"] * 18
        assert blocker.begun_count == 2
    finally:
        blocker.go.set()
    await until(lambda: patience.outstanding_count == 0)


async def test_a_call_that_gets_no_thread_is_refused_as_busy_which_is_no_hang() -> None:
    patience, blocker = _patience(lambda: 0.0), Blocker()
    try:
        for _ in range(12):  # all threads that there are, each with time left
            await _leave(patience, blocker, 10.0)
        with pytest.raises(Unavailable, match="busy") as caught:
            await patience.run(blocker, 0.01)
        assert not isinstance(caught.value, Hung)
        assert (patience.is_suspect, blocker.begun_count) == (False, 12)
    finally:
        blocker.go.set()
    await until(lambda: patience.outstanding_count == 0)


async def test_a_probe_returns_what_it_found_and_raises_what_it_met() -> None:
    patience, blocker = _patience(trio.current_time), Blocker()
    try:
        for _ in range(2):
            with pytest.raises(Hung):
                await patience.run(blocker, 0.01)
        assert patience.is_suspect
        with pytest.raises(Hung):
            await patience.attempt(blocker, 0.01)
        assert patience.is_suspect
        assert await patience.attempt(lambda: "found", 5.0) == "found"
        assert not patience.is_suspect
    finally:
        blocker.go.set()
    await until(lambda: patience.outstanding_count == 0)
