"""Tests of the engine move the clock themselves: what is batched over real time is done at once."""

from collections.abc import AsyncIterator

import pytest

from tests.engine.worlds import World, worlds
from tiercache.engine import holdings


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "RETIRE_SECONDS", 0.0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with worlds() as made:
        yield made
