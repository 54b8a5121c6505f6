"""Is a warm target up, suspect or down? Decided from what its operations and probes came to. Pure: times are arguments.

            operation failed              probe failed again, or found no target there
    up ───────────────────────> suspect ──────────────────────────────────────────────> down
     ^                              │                                                      │
     └──────────── probe succeeded ─┴──────────────────────────────────────────────────────┘

An operation that fails (an error of the file system, or a hang) makes a target suspect and a probe due; only
probes make it down, or up again. So one unreadable file does not take a target away, however many ask for it at once. A suspect
target may be asked, after those that are up; one that is down is not asked at all, and says so in no time.

Slow is not dead: a call that takes long but comes back is a success. Wrong bytes (`damaged`) are counted, and nothing else:
they are the business of scrub and repair. What cannot be written can still be read:

    is_full       no space (ENOSPC, EDQUOT): stays up; ends with a probe that could write and found space
    is_writable   False after EROFS, EACCES, EPERM on writing: suspect, and stays so until a probe could write

Probes come every `UP_SECONDS`, jittered, while up. Otherwise they back off. A target that becomes suspect again
within `QUIET_SECONDS` of its recovery goes on with the back-off where it was, so that one whose probes succeed while its
operations hang does not swing between the two at the rate of its probes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tiercache.core.backoff import Backoff, delay_seconds

State = Literal["up", "suspect", "down"]
Writing = Literal["untried", "done", "refused", "full"]

PROBING = Backoff(first_seconds=2.0, ceiling_seconds=30.0, floor_seconds=1.0)
UP_SECONDS = 10.0
WRITE_SECONDS = 30.0
QUIET_SECONDS = 60.0
DOWN_AFTER_COUNT = 2  # failed probes in a row
ROOM_RATIO = 0.01  # free space that ends `is_full`
ROOM_BYTES = 1 << 20


class Usage(msgspec.Struct, frozen=True):
    """Of a file system; `free_bytes` is what an unprivileged process may use."""

    free_bytes: int
    total_bytes: int


class Health:
    """One target. `draw` arguments are random in [0, 1)."""

    def __init__(self, now: float) -> None:
        self.state: State = "up"
        self.detail = ""
        self.is_full = False
        self.is_writable = True
        self.errors_count = 0
        self.probe_at = now
        self._written_at = now
        self._recovered_at = now
        self._failed_probes_count = 0
        self._strikes_count = 0  # failures without a quiet time in between: the back-off

    def probe_due(self, now: float) -> bool:
        return now >= self.probe_at

    def wants_write(self, now: float) -> bool:
        """Should the next probe write?"""
        return not self.is_writable or self.is_full or self.state != "up" or now >= self._written_at + WRITE_SECONDS

    def failed(self, now: float, reason: str) -> None:
        """An operation got an error of the file system, or hung."""
        self.errors_count += 1
        if self.state == "up":
            self._suspected(now, reason)

    def damaged(self) -> None:
        """Bytes were not what had been written."""
        self.errors_count += 1

    def write_refused(self, now: float, reason: str) -> None:
        """The file system is read-only, or we have no permission to write."""
        self.errors_count += 1
        self.is_writable = False
        if self.state == "up":
            self._suspected(now, reason)

    def filled(self, now: float) -> None:
        """There was no space for a write."""
        if not self.is_full:
            self.is_full = True
            self.probe_at = min(self.probe_at, now + PROBING.first_seconds)

    def vanished(self, now: float, reason: str) -> None:
        """An operation found that this is not the target any more."""
        self.errors_count += 1
        if self.state != "down":
            self._suspected(now, reason)
            self.state = "down"

    def probe_succeeded(self, now: float, draw: float, usage: Usage, writing: Writing, reason: str = "") -> None:
        """The target answered and is the one it should be. `reason`: why it could not be written."""
        self._failed_probes_count = 0
        if writing != "untried":
            self._written_at = now
            self.is_writable = writing != "refused"
        if writing == "full":
            self.is_full = True
        elif writing == "done" and usage.free_bytes >= max(ROOM_BYTES, usage.total_bytes * ROOM_RATIO):
            self.is_full = False
        if not self.is_writable:
            self._strikes_count += 1
            self.state = "suspect"
            self.detail = reason or self.detail
            self.probe_at = now + delay_seconds(PROBING, self._strikes_count, draw)
            return
        if self.state != "up":
            self._recovered_at = now
        self.state = "up"
        self.detail = "full" if self.is_full else ""
        self.probe_at = now + (UP_SECONDS * (0.5 + draw) if not self.is_full else delay_seconds(PROBING, 3, draw))

    def probe_failed(self, now: float, draw: float, reason: str, *, is_gone: bool) -> None:
        """`is_gone`: it answered, and this is not the target. Else an error, or no answer."""
        self.errors_count += not is_gone
        self._failed_probes_count += 1
        self._strikes_count += 1
        self.detail = reason
        self.state = "down" if is_gone or self._failed_probes_count >= DOWN_AFTER_COUNT else "suspect"
        self.probe_at = now + delay_seconds(PROBING, self._strikes_count, draw)

    def wish_probe(self, now: float) -> None:
        """Something has changed: a call that had been given up came back."""
        self.probe_at = min(self.probe_at, now)

    def _suspected(self, now: float, reason: str) -> None:
        if now - self._recovered_at >= QUIET_SECONDS:
            self._strikes_count = 0
        self.state = "suspect"
        self.detail = reason
        self._failed_probes_count = 0
        wait_seconds = 0.0 if self._strikes_count == 0 else delay_seconds(PROBING, self._strikes_count, 0.5)
        self._strikes_count += 1
        self.probe_at = min(self.probe_at, now + wait_seconds)
