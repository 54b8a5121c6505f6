"""Rows of the warm tier: what leaves the hot tier for erasure-coded shards, and comes back.

Each mount has targets of its own beside the hot directory, 4+2. Its files are read through it until they are hot, then evicted
by the request that `tiercache evict --to warm` makes, which is answered when every copy is durable. References are plain code on
the same disk that moves the same bytes, without checksums and without a daemon (`bench/shards.py`).

Demotion has two bounds, the disk and the processor: it is compared with the lower of writing as much plainly and encoding as
much with nothing else to do. Both are measured in every pair.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import machine
from bench.cold import READER_PROCESSES, READER_THREADS, readers
from bench.crowd import Broken
from bench.lab import Lab, Timed
from bench.measure import Result, Row, Take, Target, alternated
from bench.reader import Job
from bench.reads import BLOCK_BYTES, Lacking
from bench.report import number
from bench.shards import Encode, Evict, Series, Shards, Spread
from tests.fuse.mount import Mount
from tiercache.config.settings import WarmSettings
from tiercache.tiers.warm.writing import ENCODERS

DATA_COUNT, PARITY_COUNT = 4, 2
HOT_SECONDS = 120.0
SPARE_BYTES = 2 << 30  # of the hot tier: nothing is demoted by itself
COLD_BYTES = "tiercache_fill_bytes_total{"
MOST_COLD_RATIO = 0.1  # the store is asked where it answers much sooner than the targets
SIXTEEN = READER_PROCESSES * READER_THREADS


# -- the data


def _random_names(lab: Lab) -> list[str]:
    return lab.fill_more("warm", (os.urandom(lab.sizes.warm_bytes) for _ in range(lab.sizes.warm_count)))


def _text_names(lab: Lab) -> list[str]:
    return lab.fill_more("text", (_text(lab.sizes.warm_bytes, first) for first in range(lab.sizes.warm_count)))


def _text(size_bytes: int, first: int) -> bytes:
    """The sources of Python's own library, over and over: they are longer than zstd looks back."""
    sources = sorted(Path(os.__file__).parent.rglob("*.py"))
    text = bytearray()
    while len(text) < size_bytes:
        for source in sources[first:]:
            text += source.read_bytes()
    return bytes(text[:size_bytes])


# -- mounts with targets


@dataclass(frozen=True)
class Warm:
    """A mount, its targets (none: it has no warm tier), and the files of it that are looked at, all of one size.

    `cold_ratios`: of each take, which part was fetched from the store.
    """

    mount: Mount
    targets: list[Path]
    names: list[str]
    size_bytes: int
    cold_ratios: list[float] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [str(self.mount.root / name) for name in self.names]

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * len(self.names)

    def evict(self) -> Evict:
        return Evict(str(self.mount.socket), self.paths, "warm" if self.targets else "drop")

    def heat(self, lab: Lab) -> None:
        """Read everything, and wait until it is hot. Raises Broken when it does not become so."""
        deadline = time.monotonic() + HOT_SECONDS
        lab.run(readers(self.paths, self.size_bytes, SIXTEEN))
        while lacking := lab.run([Lacking(self.paths)]).count:
            if time.monotonic() > deadline:
                raise Broken(f"{lacking} of {len(self.paths)} files did not become hot within {HOT_SECONDS:.0f} s")
        lab.quiet()

    def chill(self, lab: Lab) -> None:
        """Nothing is hot any more, nor in the page cache."""
        lab.run([self.evict()])
        lab.drop_pages()

    def timed(self, lab: Lab, jobs: list[Job]) -> Timed:
        """The jobs, with nothing hot before."""
        self.chill(lab)
        before = self._cold_bytes()
        timed = lab.timed(self.mount, jobs)
        self.cold_ratios.append((self._cold_bytes() - before) / self.total_bytes)
        return timed

    def _cold_bytes(self) -> float:
        return sum(value for name, value in self.mount.metrics().items() if name.startswith(COLD_BYTES) and 'tier="cold"' in name)


@contextlib.contextmanager
def _hot(lab: Lab, names: list[str], size_bytes: int, *, is_warm: bool = True) -> Iterator[Warm]:
    """All of it is hot, and nothing on the targets yet."""
    with lab.place("targets") as place:
        targets = [place / f"t{position}" for position in range(DATA_COUNT + PARITY_COUNT)] if is_warm else []
        options = [part for target in targets for part in ("--warm-target", str(target))]
        for target in targets:
            target.mkdir()
        if is_warm:
            options += ["--ec", f"{DATA_COUNT}+{PARITY_COUNT}"]
        with lab.mounted(hot_bytes=2 * len(names) * size_bytes + SPARE_BYTES, options=options) as mount:
            warm = Warm(mount, targets, names, size_bytes)
            warm.heat(lab)
            yield warm


# -- demotion


def _demotion(lab: Lab, pairs: int) -> Result:
    plain: list[Take] = []
    encoded: list[Take] = []

    def references(lab: Lab) -> Take:
        plain.append(_plainly_written(lab))
        encoded.append(_encoded(lab))
        return plain[-1]

    result = alternated(_demoted, references, profiled=True)(lab, pairs)
    by_encoding = Result(result.mount, encoded)
    for what, each in (("writing plainly", result), (f"encoding in {ENCODERS} threads", by_encoding)):
        figures = each.reference_figures
        spread = f"{number(figures.median)} ({number(figures.least)}-{number(figures.most)})"
        used_seconds = sum(take.readers_seconds / take.work for take in each.reference) / pairs
        result.remarks.append(f"{what}: {spread} MB/s, {used_seconds:.3g} CPU s/GiB")
    if by_encoding.reference_figures.median < result.reference_figures.median:
        result.reference = encoded
    return result


def _rate(timed: Timed) -> Take:
    return timed.take(timed.count / timed.seconds / 1e6, timed.count / 2**30)


def _demoted(lab: Lab) -> Take:
    with _hot(lab, _random_names(lab), lab.sizes.warm_bytes) as warm:
        timed = lab.timed(warm.mount, [warm.evict()], lambda: _touch_memory(lab))
        if timed.count != warm.total_bytes:
            raise Broken(f"{timed.count} bytes were evicted and not {warm.total_bytes}")
    return _rate(timed)


def _touch_memory(lab: Lab) -> None:
    """Give the page cache as much as a take will fill, and take it back.

    A virtual machine hands memory that has been free for seconds back to its host, and gets it again page by page, at several
    times the cost of the copy into it: only what comes first would pay, and that is the take that has a mount to make before it.
    """
    block = bytes(BLOCK_BYTES)
    with lab.place("memory") as place, (place / "touched").open("wb") as file:
        for _ in range(2 * lab.sizes.warm_count * lab.sizes.warm_bytes // BLOCK_BYTES):
            file.write(block)


def _plainly_written(lab: Lab) -> Take:
    """What is read is in the page cache, as are the files that have just become hot."""
    paths = [str(lab.native / name) for name in _random_names(lab)]
    lab.run(readers(paths, lab.sizes.warm_bytes, SIXTEEN))
    with lab.place("written") as place:
        directories = [place / f"t{position}" for position in range(DATA_COUNT + PARITY_COUNT)]
        for directory in directories:
            directory.mkdir()
        lab.quiet()
        return _rate(lab.compared([Spread(paths, list(map(str, directories)), DATA_COUNT)], lambda: _touch_memory(lab)))


def _encoded(lab: Lab) -> Take:
    names = _random_names(lab)
    total_bytes = lab.sizes.warm_bytes * len(names)
    level = WarmSettings().zstd_level
    return _rate(lab.compared([Encode(str(lab.native / names[0]), total_bytes, DATA_COUNT, PARITY_COUNT, level, ENCODERS)]))


# -- reads


def _read(lab: Lab, warm: Warm) -> Take:
    """Each file from begin to end through the mount, from the shards only."""
    timed = warm.timed(lab, [Series(warm.paths, warm.size_bytes)])
    if warm.cold_ratios[-1] > MOST_COLD_RATIO:
        raise Broken(f"{warm.cold_ratios[-1]:.0%} was fetched from the store: this was not warm")
    return _rate(timed)


def _sequential(names: Callable[[Lab], list[str]]) -> Callable[[Lab, int], Result]:
    def plainly_read(lab: Lab, warm: Warm) -> Take:
        lab.drop_pages()
        return _rate(lab.compared([Shards(warm.names, list(map(str, warm.targets)))]))

    def measure(lab: Lab, pairs: int) -> Result:
        with _hot(lab, names(lab), lab.sizes.warm_bytes) as warm:
            result = alternated(lambda lab: _read(lab, warm), lambda lab: plainly_read(lab, warm), profiled=True)(lab, pairs)
            lab.verify(warm.mount.root, warm.names)
        return result

    return measure


def _degraded(lab: Lab, pairs: int) -> Result:
    """Two mounts: one that swings would be measured in the back-off of its probes."""
    names, size_bytes = _random_names(lab), lab.sizes.warm_bytes
    with _hot(lab, names, size_bytes) as healthy, _hot(lab, names, size_bytes) as degraded:
        for warm in (healthy, degraded):
            warm.chill(lab)
        for target in degraded.targets[:PARITY_COUNT]:
            target.rename(target.with_name(f"{target.name}.gone"))
        _read(lab, degraded)  # that they are gone is known from here on
        result = alternated(lambda lab: _read(lab, degraded), lambda lab: _read(lab, healthy), profiled=True)(lab, pairs)
        reconstructed = degraded.mount.metrics()["tiercache_warm_degraded_reads_total"]
        if not reconstructed:
            raise Broken("nothing was reconstructed")
        for warm in (healthy, degraded):
            lab.verify(warm.mount.root, names)
    return result


def _small(lab: Lab, pairs: int) -> Result:
    """Two mounts, because what has a warm copy is not fetched from the store."""
    names, size_bytes = lab.small_names, lab.sizes.file_bytes
    with _hot(lab, names, size_bytes) as packed, _hot(lab, names, size_bytes, is_warm=False) as cold:

        def read(lab: Lab, warm: Warm) -> Take:
            timed = warm.timed(lab, readers(warm.paths, size_bytes, SIXTEEN))
            return timed.take(timed.count / timed.seconds, timed.count)

        result = alternated(lambda lab: read(lab, packed), lambda lab: read(lab, cold), profiled=True)(lab, pairs)
        if min(cold.cold_ratios) < 1:
            raise Broken("this was not cold")
        lab.verify(packed.mount.root, names)
        result.remarks.append(
            f"of what has a warm copy {max(packed.cold_ratios):.0%} at most was fetched from the store, as faster"
        )
    return result


def _may_not_drop() -> str:
    return "" if machine.may_drop_caches() else "only root can drop the page cache under the targets"


def _ratio(limit: float, wording: str) -> tuple[Target, ...]:
    return (Target(lambda result: result.ratios, limit, True, wording),)


ROWS = (
    Row("warm-demote", "large hot files to the warm tier, 4+2", "MB/s", "the lower of plain writing and encoding",
        _demotion, "s/GiB", _ratio(0.8, "of the lower bound"), _may_not_drop),
    Row("warm-sequential", "the same files from begin to end, 1 MiB reads, evicted before", "MB/s",
        "the data shards, plainly read and joined", _sequential(_random_names), "s/GiB", _ratio(0.6, "of plain"), _may_not_drop),
    Row("warm-sequential-text", "the same with text, which is compressed", "MB/s",
        "the data shards, plainly read, joined and decompressed", _sequential(_text_names), "s/GiB", _ratio(0.6, "of plain"),
        _may_not_drop),
    Row("warm-degraded", "the large files with two targets gone", "MB/s", "the same mount with all targets", _degraded, "s/GiB",
        _ratio(0.5, "of healthy"), _may_not_drop),
    Row("warm-small-16", "100 KiB files from packs, 16 readers", "files/s", "the same daemon without targets, from the store",
        _small, "ms/file", obstacle=_may_not_drop),
)  # fmt: skip
