"""How far long work is that an operator asked for: numbers that the one who does it changes, and `engine/jobs.py` shows.

Used on the event loop only. `done_count` and `done_bytes` of `total_count` and `total_bytes` are for a progress bar; failures and
findings are kept up to a bound and counted beyond it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiercache.errors import TiercacheError

MAX_FAILURES = 100
MAX_LINES = 200


@dataclass(frozen=True)
class Snapshot:
    """What a job shows of itself. `damaged_count` things were found damaged, of which `repaired_count` are whole again."""

    total_count: int = 0
    done_count: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    failed_count: int = 0
    failures: Sequence[tuple[str, TiercacheError]] = ()
    lines: Sequence[str] = ()
    damaged_count: int = 0
    repaired_count: int = 0


class Failures:
    """What went wrong, by path: the first `MAX_FAILURES` with their reasons, the others counted."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[tuple[str, TiercacheError]] = []

    def add(self, path: str, error: TiercacheError) -> None:
        self.count += 1
        if len(self.kept) < MAX_FAILURES:
            self.kept.append((path, error))


@dataclass
class EvictProgress:
    """Of `evict`: each object is counted once, in `done_count` and in one of the outcomes (or in `failures`).

    Bytes are those that the hot tier holds. `demoted_count` were written to the warm tier, for `already_count` it had a copy;
    both are gone from the hot tier, as are `dropped_count`.
    """

    total_count: int = 0
    done_count: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
    demoted_count: int = 0
    already_count: int = 0
    dropped_count: int = 0
    in_use_count: int = 0
    pinned_count: int = 0
    failures: Failures = field(default_factory=Failures)

    def done(self, held_bytes: int) -> None:
        self.done_count += 1
        self.done_bytes += held_bytes

    def snapshot(self) -> Snapshot:
        counts = {
            "demoted": self.demoted_count,
            "already": self.already_count,
            "dropped": self.dropped_count,
            "in_use": self.in_use_count,
            "pinned": self.pinned_count,
        }
        return Snapshot(
            self.total_count,
            self.done_count,
            self.total_bytes,
            self.done_bytes,
            counts,
            self.failures.count,
            self.failures.kept,
        )


@dataclass
class ScrubProgress:
    """Of a scrub: `found` counts by kind, `lines` name what was found (the first `MAX_LINES`)."""

    total_count: int = 0
    done_count: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
    damaged_count: int = 0
    repaired_count: int = 0
    found: Counter[str] = field(default_factory=Counter)
    failures: Failures = field(default_factory=Failures)
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        if len(self.lines) < MAX_LINES:
            self.lines.append(line)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.total_count,
            self.done_count,
            self.total_bytes,
            self.done_bytes,
            dict(self.found),
            self.failures.count,
            self.failures.kept,
            list(self.lines),
            self.damaged_count,
            self.repaired_count,
        )


@dataclass
class RebuildProgress:
    """Of a walk through all targets: the copies that were found. `done_count` of `total_count` targets were read to the end."""

    total_count: int = 0
    done_count: int = 0
    copies_count: int = 0
    packs_count: int = 0
    members_count: int = 0
    logical_bytes: int = 0
    failures: Failures = field(default_factory=Failures)

    def snapshot(self) -> Snapshot:
        counts = {"copies": self.copies_count, "packs": self.packs_count, "members": self.members_count}
        return Snapshot(
            total_count=self.total_count,
            done_count=self.done_count,
            done_bytes=self.logical_bytes,
            counts=counts,
            failed_count=self.failures.count,
            failures=self.failures.kept,
        )
