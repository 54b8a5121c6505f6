"""The log does not drown in one event."""

import pytest
import structlog

from tiercache import logs
from tiercache.logs import BURST_COUNT, WINDOW_SECONDS, Throttle


def test_a_burst_of_one_event_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    throttle = Throttle()
    for _ in range(BURST_COUNT):
        assert throttle(None, "warning", {"event": "full"}) == {"event": "full"}
    for _ in range(3):
        with pytest.raises(structlog.DropEvent):
            throttle(None, "warning", {"event": "full"})
    assert throttle(None, "info", {"event": "mounted"}) == {"event": "mounted"}
    now += WINDOW_SECONDS
    assert throttle(None, "warning", {"event": "full"}) == {"event": "full", "left_out": 3}
    assert throttle(None, "warning", {"event": "full"}) == {"event": "full"}
