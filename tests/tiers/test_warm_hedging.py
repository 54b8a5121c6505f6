"""Who is late is not waited for: with a clock of its own, and on real targets of which some hang."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from tests.tiers.warm_copies import CHUNK_BYTES, Flash, flash
from tiercache.errors import NotHeld, Unavailable
from tiercache.tiers.warm.hedging import (
    HEDGE_CEILING_SECONDS,
    HEDGE_FLOOR_SECONDS,
    PATIENCE_SECONDS,
    STUCK_SECONDS,
    UNTRIED_SECONDS,
    Ask,
    Hedging,
)
from tiercache.tiers.warm.target import Target

DATA = b"".join(b"%d, " % number for number in range(40_000))


class Scripted:
    """Targets by number that answer after so many seconds, or fail."""

    def __init__(self, hedging: Hedging) -> None:
        self.hedging = hedging
        self.asked: list[int] = []
        self.targets = [cast(Target, SimpleNamespace(path=f"/{number}", uuid=b"")) for number in range(10)]

    def ask(self, number: int, seconds: float, usual_seconds: float = 0.01, *, fails: bool = False) -> Ask[str]:
        async def call() -> str:
            self.asked.append(number)
            await trio.sleep(seconds)
            if fails:
                raise Unavailable("scripted")
            return f"answer {number}"

        return Ask(number, self.targets[number], usual_seconds, call)


async def test_only_as_many_are_asked_as_are_needed(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        race = await script.hedging.gather([script.ask(number, 0.01) for number in range(6)], 4)
        assert sorted(script.asked) == [0, 1, 2, 3]
        assert race.answers == {number: f"answer {number}" for number in range(4)}
        assert race.hedges_count == 0


async def test_one_that_is_late_is_overtaken(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        asks = [script.ask(0, 60.0), *(script.ask(number, 0.005) for number in range(1, 6))]
        began = trio.current_time()
        race = await script.hedging.gather(asks, 4)
        assert set(race.answers) == {1, 2, 3, 4}
        assert race.hedges_count == 1
        assert trio.current_time() - began == pytest.approx(0.04 + 0.005)

        script.asked.clear()
        race = await script.hedging.gather(asks, 4)
        assert sorted(script.asked) == [1, 2, 3, 4]  # it lags: it is the last to be asked
        assert trio.current_time() - began == pytest.approx(0.05)
        await trio.sleep(STUCK_SECONDS)
        script.asked.clear()
        race = await script.hedging.gather(asks, 6)
        assert sorted(script.asked) == [1, 2, 3, 4, 5]
        nursery.cancel_scope.cancel()


async def test_an_ask_that_fails_is_replaced_at_once(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        asks = [script.ask(number, 0.0, fails=number < 2) for number in range(6)]
        race = await script.hedging.gather(asks, 4)
        assert set(race.answers) == {2, 3, 4, 5}
        assert sorted(number for number, _, _ in race.failures) == [0, 1]
        race = await script.hedging.gather(asks, 5)
        assert len(race.answers) == 4


async def test_a_late_answer_counts_when_it_is_the_first(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        race = await script.hedging.gather([script.ask(0, 0.05), script.ask(1, 60.0)], 1)
        assert set(race.answers) == {0}
        nursery.cancel_scope.cancel()


async def test_nobody_waits_for_ever(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        began = trio.current_time()
        race = await script.hedging.gather([script.ask(number, 600.0) for number in range(3)], 2)
        assert race.answers == {}
        assert trio.current_time() - began <= 2 * HEDGE_CEILING_SECONDS + PATIENCE_SECONDS
        began = trio.current_time()
        await script.hedging.gather([script.ask(number, 600.0) for number in range(3)], 2)
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()


async def test_slow_is_not_dead(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        race = await script.hedging.gather([script.ask(number, PATIENCE_SECONDS * 0.9) for number in range(2)], 2)
        assert len(race.answers) == 2


async def test_in_order_one_answer_may_end_it(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        asks = [script.ask(0, 3.0), script.ask(1, 0.001), script.ask(2, 3.0)]
        race = await script.hedging.in_order(asks, 3, lambda race: bool(race.answers))
        assert set(race.answers) == {1}
        nursery.cancel_scope.cancel()


async def test_in_order_who_lags_is_asked_with_the_next_beside(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        asks = [script.ask(0, 1.5), *(script.ask(number, 0.005) for number in range(1, 6))]
        for _ in range(2):
            script.asked.clear()
            began = trio.current_time()
            race = await script.hedging.in_order(asks, 3, lambda race: len(race.answers) >= 3)
            assert set(race.answers) == {1, 2, 3}
            assert sorted(script.asked) == [0, 1, 2, 3]
        assert trio.current_time() - began == pytest.approx(0.005)
        race = await script.hedging.in_order(asks, 3, lambda race: len(race.answers) >= 4)
        assert set(race.answers) == {0, 1, 2, 3}  # a late answer is waited for where it matters


async def test_deadlines() -> None:
    async with trio.open_nursery() as nursery:
        script = Scripted(Hedging(nursery))
        usual_to_deadline = {0.0: UNTRIED_SECONDS, 0.001: HEDGE_FLOOR_SECONDS, 0.05: 0.2, 3.0: HEDGE_CEILING_SECONDS}
        for usual_seconds, deadline_seconds in usual_to_deadline.items():
            assert script.ask(0, 0.0, usual_seconds).deadline_seconds == pytest.approx(deadline_seconds)


class Hanging:
    """Makes calls of some targets wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: set[str] = set()
        self.calls_count = 0
        self._let_go = trio.Event()
        for name in ("read", "read_whole", "names", "scan"):
            monkeypatch.setattr(Target, name, self._wrapped(getattr(Target, name)))

    def let_go(self) -> None:
        self.paths.clear()
        self._let_go.set()

    def _wrapped(self, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(target: Target, *arguments: Any, **named: Any) -> Any:
            if target.path in self.paths:
                self.calls_count += 1
                await self._let_go.wait()
            return await original(target, *arguments, **named)

        return call


async def _reads(store: Flash, count: int) -> None:
    for number in range(count):
        offset = number * 777 % (len(DATA) - 50_000)
        assert await store.read("key", DATA, offset, 50_000) == DATA[offset : offset + 50_000]


async def test_m_targets_that_hang_cost_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch)
    async with flash(tmp_path) as store:
        await store.write("key", DATA)
        await _reads(store, 3)
        for pair in itertools.islice(itertools.combinations(store.targets.all, 2), 0, 15, 4):
            node = store.another_node()
            hanging.paths = {target.path for target in pair}
            hanging.calls_count = 0
            with trio.fail_after(20.0):
                await _reads(node, 20)
            assert hanging.calls_count <= 6  # names, manifest and one piece of each
            hanging.let_go()
            hanging = Hanging(monkeypatch)


async def test_m_more_that_hang_are_an_error_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch)
    async with flash(tmp_path) as store:
        await store.write("key", DATA)
        await _reads(store, 1)
        hanging.paths = {target.path for target in store.targets.all[:3]}
        store.warm = store.another_node().warm
        with trio.fail_after(4 * PATIENCE_SECONDS):
            for _ in range(3):
                with pytest.raises((Unavailable, NotHeld)):  # where just these have the manifest, nobody knows of it
                    await store.read("key", DATA, 0, CHUNK_BYTES)
        hanging.let_go()


async def test_a_read_that_ended_leaves_no_memory_taken_by_late_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch)
    async with flash(tmp_path) as store:
        await store.write("key", DATA)
        hanging.paths = {store.targets.all[0].path}
        await _reads(store, 2)
        assert store.warm.working_bytes == 0
        hanging.let_go()
