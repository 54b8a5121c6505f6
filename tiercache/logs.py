"""Log lines: one event a line, `key=value`, to standard error.

Under systemd that is the journal (which stamps the time); a daemon in the background has a file there (see `cli/spawn.py`).
Libraries that use `logging` come out through the same line format, from warnings upward.
"""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure() -> None:
    """Idempotent."""
    stamp: list[structlog.typing.Processor] = []
    if "JOURNAL_STREAM" not in os.environ:
        stamp = [structlog.processors.TimeStamper(fmt="iso", utc=True)]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *stamp,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, format="level=%(levelname)s event=library logger=%(name)s message=%(message)r")
