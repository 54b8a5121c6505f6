"""Rows in which everything is hot, on one mount that was filled before; compared with the same reads of the native files.

Most are done twice over: with the page cache dropped (the daemon and the disk answer) and with what is read in the page
cache (the kernel answers, and what is left is the way through FUSE to it).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench import machine
from bench.cold import READER_PROCESSES, READER_THREADS, SEED, readers
from bench.crowd import Broken
from bench.lab import Lab, Timed
from bench.measure import Result, Row, Side, Take, Target, alternated
from bench.mounts import may_choose_path
from bench.reader import Job
from bench.reads import Lacking, Random, Sequential, Stats
from tests.fuse.mount import Mount

FILL_SECONDS = 120.0
SIXTEEN = READER_PROCESSES * READER_THREADS
STAT_ROUNDS, CACHED_ROUNDS, RANDOM_ROUNDS = 10, 4, 20  # what the kernel answers is over too soon once

Jobs = Callable[[Lab, Path], list[Job]]


class State(enum.Enum):
    DROPPED = "page cache dropped"
    DIRECT = "O_DIRECT"
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


def _sequential(rounds: int) -> Jobs:
    return lambda lab, root: [Sequential(str(root / "big"), lab.sizes.big_bytes, rounds)]


def _random(count: int, *, direct: bool = False, rounds: int = 1) -> Jobs:
    def jobs(lab: Lab, root: Path) -> list[Job]:
        share = lab.sizes.hot_reads_count // count
        return [Random(str(root / "big"), lab.sizes.big_bytes, SEED + number, share, direct, rounds) for number in range(count)]

    return jobs


def _small(count: int) -> Jobs:
    return lambda lab, root: readers(lab.small(root), lab.sizes.file_bytes, count)


def _stats(rounds: int) -> Jobs:
    return lambda lab, root: [Stats(lab.small(root), lab.sizes.file_bytes, rounds)]


def _prepared(lab: Lab, jobs: Jobs, root: Path, state: State) -> Callable[[], None]:
    """What is to be done when the readers are ready."""
    if state is State.CACHED:
        lab.run(jobs(lab, root))
        return lambda: None
    return lab.drop_pages


def _take(timed: Timed, scale: Scale) -> Take:
    return timed.take(timed.count / timed.seconds / scale.figure_divisor, timed.count / scale.work_divisor)


def _on_mount(jobs: Jobs, state: State, scale: Scale, mount: Mount | None = None) -> Side:
    """On `mount`, or the one that is kept hot."""

    def side(lab: Lab) -> Take:
        chosen = mount or lab.hot
        return _take(lab.timed(chosen, jobs(lab, chosen.root), _prepared(lab, jobs, chosen.root, state), settle=False), scale)

    return side


def _native(jobs: Jobs, state: State, scale: Scale) -> Side:
    return lambda lab: _take(lab.compared(jobs(lab, lab.native), _prepared(lab, jobs, lab.native, state)), scale)


def _measured(jobs: Jobs, state: State, scale: Scale, *, profiled: bool = False) -> Callable[[Lab, int], Result]:
    inner = alternated(_on_mount(jobs, state, scale), _native(jobs, state, scale), profiled=profiled)
    return lambda lab, pairs: checked(lab, lambda: inner(lab, pairs))


def checked(lab: Lab, measure: Callable[[], Result]) -> Result:
    """Nothing was fetched for it, and the bytes are right. Raises Broken."""
    before = lab.cold_reads(lab.hot)
    result = measure()
    after = lab.cold_reads(lab.hot)
    if after != before:
        raise Broken(f"{after - before} GETs were sent for what is hot")
    lab.verify(lab.hot.root, ["big", *lab.small_names])
    return result


def _without_thread(lab: Lab, pairs: int) -> Result:
    """The kept mount, and another one whose daemon answers everything through Python."""
    way = replace(lab.way, read_path="python")
    with lab.mounted(way) as other:
        fill(lab, other)
        jobs = _small(1)
        sides = (_on_mount(jobs, State.CACHED, FILES, mount) for mount in (None, other))
        measure = alternated(*sides)
        return checked(lab, lambda: measure(lab, pairs))


def _native_ratio(limit: float) -> Target:
    return Target(lambda result: result.ratios, limit, True, "of native")


CPU = Target(lambda result: result.daemon_seconds, 0.02, False, "s/GiB of the daemon's CPU")


def _row(name: str, title: str, scale: Scale, jobs: Jobs, state: State, *targets: Target, profiled: bool = False) -> Row:
    measure = _measured(jobs, state, scale, profiled=profiled)
    return Row(
        f"{name}-{state.name.lower()}", f"{title}, {state.value}", scale.unit, "native file", measure, scale.cpu_unit, targets
    )


_LARGE = "the large file from begin to end, 1 MiB reads"
_PLACES = "4 KiB at random places of the large file, {} reader"
_WHOLE = "open, read, close of 100 KiB files, {} reader"

ROWS = (
    _row("hot-sequential", _LARGE, MEGABYTES, _sequential(1), State.DROPPED, _native_ratio(0.97), CPU, profiled=True),
    _row("hot-sequential", f"{_LARGE}, {CACHED_ROUNDS} times", MEGABYTES, _sequential(CACHED_ROUNDS), State.CACHED,
         _native_ratio(0.97), CPU),
    _row("hot-random-1", _PLACES.format(1), READS, _random(1), State.DROPPED),
    _row("hot-random-1", _PLACES.format(1), READS, _random(1, direct=True), State.DIRECT, _native_ratio(0.95)),
    _row("hot-random-1", _PLACES.format(1), READS, _random(1, rounds=RANDOM_ROUNDS), State.CACHED, _native_ratio(0.85)),
    _row("hot-random-4", _PLACES.format(4) + "s", READS, _random(4), State.DROPPED),
    _row("hot-random-4", _PLACES.format(4) + "s", READS, _random(4, direct=True), State.DIRECT, _native_ratio(0.95)),
    _row("hot-random-4", _PLACES.format(4) + "s", READS, _random(4, rounds=RANDOM_ROUNDS), State.CACHED, _native_ratio(0.85)),
    _row("hot-small-1", _WHOLE.format(1), FILES, _small(1), State.DROPPED),
    _row("hot-small-1", _WHOLE.format(1), FILES, _small(1), State.CACHED),
    _row("hot-small-16", _WHOLE.format(16) + "s", FILES, _small(SIXTEEN), State.DROPPED, profiled=True),
    _row("hot-small-16", _WHOLE.format(16) + "s", FILES, _small(SIXTEEN), State.CACHED),
    Row("hot-small-thread", _WHOLE.format(1) + ", in the page cache", FILES.unit, "the same with read_path=python",
        _without_thread, FILES.cpu_unit, (Target(lambda result: result.ratios, 3.0, True, "times the rate without the thread"),),
        obstacle=may_choose_path),
    Row("stat-first", "stat of hot files after the kernel has forgotten their names", STATS.unit, "native file",
        _measured(_stats(1), State.DROPPED, STATS), STATS.cpu_unit,
        obstacle=lambda: "" if machine.may_drop_caches() else "only root can make the kernel forget names"),
    Row("stat-again", "stat of files that the kernel knows", STATS.unit, "native file",
        _measured(_stats(STAT_ROUNDS), State.CACHED, STATS), STATS.cpu_unit, (_native_ratio(0.9),)),
)  # fmt: skip


# Where the kernel may not read the hot file by itself nothing is promised against the native file, but against peers.
PLAIN_ROWS = tuple(row if row.name == "hot-small-thread" else replace(row, targets=()) for row in ROWS)


def fill(lab: Lab, mount: Mount) -> None:
    """Read everything on the mount and wait until it is hot. Raises Broken when it does not become so."""
    root = mount.root
    paths = [str(root / "big"), *lab.small(root)]
    deadline = time.monotonic() + FILL_SECONDS
    lab.run([*_sequential(1)(lab, root), *readers(lab.small(root), lab.sizes.file_bytes, SIXTEEN)])
    while lacking := lab.run([Lacking(paths)]).count:
        if time.monotonic() > deadline:
            raise Broken(f"{lacking} of {len(paths)} files did not become hot within {FILL_SECONDS:.0f} s")
    lab.quiet()
