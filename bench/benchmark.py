"""`make bench`: what reading through a mount costs, compared in the same run with what else one would do.

    python bench/benchmark.py [--full | --quick] [--pairs N] [--only ROW]... [--minutes N] [--directory DIR]

Cold rows are compared with boto3, hot ones with the native file on the same disk. By itself it measures each row in 5 pairs on
the mount as it is, in about 10 minutes; `--full` in 15 pairs, and the hot rows again on the plain path (`plain/ROW`) and for an
ordinary user (`user/ROW`). Rows that would begin after `--minutes` are left out. All data is random and made for the run, lies in
one temporary directory, and is removed at the end. The exit code is 0 unless something is broken (wrong bytes, a daemon that
died, a row that did not measure what it says); a target that is missed is printed as MISSED and breaks nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

if not __package__:  # started as a script: the repository instead of this directory, whose modules are `bench.*` only
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import cold, hot, latency, machine, report, warm
from bench.crowd import Broken
from bench.lab import FULL, QUICK, Lab, check_room, directory_below, settled_create_seconds
from bench.measure import Row, never
from bench.mounts import NOBODY, Way, may_choose_path, may_mount_as_user
from tests.servers.weed import running_weed

DEFAULT_DIRECTORY = Path("/var/tmp")  # on a disk, where /tmp is often in memory
SOME_PAIRS, FULL_PAIRS = 5, 15
SOME_MINUTES, FULL_MINUTES = 20, 120


@dataclass(frozen=True)
class Table:
    """Rows that are measured the same way. `obstacle` says why this cannot be done here; '' when it can."""

    prefix: str
    title: str
    way: Way
    rows: tuple[Row, ...]
    obstacle: Callable[[], str] = never

    def chosen(self, patterns: Sequence[str]) -> Table:
        names = {name for pattern in patterns for name in fnmatch.filter((self.prefix + row.name for row in self.rows), pattern)}
        return replace(self, rows=tuple(row for row in self.rows if self.prefix + row.name in names))


_ALSO_PLAIN = (*hot.PLAIN_ROWS, *latency.ROWS)
TABLES = (
    Table("", "the mount as it is", Way(), (*cold.ROWS, *warm.ROWS, *hot.ROWS, *latency.ROWS)),
    Table("plain/", "the plain path: the kernel never reads hot files itself", Way("plain"), _ALSO_PLAIN, may_choose_path),
    Table("user/", "the mount of an ordinary user", Way(user_id=NOBODY), _ALSO_PLAIN, may_mount_as_user),
)
NAMES = tuple(table.prefix + row.name for table in TABLES for row in table.rows)


class Run:
    """One run: what has been measured so far, and until when a row may begin."""

    def __init__(self, lab: Lab, pairs: int, end_seconds: float) -> None:
        self.results: list[report.Measured] = []
        self._lab = lab
        self._pairs = pairs
        self._end_seconds = end_seconds

    def table(self, table: Table) -> None:
        print(f"\n{report.table_head(table.title)}", flush=True)
        if obstacle := table.obstacle():
            print(f"not measured: {obstacle}", flush=True)
            return
        with self._lab.going(table.way), contextlib.ExitStack() as stack:
            is_filled = False
            for row in table.rows:
                obstacle = row.obstacle() or ("time is up (--minutes)" if time.monotonic() > self._end_seconds else "")
                if obstacle:
                    print(report.left_out(table.prefix + row.name, row, obstacle), flush=True)
                    continue
                if row not in (*cold.ROWS, *warm.ROWS) and not is_filled:
                    stack.enter_context(self._filled())
                    is_filled = True
                self._row(table.prefix + row.name, row)

    def _row(self, name: str, row: Row) -> None:
        result = row.measure(self._lab, self._pairs)
        print(report.line(name, row, result), flush=True)
        self.results.append((name, row, result))

    @contextlib.contextmanager
    def _filled(self) -> Iterator[None]:
        with self._lab.mounted() as mount, self._lab.kept_hot(mount):
            hot.fill(self._lab, mount)
            yield


def main(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    tables = [table.chosen(chosen.only) for table in TABLES]
    signal.signal(signal.SIGTERM, _terminated)
    began = time.monotonic()
    try:
        with directory_below(chosen.directory) as directory:
            _measure(directory, [table for table in tables if table.rows], chosen, began)
    except Broken as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing is left behind", file=sys.stderr)
        return 130
    print(f"The run took {time.monotonic() - began:.0f} s.")
    return 0


def _measure(directory: Path, tables: Sequence[Table], chosen: argparse.Namespace, began: float) -> None:
    sizes = QUICK if chosen.quick else FULL
    facts = machine.facts(directory)
    facts["data"] = f"a large file of {sizes.big_bytes >> 20} MiB and {sizes.files_count} files of {sizes.file_bytes >> 10} KiB"
    facts["takes"] = f"{chosen.pairs} pairs a row, in turns (ABBA); first-byte {sizes.first_bytes_count} pairs"
    rows = {row.name: row for table in tables for row in table.rows}
    print(report.head(facts, list(rows.values())), flush=True)
    check_room(directory, sizes)
    print(f"Creating a file takes {settled_create_seconds(directory) * 1e6:.0f} us here.", flush=True)
    with running_weed(directory / "server") as server:
        lab = Lab(directory, sizes, server)
        lab.fill()
        if any(row in cold.ROWS for row in rows.values()):
            cold.warm_server(lab)
        run = Run(lab, chosen.pairs, began + chosen.minutes * 60)
        for table in tables:
            run.table(table)
    print(f"\n{report.usage(run.results, lab.peak_resident_bytes)}\n\n{report.missed(run.results)}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"rows: {', '.join(NAMES)}"
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--full", action="store_true", help=f"all rows and {FULL_PAIRS} pairs, for figures to decide by")
    extent.add_argument("--quick", action="store_true", help="small sizes: to see that it works; the figures say little")
    parser.add_argument("--pairs", "--repeat", type=int, metavar="N",
                        help=f"pairs of takes a row (default {SOME_PAIRS}, with --full {FULL_PAIRS})")  # fmt: skip
    parser.add_argument("--only", action="append", metavar="ROW",
                        help="this row (or pattern, as in 'hot-*' or 'plain/*'); may be repeated")  # fmt: skip
    parser.add_argument("--minutes", type=float, metavar="N",
                        help=f"after which no row begins (default {SOME_MINUTES}, with --full {FULL_MINUTES})")  # fmt: skip
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR",
                        help=f"on the disk to measure; what is made in it is removed (default {DEFAULT_DIRECTORY})")  # fmt: skip
    chosen = parser.parse_args(arguments)
    chosen.pairs = chosen.pairs if chosen.pairs is not None else FULL_PAIRS if chosen.full else SOME_PAIRS
    chosen.minutes = chosen.minutes if chosen.minutes is not None else FULL_MINUTES if chosen.full else SOME_MINUTES
    if chosen.pairs < 1:
        parser.error(f"--pairs {chosen.pairs}: at least 1")
    for pattern in chosen.only or []:
        if not fnmatch.filter(NAMES, pattern):
            parser.error(f"--only {pattern}: no such row; there are {', '.join(NAMES)}")
    chosen.only = chosen.only or (["*"] if chosen.full else [row.name for row in TABLES[0].rows])
    if not chosen.directory.is_dir():
        parser.error(f"--directory {chosen.directory}: not a directory")
    chosen.directory = chosen.directory.resolve()
    return chosen


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # through all the clean-up


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
