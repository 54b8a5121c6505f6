"""Who makes room waits for demotion while it gets on, and not otherwise."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tiercache.core.eviction import Evict
from tiercache.core.record import ObjectId
from tiercache.engine.outgoing import IN_VAIN_SECONDS, WAIT_SECONDS, Outgoing


@pytest.fixture
def clock(autojump_clock: MockClock) -> MockClock:
    return autojump_clock


def victim(number: int, held_bytes: int = 100) -> Evict:
    return Evict(ObjectId(number.to_bytes(20, "big")), held_bytes, 0)


def nobody(_: ObjectId) -> bool:
    return False


async def test_what_is_ready_is_taken_oldest_first_and_no_more_than_needed(clock: MockClock) -> None:
    outgoing = Outgoing(2)
    for number in range(5):
        outgoing.put(1, victim(number))
    assert victim(3).object_id in outgoing
    assert await outgoing.take(1, 150, nobody) == [victim(0), victim(1)]
    assert outgoing.ready_bytes(1) == 300
    assert await outgoing.take(0, 150, nobody) == []


async def test_what_is_in_use_again_is_left_out(clock: MockClock) -> None:
    outgoing = Outgoing(1)
    outgoing.put(0, victim(0))
    outgoing.put(0, victim(1))
    assert await outgoing.take(0, 100, lambda object_id: object_id == victim(0).object_id) == [victim(1)]
    assert outgoing.ready_bytes(0) == 0


async def test_one_waits_for_the_next_that_is_ready(clock: MockClock) -> None:
    outgoing = Outgoing(1)
    outgoing.open()
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await outgoing.until_wanted()
            assert outgoing.wanted_bytes(0) == 100
            await trio.sleep(WAIT_SECONDS / 2)
            outgoing.put(0, victim(0))

        nursery.start_soon(later)
        assert await outgoing.take(0, 100, nobody) == [victim(0)]
    assert not outgoing.is_wanted


async def test_after_one_has_waited_in_vain_nobody_waits_until_something_comes(clock: MockClock) -> None:
    outgoing = Outgoing(1)
    outgoing.open()
    began = trio.current_time()
    assert await outgoing.take(0, 100, nobody) == []
    assert trio.current_time() - began == pytest.approx(WAIT_SECONDS)
    began = trio.current_time()
    assert await outgoing.take(0, 100, nobody) == []
    assert trio.current_time() == began
    outgoing.put(0, victim(0))
    assert await outgoing.take(0, 100, nobody) == [victim(0)]
    assert await outgoing.take(0, 100, nobody) == []
    assert trio.current_time() - began == pytest.approx(WAIT_SECONDS)


async def test_when_there_is_nothing_to_demote_the_wait_is_short(clock: MockClock) -> None:
    outgoing = Outgoing(1)
    outgoing.open()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def nothing() -> None:
            while True:
                outgoing.nothing_more(0)
                await trio.sleep(0.01)

        nursery.start_soon(nothing)
        assert await outgoing.take(0, 100, nobody) == []
        nursery.cancel_scope.cancel()
    assert IN_VAIN_SECONDS <= trio.current_time() - began < WAIT_SECONDS


async def test_nobody_waits_for_a_warm_tier_that_refuses(clock: MockClock) -> None:
    outgoing = Outgoing(1)
    began = trio.current_time()
    assert await outgoing.take(0, 100, nobody) == []
    outgoing.open()
    async with trio.open_nursery() as nursery:

        async def refuse() -> None:
            await outgoing.until_wanted()
            outgoing.close()

        nursery.start_soon(refuse)
        assert await outgoing.take(0, 100, nobody) == []
    assert trio.current_time() == began
