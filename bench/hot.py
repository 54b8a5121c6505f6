"""Rows in which everything is hot, on one mount that was filled before; compared with the same reads of the native files.

Each is done twice over: with the page cache dropped (the daemon and the disk answer) and with what is read in the page
cache (the kernel answers, and what is left is the way through FUSE to it).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.cold import READER_PROCESSES, READER_THREADS, SEED, readers
from bench.crowd import Broken, run
from bench.lab import Lab, Timed
from bench.measure import Result, Row, Side, Take, alternated
from bench.reader import Job
from bench.reads import Lacking, Random, Sequential, Stats

FILL_SECONDS = 120.0
SIXTEEN = READER_PROCESSES * READER_THREADS
STAT_ROUNDS = 10

Jobs = Callable[[Lab, Path], list[Job]]


class State(enum.Enum):
    DROPPED = "page cache dropped"
    CACHED = "in the page cache"


@dataclass(frozen=True)
class Scale:
    """Units of the rate and of the CPU figure; a count divided by the divisors is in them."""

    unit: str
    cpu_unit: str
    figure_divisor: float = 1.0
    work_divisor: float = 1.0


MEGABYTES = Scale("MB/s", "s/GiB", 1e6, float(2**30))
READS, FILES, STATS = Scale("reads/s", "ms/read"), Scale("files/s", "ms/file"), Scale("stats/s", "ms/file")


def _sequential(lab: Lab, root: Path) -> list[Job]:
    return [Sequential(str(root / "big"), lab.sizes.big_bytes)]


def _random(count: int) -> Jobs:
    def jobs(lab: Lab, root: Path) -> list[Job]:
        share = lab.sizes.hot_reads_count // count
        return [Random(str(root / "big"), lab.sizes.big_bytes, SEED + number, share) for number in range(count)]

    return jobs


def _small(count: int) -> Jobs:
    return lambda lab, root: readers(lab.small(root), lab.sizes.file_bytes, count)


def _stats(rounds: int) -> Jobs:
    return lambda lab, root: [Stats(lab.small(root), lab.sizes.file_bytes, rounds)]


def _sides(jobs: Jobs, state: State, scale: Scale) -> tuple[Side, Side]:
    def prepare(lab: Lab, root: Path) -> Callable[[], None]:
        if state is State.DROPPED:
            return lab.drop_pages
        run(jobs(lab, root))
        return lambda: None

    def take(timed: Timed) -> Take:
        return timed.take(timed.count / timed.seconds / scale.figure_divisor, timed.count / scale.work_divisor)

    def mount(lab: Lab) -> Take:
        root = lab.hot.root
        return take(lab.timed(lab.hot, jobs(lab, root), prepare(lab, root)))

    def native(lab: Lab) -> Take:
        return take(lab.compared(jobs(lab, lab.native), prepare(lab, lab.native)))

    return mount, native


def _measured(jobs: Jobs, state: State, scale: Scale, *, profiled: bool) -> Callable[[Lab, int], Result]:
    inner = alternated(*_sides(jobs, state, scale), profiled=profiled)

    def measure(lab: Lab, pairs: int) -> Result:
        before = lab.cold_reads(lab.hot)
        result = inner(lab, pairs)
        after = lab.cold_reads(lab.hot)
        if after != before:
            raise Broken(f"{after - before} GETs were sent for what is hot")
        lab.verify(lab.hot.root, ["big", *lab.small_names])
        return result

    return measure


def _rows(name: str, title: str, scale: Scale, jobs: Jobs, *, profiled: bool = False) -> list[Row]:
    """The row with the page cache dropped and the one without."""
    return [
        Row(f"{name}-{state.name.lower()}", f"{title}, {state.value}", scale.unit, "native file",
            _measured(jobs, state, scale, profiled=profiled and state is State.DROPPED), scale.cpu_unit)
        for state in State
    ]  # fmt: skip


ROWS = (
    *_rows("hot-sequential", "the large file from begin to end, 1 MiB reads", MEGABYTES, _sequential, profiled=True),
    *_rows("hot-random-1", "4 KiB at random places of the large file, 1 reader", READS, _random(1)),
    *_rows("hot-random-4", "4 KiB at random places of the large file, 4 readers", READS, _random(4)),
    *_rows("hot-small-1", "open, read, close of 100 KiB files, 1 reader", FILES, _small(1)),
    *_rows("hot-small-16", "open, read, close of 100 KiB files, 16 readers", FILES, _small(SIXTEEN), profiled=True),
    Row("stat-first", "stat of hot files after the kernel has forgotten their names", STATS.unit, "native file",
        _measured(_stats(1), State.DROPPED, STATS, profiled=False), STATS.cpu_unit, needs_root=True),
    Row("stat-again", "stat of files that the kernel knows", STATS.unit, "native file",
        _measured(_stats(STAT_ROUNDS), State.CACHED, STATS, profiled=False), STATS.cpu_unit),
)  # fmt: skip


def fill(lab: Lab) -> None:
    """Read everything on the mount and wait until it is hot. Raises Broken when it does not become so."""
    root = lab.hot.root
    paths = [str(root / "big"), *lab.small(root)]
    deadline = time.monotonic() + FILL_SECONDS
    run([*_sequential(lab, root), *readers(lab.small(root), lab.sizes.file_bytes, SIXTEEN)])
    while lacking := run([Lacking(paths)]).count:
        if time.monotonic() > deadline:
            raise Broken(f"{lacking} of {len(paths)} files did not become hot within {FILL_SECONDS:.0f} s")
    lab.quiet()
