"""Tests of the engine move the clock themselves: what is batched over real time is done at once."""

import pytest

from tiercache.engine import holdings


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "RETIRE_SECONDS", 0.0)
