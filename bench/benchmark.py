"""`make bench`: what reading through a mount costs, compared in the same run with what else one would do.

    python bench/benchmark.py [--quick] [--repeat 6] [--only ROW]... [--directory DIR]

Cold rows are compared with boto3, hot ones with the native file on the same disk. All data is random and made for the run,
lies in one temporary directory, and is removed at the end. The exit code is 0 unless something is broken (wrong bytes,
a daemon that died, a row that did not measure what it says); a target that is missed is printed as BELOW and breaks nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if not __package__:  # started as a script: the repository instead of this directory, whose modules are `bench.*` only
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import cold, hot, machine, report
from bench.crowd import Broken
from bench.lab import FULL, QUICK, Lab, check_room, directory_below
from bench.measure import Result, Row
from tests.servers.weed import running_weed

ROWS = (*cold.ROWS, *hot.ROWS)
DEFAULT_DIRECTORY = Path("/var/tmp")  # on a disk, where /tmp is often in memory


def main(arguments: Sequence[str]) -> int:
    chosen = _parse(arguments)
    rows = [row for row in ROWS if not chosen.only or any(fnmatch.fnmatch(row.name, pattern) for pattern in chosen.only)]
    signal.signal(signal.SIGTERM, _terminated)
    began = time.monotonic()
    try:
        with directory_below(chosen.directory) as directory:
            results, peak_resident_bytes = _measure(directory, rows, chosen)
    except Broken as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing is left behind", file=sys.stderr)
        return 130
    print(f"\n{report.usage(results, peak_resident_bytes)}")
    print(f"The run took {time.monotonic() - began:.0f} s.")
    return 0


def _measure(directory: Path, rows: Sequence[Row], chosen: argparse.Namespace) -> tuple[list[tuple[Row, Result]], int]:
    sizes = QUICK if chosen.quick else FULL
    facts = machine.facts(directory)
    facts["data"] = f"a large file of {sizes.big_bytes >> 20} MiB and {sizes.files_count} files of {sizes.file_bytes >> 10} KiB"
    facts["takes"] = f"{chosen.pairs} pairs a row, in turns (ABBA); first-byte {sizes.first_bytes_count} pairs"
    print(report.head(facts, rows), flush=True)
    check_room(directory, sizes)
    results: list[tuple[Row, Result]] = []
    with running_weed(directory / "server") as server:
        lab = Lab(directory, sizes, server)
        lab.fill()
        cold_rows, hot_rows = ([row for row in rows if row in part] for part in (cold.ROWS, hot.ROWS))
        if cold_rows:
            cold.warm_server(lab)
            results += _rows(lab, cold_rows, chosen.pairs)
        if hot_rows:
            with lab.mounted() as mount, lab.kept_hot(mount):
                hot.fill(lab)
                results += _rows(lab, hot_rows, chosen.pairs)
        return results, lab.peak_resident_bytes


def _rows(lab: Lab, rows: Sequence[Row], pairs: int) -> list[tuple[Row, Result]]:
    results = []
    for row in rows:
        if row.needs_root and not machine.may_drop_caches():
            print(report.left_out(row, "only root can make the kernel forget names"), flush=True)
            continue
        result = row.measure(lab, pairs)
        print(report.line(row, result), flush=True)
        results.append((row, result))
    return results


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = ", ".join(row.name for row in ROWS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"rows: {names}"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works; the figures say little")
    parser.add_argument("--repeat", "--pairs", dest="pairs", type=int, default=6, metavar="N",
                        help="pairs of takes a row (an even number is balanced; default 6)")  # fmt: skip
    parser.add_argument("--only", action="append", metavar="ROW", help="this row (or pattern, as in 'hot-*'); may be repeated")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR",
                        help=f"on the disk to measure; what is made in it is removed (default {DEFAULT_DIRECTORY})")  # fmt: skip
    chosen = parser.parse_args(arguments)
    if chosen.pairs < 1:
        parser.error(f"--repeat {chosen.pairs}: at least 1")
    for pattern in chosen.only or []:
        if not any(fnmatch.fnmatch(row.name, pattern) for row in ROWS):
            parser.error(f"--only {pattern}: no such row; there are {names}")
    if not chosen.directory.is_dir():
        parser.error(f"--directory {chosen.directory}: not a directory")
    chosen.directory = chosen.directory.resolve()
    return chosen


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # through all the clean-up


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
