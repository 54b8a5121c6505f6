"""Rows in which nothing is hot: each take has a new daemon with an empty cache, and is compared with what boto3 does.

The server has just read the same objects for an untimed take of the reference, so its disk is in no figure.
"""

from __future__ import annotations

from bench.crowd import Broken, run
from bench.gets import Direct, Download, FirstByte, Objects
from bench.lab import Lab
from bench.measure import Result, Row, Take, Target, alternated
from bench.reader import Job
from bench.reads import Files, Names, Random, Sequential
from tests.fuse.mount import Mount

READER_PROCESSES, READER_THREADS = 4, 4
SEED = 11


def _sequential(lab: Lab) -> Take:
    with lab.mounted() as mount:
        timed = lab.timed(mount, [Sequential(str(mount.root / "big"), lab.sizes.big_bytes)])
        _was_cold(lab, mount, 1)
        lab.verify(mount.root, ["big"])
    return timed.take(timed.count / timed.seconds / 1e6, timed.count / 2**30)


def _download(lab: Lab) -> Take:
    lab.quiet()
    timed = lab.compared([Download(lab.store, "big", str(lab.download))])
    lab.quiet()
    return timed.take(timed.count / timed.seconds / 1e6, timed.count / 2**30)


def _random(lab: Lab) -> Take:
    size_bytes, count = lab.sizes.big_bytes, lab.sizes.cold_reads_count
    with lab.mounted() as mount:
        timed = lab.timed(mount, [Random(str(mount.root / "big"), size_bytes, SEED, count)])
        _was_cold(lab, mount, 1)
        lab.verify(mount.root, ["big"], size_bytes, SEED, count)
    return timed.take(timed.count / timed.seconds, timed.count)


def _direct(lab: Lab) -> Take:
    timed = lab.compared([Direct(lab.store, "big", lab.sizes.big_bytes, SEED, lab.sizes.cold_reads_count)])
    return timed.take(timed.count / timed.seconds, timed.count)


def readers(paths: list[str], size_bytes: int, count: int) -> list[Job]:
    """1 or 16 readers that share the files; 16 are 4 processes with 4 threads each, to spare the cores interpreters."""
    if count == 1:
        return [Files(paths, size_bytes, 1)]
    assert count == READER_PROCESSES * READER_THREADS
    return [Files(paths[first::READER_PROCESSES], size_bytes, READER_THREADS) for first in range(READER_PROCESSES)]


def _small(lab: Lab) -> Take:
    """The listing, by which a reader knows the files, is in the figure; boto3 is given the keys."""
    with lab.mounted() as mount:
        listing = lab.timed(mount, [Names(str(mount.root / "small"))])
        timed = lab.timed(mount, readers(lab.small(mount.root), lab.sizes.file_bytes, READER_PROCESSES * READER_THREADS))
        _was_cold(lab, mount, timed.count)
        lab.verify(mount.root, lab.small_names)
    both = timed.after(listing)
    return both.take(both.count / both.seconds, both.count)


def _objects(lab: Lab) -> Take:
    timed = lab.compared([Objects(lab.store, lab.small_names, lab.sizes.file_bytes)])
    return timed.take(timed.count / timed.seconds, timed.count)


def _first_byte(lab: Lab, _pairs: int) -> Result:
    count = lab.sizes.first_bytes_count
    with lab.mounted() as mount:
        job = FirstByte(str(mount.root / "big"), lab.store, "big", lab.sizes.big_bytes, SEED, count)
        took = run([job]).outcomes[0].seconds
        _was_cold(lab, mount, count)
        lab.verify(mount.root, ["big"])
    ours, theirs = ([Take(seconds * 1e3) for seconds in took[side]] for side in ("mount", "direct"))
    return Result(ours, theirs)


def _first_read(lab: Lab) -> Take:
    """What a daemon does for its very first reader: look the name up, connect, fetch."""
    with lab.mounted() as mount:
        timed = lab.timed(mount, [Random(str(mount.root / "big"), lab.sizes.big_bytes, SEED, 1)])
        _was_cold(lab, mount, 1)
        lab.verify(mount.root, ["big"], lab.sizes.big_bytes, SEED, 1)
    return Take(timed.seconds * 1e3)


def _first_direct(lab: Lab) -> Take:
    return Take(run([Direct(lab.store, "big", lab.sizes.big_bytes, SEED, 1, connect=True)]).seconds * 1e3)


def _was_cold(lab: Lab, mount: Mount, least: int) -> None:
    found = lab.cold_reads(mount)
    if found < least:
        raise Broken(f"{found} GETs were sent where at least {least} are needed: this was not cold")


def _later_ms(result: Result) -> float:
    return result.figures.median - result.reference_figures.median


ROWS = (
    Row(
        "cold-sequential", "a large file from begin to end, 1 MiB reads", "MB/s", "boto3 download_file, 8 threads, 8 MiB",
        alternated(_sequential, _download, profiled=True), "s/GiB",
        Target(lambda result: result.ratios.median, 0.5, True, "of the download"),
    ),
    Row(
        "cold-small-16", "100 KiB files, 16 readers, listing included", "files/s", "boto3 get_object, 16 threads",
        alternated(_small, _objects, profiled=True), "ms/file",
        Target(lambda result: result.ratios.median, 1.5, True, "times boto3's rate"),
    ),
    Row(
        "cold-random", "4 KiB at random places of the large file, 1 reader", "reads/s", "ranged GETs, kept-alive",
        alternated(_random, _direct), "ms/read",
    ),
    Row(
        "first-byte", "open, 4 KiB in the middle of the large file", "ms", "ranged GET, kept-alive", _first_byte,
        target=Target(_later_ms, 10.0, False, "ms after the GET"),
    ),
    Row(
        "first-byte-new", "the same as the first read of a new mount", "ms", "ranged GET, new connection",
        alternated(_first_read, _first_direct),
    ),
)  # fmt: skip


def warm_server(lab: Lab) -> None:
    """Let the server read all objects once, so that its disk is in no figure."""
    _download(lab)
    _objects(lab)
