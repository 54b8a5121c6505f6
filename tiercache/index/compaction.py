"""Keeping the sidecar log small: rewrite it from the index, in slices, while the writer goes on.

A busy cache completes objects for ever, so the log is rewritten when it is twice what the present records need (and at least
`MIN_LOG_BYTES`): every frame is then written about twice in its life. A slice reads `SLICE_RECORDS` records and is
followed by a pause, so that neither commits nor the interpreter's lock wait for it: 1,000,000 records take about a
minute. What the writer appends meanwhile goes to the old log; its tail from `self._from_bytes` on is copied at the
end, and since the last frame about an id wins, nothing is lost. A crash leaves the old log and a temporary file that the next
compaction overwrites.
"""

from __future__ import annotations

import os
import random
from itertools import islice
from pathlib import Path

from tiercache.core.record import OBJECT_ID_BYTES, Pin
from tiercache.index.environment import Environment
from tiercache.index.records import CHUNKS, HOT
from tiercache.index.sidecar import READ_BYTES, ObjectLog, encode_object, encode_pin, sick

MIN_LOG_BYTES = 1 << 20
SLICE_RECORDS = 200
PAUSE_SECONDS = 0.01
SAMPLE_COUNT = 64
LOST_RATIO = 0.9
"""A log is never shorter than what it must hold, but the need is an estimate."""


def is_due(log: ObjectLog, environment: Environment, hot_count: int, pins: list[Pin]) -> bool:
    """Is the log much longer than what it must hold, or so short that something of it was lost?"""
    needed = _needed_bytes(environment, hot_count) + sum(len(encode_pin(pin)) for pin in pins)
    return log.size_bytes > max(MIN_LOG_BYTES, 2 * needed) or log.size_bytes < LOST_RATIO * needed


def _needed_bytes(environment: Environment, hot_count: int) -> int:
    """About what the present objects need, from a sample of the records (ids are hashes: seeks draw fairly)."""
    rng = random.Random(hot_count)
    sizes: list[int] = []
    with environment.reading_as_writer() as view:
        for _ in range(min(SAMPLE_COUNT, hot_count)):
            found = next(view.scan(HOT, rng.randbytes(OBJECT_ID_BYTES)), None) or next(view.scan(HOT, b""), None)
            if found is not None:
                key, record = found
                frame = encode_object(record, view.scan(CHUNKS, key, key)) if record.complete else None
                sizes.append(len(frame or b""))
    return hot_count * sum(sizes) // len(sizes) if sizes else 0


class Compaction:
    """One rewriting of the log. `step` until it gives the new log; `abandon` when it raised."""

    def __init__(self, log: ObjectLog, pins: list[Pin]) -> None:
        """Raises HotSick."""
        self._log = log
        self._from_bytes = log.size_bytes
        self._temporary = log.path.with_suffix(".rewrite")
        self._next_key = b""
        try:
            self._temporary.unlink(missing_ok=True)
        except OSError as error:
            raise sick(self._temporary, error) from error
        self._rewritten = ObjectLog(self._temporary)
        self._rewritten.append([encode_pin(pin) for pin in pins])

    def step(self, environment: Environment) -> ObjectLog | None:
        """One slice; the rewritten log once it has taken the old one's place. Raises HotSick, IndexDamaged."""
        frames: list[bytes] = []
        last_key = b""
        with environment.reading_as_writer() as view:
            for key, record in islice(view.scan(HOT, self._next_key), SLICE_RECORDS):
                last_key = key
                frame = encode_object(record, view.scan(CHUNKS, key, key)) if record.complete else None
                if frame is not None:
                    frames.append(frame)
        self._rewritten.append(frames)
        if last_key:
            self._next_key = last_key + b"\x00"
            return None
        self._finish()
        return self._rewritten

    def abandon(self) -> None:
        self._rewritten.close()

    def _finish(self) -> None:
        try:
            with self._log.path.open("rb") as old:
                old.seek(self._from_bytes)
                while block := old.read(READ_BYTES):
                    self._rewritten.append([block])
            self._rewritten.sync()
            os.replace(self._temporary, self._log.path)
            sync_directory(self._log.path.parent)
        except OSError as error:
            raise sick(self._log.path, error) from error
        self._rewritten.path = self._log.path
        self._log.close()


def sync_directory(directory: Path) -> None:
    """Names that were made, renamed or removed in it are on the disk when this returns. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
