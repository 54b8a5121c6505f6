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

from tests.reference.warm_model import (
    KEYS,
    LOSSES,
    NODES_COUNT,
    SIZES,
    WEATHERS,
    Cold,
    Crash,
    Damage,
    Demote,
    Mend,
    Model,
    Overwrite,
    Probe,
    Read,
    Recover,
    Scrub,
    Step,
    Storm,
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
troubles = st.builds(Trouble, positions, st.sampled_from([*LOSSES, *WEATHERS]))
one_step = st.one_of(
    st.builds(Overwrite, keys, st.sampled_from(SIZES), st.integers(0, 3)),
    st.builds(Read, nodes, keys, st.booleans()),
    st.builds(Read, nodes, keys, st.booleans()),
    st.builds(Demote, nodes, st.booleans()),
    st.builds(Demote, nodes, st.booleans()),
    troubles,
    st.builds(Damage, shares, st.integers(0, len(KINDS) - 1)),
    st.builds(Recover, positions),
    st.builds(Probe, nodes),
    st.builds(Scrub, nodes, st.booleans()),
    st.builds(Crash, nodes, st.integers(0, 150), st.sampled_from(["demote", "repair", "nothing"])),
    st.builds(Cold, st.booleans()),
    st.builds(Storm, st.integers(0, 1 << 30)),
    st.builds(Mend, nodes),
)
FILLED = [*(Read(0, key, fresh=False) for key in KEYS), Demote(0, evict=True)]
beginnings: st.SearchStrategy[list[Step]] = st.sampled_from([[], FILLED])
histories = st.builds(lambda first, rest: [*first, *rest], beginnings, st.lists(one_step, min_size=1, max_size=16))


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    monkeypatch.setattr(holdings, "RETIRE_SECONDS", 0.0)
    monkeypatch.setattr(copies, "ABSENT_SECONDS", 0.0)
    made = Weather()
    made.attach(monkeypatch)
    return made


async def play(weather: Weather, shape: tuple[str, int], history: Sequence[Step]) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as home, trio.fail_after(HANGS_SECONDS):
        async with trio.open_nursery() as nursery:
            model = Model(Path(home), nursery, weather, *shape)
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
@given(st.sampled_from(SHAPES), histories)
def test_the_warm_tier_agrees_with_the_model(weather: Weather, shape: tuple[str, int], history: list[Step]) -> None:
    trio.run(play, weather, shape, history)


@pytest.mark.soak
@settings(SETTINGS, max_examples=600)
@given(st.sampled_from(SHAPES), histories)
def test_the_warm_tier_agrees_with_the_model_for_long(weather: Weather, shape: tuple[str, int], history: list[Step]) -> None:
    trio.run(play, weather, shape, history)
