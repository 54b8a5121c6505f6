"""Rows in which nothing is hot: each take has a new daemon with an empty cache, and is compared with what boto3 does.

The server has just read the same objects for an untimed take of the reference, so its disk is in no figure.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.crowd import Broken
from bench.gets import Direct, Download, FirstByte, Objects
from bench.lab import Lab
from bench.measure import Result, Row, Side, Take, Target, alternated, summary
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
        took = lab.run([job]).outcomes[0].seconds
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
    return Take(lab.run([Direct(lab.store, "big", lab.sizes.big_bytes, SEED, 1, connect=True)]).seconds * 1e3)


def _alternated(mount: Side, reference: Side, *, profiled: bool = False) -> Callable[[Lab, int], Result]:
    """With what creating a file did cost meanwhile: filling a cache of small files is not done without (see bench/mounts.py)."""
    inner = alternated(mount, reference, profiled=profiled)

    def measure(lab: Lab, pairs: int) -> Result:
        lab.create_seconds.clear()
        result = inner(lab, pairs)
        cost = summary([seconds * 1e6 for seconds in lab.create_seconds])
        result.remarks.append(f"creating a file took {cost.median:.0f} ({cost.least:.0f}-{cost.most:.0f}) us meanwhile")
        return result

    return measure


def _was_cold(lab: Lab, mount: Mount, least: int) -> None:
    found = lab.cold_reads(mount)
    if found < least:
        raise Broken(f"{found} GETs were sent where at least {least} are needed: this was not cold")


ROWS = (
    Row(
        "cold-sequential", "a large file from begin to end, 1 MiB reads", "MB/s", "boto3 download_file, 8 threads, 8 MiB",
        _alternated(_sequential, _download, profiled=True), "s/GiB",
        (Target(lambda result: result.ratios, 0.7, True, "of the download"),),
    ),
    Row(
        "cold-small-16", "100 KiB files, 16 readers, listing included", "files/s", "boto3 get_object, 16 threads",
        _alternated(_small, _objects, profiled=True), "ms/file",
        (Target(lambda result: result.ratios, 2.0, True, "times boto3's rate"),),
    ),
    Row(
        "cold-random", "4 KiB at random places of the large file, 1 reader", "reads/s", "ranged GETs, kept-alive",
        _alternated(_random, _direct), "ms/read",
    ),
    Row(
        "first-byte", "open, 4 KiB in the middle of the large file", "ms", "ranged GET, kept-alive", _first_byte,
        targets=(Target(lambda result: result.differences, 10.0, False, "ms after the GET"),),
    ),
    Row(
        "first-byte-new", "the same as the first read of a new mount", "ms", "ranged GET, new connection",
        _alternated(_first_read, _first_direct),
    ),
)  # fmt: skip


def warm_server(lab: Lab) -> None:
    """Let the server read all objects once, so that its disk is in no figure."""
    _download(lab)
    _objects(lab)
