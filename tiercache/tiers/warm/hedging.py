"""Several targets are asked for what one of them is enough for, or k of k+m: who is late is not waited for.

An ask that takes longer than four times what was measured for its target (between `HEDGE_FLOOR_SECONDS` and
`HEDGE_CEILING_SECONDS`) is *late*: the next target is asked, and the first answer counts, whoever gives it. An ask that fails
is replaced at once.

A late ask is not cancelled. It ends in the background, within the target's own deadline: a cancelled call would teach nobody
that the target is slow, and its thread could not be stopped anyway. While one is out, the target *lags* and is asked last; is
one out for `STUCK_SECONDS`, the target is not asked at all. So a target that hangs costs the readers of one moment a hedge
each, and then nothing, long before its deadline has made it suspect, and what waits for it is bounded by what was asked in that
moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

import trio

from tiercache.errors import TierError, Unavailable
from tiercache.tiers.warm.target import Target

T = TypeVar("T")

HEDGE_RATIO = 4.0
HEDGE_FLOOR_SECONDS = 0.02
HEDGE_CEILING_SECONDS = 1.0
UNTRIED_SECONDS = 0.1  # the deadline where nothing was measured yet
STUCK_SECONDS = 2.0
PATIENCE_SECONDS = 5.0
"""How long a race goes on when there is nobody left to be asked. Slow is not dead; whoever waits has the cold tier besides."""


class Ask(Generic[T]):
    """One question to one target. `number` says what the answer is to: asks of one number are alternatives."""

    __slots__ = ("call", "number", "target", "usual_seconds")

    def __init__(self, number: int, target: Target, usual_seconds: float, call: Callable[[], Awaitable[T]]) -> None:
        self.number = number
        self.target = target
        self.usual_seconds = usual_seconds
        self.call = call

    @property
    def deadline_seconds(self) -> float:
        if self.usual_seconds <= 0.0:
            return UNTRIED_SECONDS
        return min(max(HEDGE_RATIO * self.usual_seconds, HEDGE_FLOOR_SECONDS), HEDGE_CEILING_SECONDS)


class _Out:
    """An ask that has not come back."""

    __slots__ = ("late_at", "started_at", "target")

    def __init__(self, target: Target, now: float, deadline_seconds: float) -> None:
        self.target = target
        self.started_at = now
        self.late_at = now + deadline_seconds


class Race(Generic[T]):
    """What came of a number of asks. `failures` may have numbers that another target answered in the end."""

    def __init__(self, answers: Mapping[int, T], observe: Callable[[int, T], None] | None = None) -> None:
        self.answers: dict[int, T] = dict(answers)
        self._observe = observe
        self.who: dict[int, Target] = {}
        self.failures: list[tuple[int, Target, TierError]] = []
        self.hedges_count = 0
        self.out: set[_Out] = set()
        self.changed = trio.Event()

    def answered(self, ask: Ask[T], answer: T) -> None:
        if ask.number not in self.answers:
            self.answers[ask.number] = answer
            self.who[ask.number] = ask.target
            if self._observe is not None:
                self._observe(ask.number, answer)


class Hedging:
    """Asks go out as tasks of `nursery`, because a late one outlives who asked. Used on the event loop only."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._out: dict[str, set[_Out]] = {}

    def lags(self, target: Target) -> bool:
        """Does somebody wait for it longer than is usual?"""
        now = trio.current_time()
        return any(out.late_at < now for out in self._out.get(target.path, ()))

    def is_stuck(self, target: Target) -> bool:
        now = trio.current_time()
        return any(out.started_at + STUCK_SECONDS < now for out in self._out.get(target.path, ()))

    async def gather(
        self,
        asks: Sequence[Ask[T]],
        wanted_count: int,
        *,
        have: Mapping[int, T] | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        observe: Callable[[int, T], None] | None = None,
    ) -> Race[T]:
        """Ask in the given order, those that lag last, until there are answers to `wanted_count` numbers or nobody is left.

        `have` are answers from before. `observe` is told each new one as it comes, late ones after the end of the race too.
        Raises nothing: the race tells what is lacking.
        """
        race: Race[T] = Race(have or {}, observe)
        waiting = sorted((ask for ask in asks if not self.is_stuck(ask.target)), key=lambda ask: self.lags(ask.target))
        await self._run_race(race, waiting, wanted_count, lambda race: len(race.answers) >= wanted_count, patience_seconds)
        return race

    async def in_order(self, asks: Sequence[Ask[T]], wanted_count: int, is_over: Callable[[Race[T]], bool]) -> Race[T]:
        """Ask strictly in the given order, so that all that were not asked come behind those that were, until `is_over`.

        Those that lag are asked with the next one beside them. Who is stuck counts as failed.
        """
        race: Race[T] = Race({})
        for ask in asks:
            if self.is_stuck(ask.target):
                race.failures.append((ask.number, ask.target, Unavailable(f"warm target {ask.target.path} does not answer")))
        waiting = [ask for ask in asks if not self.is_stuck(ask.target)]
        await self._run_race(race, waiting, wanted_count, is_over, PATIENCE_SECONDS)
        return race

    async def _run_race(
        self,
        race: Race[T],
        asks: Sequence[Ask[T]],
        wanted_count: int,
        is_over: Callable[[Race[T]], bool],
        patience_seconds: float,
    ) -> None:
        waiting = deque(asks)
        give_up_at = trio.current_time() + patience_seconds
        while not is_over(race):
            needed = wanted_count - len(race.answers)
            now = trio.current_time()
            on_time = sum(out.late_at > now for out in race.out)
            while waiting and on_time < needed:
                race.hedges_count += on_time < len(race.out)
                out = self._start(race, waiting.popleft())
                give_up_at = now + patience_seconds
                on_time += out.late_at > now
            if not race.out or now >= give_up_at:
                break
            until = min((out.late_at for out in race.out if out.late_at > now), default=give_up_at) if waiting else give_up_at
            race.changed = trio.Event()
            with trio.move_on_at(until):
                await race.changed.wait()

    def _start(self, race: Race[T], ask: Ask[T]) -> _Out:
        out = _Out(ask.target, trio.current_time(), 0.0 if self.lags(ask.target) else ask.deadline_seconds)
        race.out.add(out)
        self._out.setdefault(ask.target.path, set()).add(out)
        self._nursery.start_soon(self._run, race, ask, out)
        return out

    async def _run(self, race: Race[T], ask: Ask[T], out: _Out) -> None:
        try:
            race.answered(ask, await ask.call())
        except TierError as error:
            race.failures.append((ask.number, ask.target, error))
        except trio.Cancelled:
            race.failures.append((ask.number, ask.target, Unavailable("the daemon is stopping")))
            raise
        finally:
            race.out.discard(out)
            self._out[ask.target.path].discard(out)
            race.changed.set()
