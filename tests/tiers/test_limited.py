from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tiercache.core.backoff import Backoff
from tiercache.errors import TierError, Unavailable
from tiercache.tiers.faulty import Fault, Faulty, Script
from tiercache.tiers.limited import TURN_COUNT, Limited
from tiercache.tiers.memory import MemoryCold
from tiercache.tiers.retrying import Retrying
from tiercache.tiers.tier import Cold, MemorySink


class Gated:
    """A memory tier with one gate for each key: operations end when the test says so."""

    def __init__(self, concurrency: int) -> None:
        self.memory = MemoryCold()
        self.tier = Limited(self.memory, concurrency)
        self.begun: list[str] = []
        self._gates = {}
        for number in range(30):
            for kind in "fb":
                key = f"{kind}{number}"
                self.memory.put(key, b"x")
                self._gates[key] = self.memory.hold("head", key)

    async def head(self, cold: Cold, key: str) -> None:
        await cold.head(key)

    async def running(self) -> set[str]:
        await wait_all_tasks_blocked()
        return {key for key, gate in self._gates.items() if gate.reached.is_set() and key not in self._done()}

    def _done(self) -> set[str]:
        return {key for key, gate in self._gates.items() if not gate.holds("head", key, 0)}

    async def finish(self, key: str) -> None:
        self._gates[key].release()
        await wait_all_tasks_blocked()


async def _start(nursery: trio.Nursery, rig: Gated, cold: Cold, *keys: str) -> None:
    for key in keys:
        nursery.start_soon(rig.head, cold, key)
        await wait_all_tasks_blocked()


async def test_at_most_n_at_once_and_first_come_first_served() -> None:
    rig = Gated(2)
    async with trio.open_nursery() as nursery:
        await _start(nursery, rig, rig.tier, "f0", "f1", "f2", "f3")
        assert await rig.running() == {"f0", "f1"}
        await rig.finish("f1")
        assert await rig.running() == {"f0", "f2"}
        await rig.finish("f0")
        assert await rig.running() == {"f2", "f3"}
        nursery.cancel_scope.cancel()


async def test_foreground_goes_first_and_background_leaves_room_for_it() -> None:
    rig = Gated(4)
    background = rig.tier.background()
    async with trio.open_nursery() as nursery:
        await _start(nursery, rig, background, "b0", "b1", "b2", "b3", "b4")
        assert await rig.running() == {"b0", "b1", "b2"}
        await _start(nursery, rig, rig.tier, "f0", "f1", "f2")
        assert await rig.running() == {"b0", "b1", "b2", "f0"}
        await rig.finish("b0")
        assert await rig.running() == {"b1", "b2", "f0", "f1"}
        await rig.finish("f0")
        assert await rig.running() == {"b1", "b2", "f1", "f2"}
        await rig.finish("f1")
        assert await rig.running() == {"b1", "b2", "b3", "f2"}
        nursery.cancel_scope.cancel()


async def test_background_is_not_starved() -> None:
    rig = Gated(1)
    async with trio.open_nursery() as nursery:
        await _start(nursery, rig, rig.tier, "f0")
        await _start(nursery, rig, rig.tier.background(), "b0")
        await _start(nursery, rig, rig.tier, *(f"f{number}" for number in range(1, 20)))
        for number in range(TURN_COUNT + 1):
            assert await rig.running() == {f"f{number}"}
            await rig.finish(f"f{number}")
        assert await rig.running() == {"b0"}
        await rig.finish("b0")
        assert await rig.running() == {f"f{TURN_COUNT + 1}"}
        nursery.cancel_scope.cancel()


async def test_a_waiter_that_leaves_costs_no_slot() -> None:
    rig = Gated(1)
    async with trio.open_nursery() as nursery:
        await _start(nursery, rig, rig.tier, "f0")
        with trio.CancelScope() as leaving:
            async with trio.open_nursery() as inner:
                await _start(inner, rig, rig.tier, "f1")
                await _start(inner, rig, rig.tier.background(), "b1")
                assert rig.tier.slots.waiting_count == 2
                leaving.cancel()
        assert rig.tier.slots.waiting_count == 0
        await _start(nursery, rig, rig.tier, "f2")
        await rig.finish("f0")
        assert await rig.running() == {"f2"}
        nursery.cancel_scope.cancel()


async def test_a_waiter_cancelled_while_it_gets_its_slot_gives_it_on() -> None:
    rig = Gated(1)
    async with trio.open_nursery() as nursery:
        await _start(nursery, rig, rig.tier, "f0")
        with trio.CancelScope() as leaving:
            async with trio.open_nursery() as inner:
                await _start(inner, rig, rig.tier, "f1")
                await _start(nursery, rig, rig.tier, "f2")
                rig._gates["f0"].release()
                leaving.cancel()
        await wait_all_tasks_blocked()
        assert await rig.running() == {"f2"}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("concurrency", [1, 2, 5])
async def test_errors_and_cancellations_leak_no_slots(concurrency: int) -> None:
    memory = MemoryCold(piece_bytes=10)
    ref = memory.put("key", bytes(1000))
    rng = random.Random(concurrency)
    faults = Script(*(Fault("read", after_bytes=rng.randrange(900), error=lambda: Unavailable("x")) for _ in range(40)))
    tier = Limited(Faulty(memory, faults), concurrency)
    views: list[Cold] = [tier, tier.background()]

    async def one() -> None:
        with trio.move_on_after(rng.choice([0, 0.001, 5])):
            try:
                await rng.choice(views).read(ref, 0, 1000, MemorySink(1000))
            except Unavailable:
                return

    async with trio.open_nursery() as nursery:
        for _ in range(120):
            nursery.start_soon(one)
    held: list[Callable[[], Awaitable[object]]] = [lambda: tier.head("key")] * concurrency
    gate = memory.hold("head")
    async with trio.open_nursery() as nursery:
        for call in held:
            nursery.start_soon(call)
        await wait_all_tasks_blocked()
        assert memory.requests["head"] == concurrency
        gate.release()


async def test_the_slot_is_free_while_a_retry_sleeps(autojump_clock: MockClock) -> None:
    memory = MemoryCold()
    memory.put("bad", b"1")
    memory.put("good", b"2")
    faults = Script(Fault("head", key="bad", error=lambda: Unavailable("busy", retry_after_seconds=10.0)))
    tier = Retrying(
        Limited(Faulty(memory, faults), 1),
        Backoff(),
        rng=random.Random(1),
        on_retry=_ignore,
        clock=trio.current_time,
    )
    finished: dict[str, float] = {}

    async def head(key: str) -> None:
        await tier.head(key)
        finished[key] = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(head, "bad")
        await wait_all_tasks_blocked()
        nursery.start_soon(head, "good")
    assert finished["good"] < 0.1
    assert finished["bad"] > 10.0


def _ignore(operation: str, error: TierError) -> None:
    pass
