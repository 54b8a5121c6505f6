"""The rows of the comparison, and one round of one contestant: two new mounts, on which each row is measured once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.cold import SEED, readers
from bench.crowd import Broken
from bench.gets import FirstByte
from bench.hot import SIXTEEN
from bench.lab import Lab
from bench.peers.contestants import Contestant, Mounted
from bench.reader import Job
from bench.reads import Names, Random, Sequential, Stats

SERVER = "server"
PIECE_BYTES = 4 << 20
FIRST_BYTES, AGAIN_ROUNDS, STAT_ROUNDS = 5, 4, 10


@dataclass(frozen=True)
class PeerRow:
    """One figure of a round. `more_is_better` is false for times, CPU and memory."""

    name: str
    title: str
    unit: str
    more_is_better: bool = True
    is_hot: bool = False


COLD_SEQUENTIAL = PeerRow("cold-sequential", "the large file from begin to end, nothing cached", "MB/s")
COLD_CPU = PeerRow("cold-sequential-cpu", "CPU of all its processes for that", "s/GiB", more_is_better=False)
COLD_SMALL = PeerRow("cold-small-16", "100 KiB files, 16 readers, listing included, nothing cached", "files/s")
FIRST_BYTE = PeerRow("first-byte", "open, 4 KiB in the middle of the large file, nothing cached", "ms", more_is_better=False)
HOT_SEQUENTIAL = PeerRow("hot-sequential", "the large file, cached by the contestant, page cache dropped", "MB/s", is_hot=True)
HOT_CPU = PeerRow("hot-sequential-cpu", "CPU of all its processes for that", "s/GiB", more_is_better=False, is_hot=True)
HOT_AGAIN = PeerRow("hot-sequential-again", "the large file once more, 4 times", "MB/s", is_hot=True)
HOT_RANDOM_1 = PeerRow("hot-random-1", "4 KiB at random places, page cache dropped, 1 reader", "reads/s", is_hot=True)
HOT_RANDOM_4 = PeerRow("hot-random-4", "4 KiB at random places, page cache dropped, 4 readers", "reads/s", is_hot=True)
HOT_SMALL = PeerRow("hot-small", "open, read, close of 100 KiB files, page cache dropped, 1 reader", "files/s", is_hot=True)
HOT_SMALL_AGAIN = PeerRow("hot-small-again", "the same files once more", "files/s", is_hot=True)
STAT_FIRST = PeerRow("stat-first", "stat of the files after the kernel has forgotten their names", "stats/s", is_hot=True)
STAT_AGAIN = PeerRow("stat-again", "stat of the files again, 10 times", "stats/s", is_hot=True)
RESIDENT = PeerRow("resident", "memory of all its processes after all of this", "MiB", more_is_better=False)
ROWS = (
    COLD_SEQUENTIAL, COLD_CPU, COLD_SMALL, FIRST_BYTE, HOT_SEQUENTIAL, HOT_CPU, HOT_AGAIN, HOT_RANDOM_1, HOT_RANDOM_4,
    HOT_SMALL, HOT_SMALL_AGAIN, STAT_FIRST, STAT_AGAIN, RESIDENT,
)  # fmt: skip

Figures = dict[PeerRow, float]


def one_round(lab: Lab, contestant: Contestant, directory: Path) -> Figures:
    """`directory` is that of the run. Raises Broken when a mount fails or shows wrong bytes."""
    figures: Figures = {}
    try:
        with lab.going(contestant.way):
            _warm(directory / SERVER)
            with contestant.mounted(lab, directory) as mounted:
                if contestant.has_cold:
                    _cold(lab, mounted, figures)
                _fill(lab, mounted)
                _hot(lab, mounted, figures)
                lab.verify(mounted.root, ["big", *lab.small_names])
            if contestant.has_cold:
                _warm(directory / SERVER)
                with contestant.mounted(lab, directory) as mounted:
                    figures[FIRST_BYTE] = _first_byte_ms(lab, mounted)
    except (OSError, RuntimeError, TimeoutError) as error:
        raise Broken(f"{contestant.name}: {error}") from error
    return figures


def _warm(server: Path) -> None:
    """Let no contestant find the disk of the server slower than another one: dropping the page cache drops the server's, too."""
    for path in server.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(PIECE_BYTES):
                    pass


def _cold(lab: Lab, mounted: Mounted, figures: Figures) -> None:
    before = mounted.settled_cpu_seconds()
    crowd = lab.run([Sequential(str(mounted.root / "big"), lab.sizes.big_bytes)])
    figures[COLD_SEQUENTIAL] = crowd.count / crowd.seconds / 1e6
    figures[COLD_CPU] = (mounted.settled_cpu_seconds() - before) / (crowd.count / 2**30)
    listing = lab.run([Names(str(mounted.root / "small"))])
    crowd = lab.run(readers(lab.small(mounted.root), lab.sizes.file_bytes, SIXTEEN))
    figures[COLD_SMALL] = crowd.count / (crowd.seconds + listing.seconds)


def _fill(lab: Lab, mounted: Mounted) -> None:
    """Read everything once more, so that what is cached only at the second read is, too."""
    lab.run([Sequential(str(mounted.root / "big"), lab.sizes.big_bytes)])
    lab.run(readers(lab.small(mounted.root), lab.sizes.file_bytes, SIXTEEN))
    mounted.settled_cpu_seconds()


def _hot(lab: Lab, mounted: Mounted, figures: Figures) -> None:
    big, small = str(mounted.root / "big"), lab.small(mounted.root)
    size_bytes, count = lab.sizes.big_bytes, lab.sizes.hot_reads_count

    def rate(jobs: list[Job], before: Callable[[], None] = lambda: None) -> float:
        crowd = lab.run(jobs, before)
        return crowd.count / crowd.seconds

    before = mounted.cpu_seconds()
    figures[HOT_SEQUENTIAL] = rate([Sequential(big, size_bytes)], lab.drop_pages) / 1e6
    figures[HOT_CPU] = (mounted.cpu_seconds() - before) / (size_bytes / 2**30)
    figures[HOT_AGAIN] = rate([Sequential(big, size_bytes, AGAIN_ROUNDS)]) / 1e6
    figures[HOT_RANDOM_1] = rate([Random(big, size_bytes, SEED, count)], lab.drop_pages)
    four: list[Job] = [Random(big, size_bytes, SEED + number, count // 4) for number in range(4)]
    figures[HOT_RANDOM_4] = rate(four, lab.drop_pages)
    files: list[Job] = readers(small, lab.sizes.file_bytes, 1)
    figures[HOT_SMALL] = rate(files, lab.drop_pages)
    figures[HOT_SMALL_AGAIN] = rate(files)
    figures[STAT_FIRST] = rate([Stats(small, lab.sizes.file_bytes, 1)], lab.drop_pages)
    figures[STAT_AGAIN] = rate([Stats(small, lab.sizes.file_bytes, STAT_ROUNDS)])
    if mounted.pid:
        figures[RESIDENT] = mounted.resident_bytes() / 2**20


def _first_byte_ms(lab: Lab, mounted: Mounted) -> float:
    job = FirstByte(str(mounted.root / "big"), lab.store, "big", lab.sizes.big_bytes, SEED, FIRST_BYTES)
    return statistics.median(lab.run([job]).outcomes[0].seconds["mount"]) * 1e3
