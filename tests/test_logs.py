"""The log does not drown in one event, and never takes the daemon with it."""

import errno
import io

import pytest
import structlog

from tiercache import logs
from tiercache.logs import BURST_COUNT, WINDOW_SECONDS, Throttle, Unfailing


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


def test_a_line_that_cannot_be_written_is_lost_and_nothing_else() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, text)

        def flush(self) -> None:
            raise BrokenPipeError

    stream = Unfailing(Full())
    stream.write("line\n")
    stream.flush()
