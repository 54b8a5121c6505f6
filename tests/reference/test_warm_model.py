"""Random histories of targets, failures, demotions, reads, repairs and crashes. What one once found has a test of its own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.engines import KIB
from tests.reference.warm_model import Model
from tests.reference.warm_steps import (
    KEYS,
    LOSSES,
    NODES_COUNT,
    SIZES,
    WEATHERS,
    Cold,
    Crash,
    Damage,
    Demote,
    MakeRoom,
    Mend,
    Overwrite,
    Probe,
    Read,
    Recover,
    Scrub,
    Step,
    Storm,
    Survive,
    Trouble,
)
from tests.warm.damage import KINDS
from tests.warm.trouble import Weather
from tiercache.engine import holdings
from tiercache.tiers.warm import copies

log = logging.getLogger(__name__)

HANGS_SECONDS = 120.0
SHAPES = (("4+2", 6), ("4+2", 8), ("2+1", 3), ("2+1", 5), ("1+1", 2), ("1+0", 1))

nodes = st.integers(0, NODES_COUNT - 1)
keys = st.sampled_from(KEYS)
positions = st.integers(0, 7)
shares = st.floats(0, 0.999)
weighted: list[tuple[int, st.SearchStrategy[Step]]] = [
    (1, st.builds(Overwrite, keys, st.sampled_from(SIZES), st.integers(0, 3))),
    (1, st.builds(Read, nodes, keys, st.booleans())),
    (4, st.builds(Survive, nodes)),
    (3, st.builds(Demote, nodes, st.booleans(), st.booleans())),
    (4, st.builds(Trouble, positions, st.sampled_from([*LOSSES, *WEATHERS]))),
    (2, st.builds(Damage, shares, st.integers(0, len(KINDS) - 1))),
    (1, st.builds(Recover, positions)),
    (2, st.builds(Probe, nodes)),
    (2, st.builds(Scrub, nodes, st.booleans())),
    (2, st.builds(Crash, nodes, st.integers(0, 150), st.sampled_from(["demote", "repair", "nothing"]), st.booleans())),
    (1, st.builds(MakeRoom, nodes, st.sampled_from([10 * KIB, 500 * KIB]))),
    (1, st.builds(Cold, st.booleans())),
    (1, st.builds(Storm, st.integers(0, 1 << 30))),
    (1, st.builds(Mend, nodes)),
]
one_step = st.one_of([strategy for weight, strategy in weighted for _ in range(weight)])
beginnings: st.SearchStrategy[list[Step]] = st.sampled_from([[Demote(0, fill=True, evict=True)], []])
histories = st.builds(lambda first, rest: [*first, *rest], beginnings, st.lists(one_step, min_size=5, max_size=14))


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    monkeypatch.setattr(holdings, "RETIRE_SECONDS", 0.0)
    monkeypatch.setattr(copies, "ABSENT_SECONDS", 0.0)
    made = Weather()
    made.attach(monkeypatch)
    return made


async def play(weather: Weather, shape: tuple[str, int], is_pressed: bool, history: Sequence[Step]) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as home, trio.fail_after(HANGS_SECONDS):
        async with trio.open_nursery() as nursery:
            model = Model(Path(home), nursery, weather, *shape, is_pressed=is_pressed)
            try:
                await model.start()
                for step in history:
                    await model.step(step)
                await model.finish()
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
                    await model.stop()


SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@settings(SETTINGS, max_examples=15)
@given(st.sampled_from(SHAPES), st.booleans(), histories)
def test_the_warm_tier_agrees_with_the_model(
    weather: Weather, shape: tuple[str, int], is_pressed: bool, history: list[Step]
) -> None:
    trio.run(play, weather, shape, is_pressed, history)


@pytest.mark.soak
@settings(SETTINGS, max_examples=600)
@given(st.sampled_from(SHAPES), st.booleans(), histories)
def test_the_warm_tier_agrees_with_the_model_for_long(
    weather: Weather, shape: tuple[str, int], is_pressed: bool, history: list[Step]
) -> None:
    trio.run(play, weather, shape, is_pressed, history)
