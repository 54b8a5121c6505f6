"""Log lines: one event a line, `key=value`, to standard error.

Under systemd that is the journal (which stamps the time); a daemon in the background has a file there (see `cli/spawn.py`).
Libraries that use `logging` come out through the same line format, from warnings upward.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from typing import TextIO, cast

import structlog

BURST_COUNT = 20
WINDOW_SECONDS = 10.0


class Throttle:
    """At most BURST_COUNT lines of one event in WINDOW_SECONDS; the next line after that says how many were left out.

    A disk that is full or a store that is down would otherwise fill the log with one line for each request.
    """

    def __init__(self) -> None:
        self._windows: dict[str, tuple[float, int]] = {}

    def __call__(self, logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        name, now = str(event.get("event")), time.monotonic()
        began, count = self._windows.get(name, (now, 0))
        if now - began >= WINDOW_SECONDS:
            if count > BURST_COUNT:
                event["left_out"] = count - BURST_COUNT
            began, count = now, 0
        self._windows[name] = began, count + 1
        if count >= BURST_COUNT:
            raise structlog.DropEvent
        return event


class Unfailing:
    """A stream. A line that cannot be written (the disk is full, the reader has gone) is lost, and nothing else is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def configure() -> None:
    """Idempotent."""
    stamp: list[structlog.typing.Processor] = []
    if "JOURNAL_STREAM" not in os.environ:
        stamp = [structlog.processors.TimeStamper(fmt="iso", utc=True)]
    structlog.configure(
        processors=[
            Throttle(),
            structlog.processors.add_log_level,
            *stamp,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, Unfailing(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, format="level=%(levelname)s event=library logger=%(name)s message=%(message)r")
