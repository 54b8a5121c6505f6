"""Rows of single 4 KiB reads of a hot file: how long the median, the slowest hundredth and the slowest thousandth take.

Without other work, and while the same daemon fetches other files all the time. The native file is read in the same state, so that
both meet the same load of disk and cores. The figure of a take is its p99; the other percentiles are over all takes together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cold import SEED
from bench.crowd import Broken
from bench.hot import checked
from bench.lab import Lab
from bench.measure import Result, Row, Take, Target, alternated
from bench.reads import Churn, Latencies, Sequential
from tests.fuse.mount import Mount

MOST_TIMES = 3.0
SPARE_BYTES = 64 << 20  # two chunks on their way, and the index


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest value that is not below `part` of all."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _alternated(lab: Lab, mount: Mount, pairs: int) -> Result:
    took: dict[str, list[float]] = {"mount": [], "native": []}

    def side(name: str, root: Path) -> Callable[[Lab], Take]:
        def take(_lab: Lab) -> Take:
            job = Latencies(str(root / "big"), lab.sizes.big_bytes, SEED, lab.sizes.hot_reads_count)
            ordered = sorted(lab.run([job], lab.drop_pages).outcomes[0].seconds["read"])
            took[name] += ordered
            return Take(percentile(ordered, 0.99) * 1e6)

        return take

    result = alternated(side("mount", mount.root), side("native", lab.native))(lab, pairs)
    for name, seconds in took.items():
        seconds.sort()
        parts = ", ".join(f"p{part * 100:g} {percentile(seconds, part) * 1e6:.0f}" for part in (0.5, 0.99, 0.999))
        result.remarks.append(f"{name}: {parts} us, of {len(seconds)} reads")
    return result


def _idle(lab: Lab, pairs: int) -> Result:
    return checked(lab, lambda: _alternated(lab, lab.hot, pairs))


BACKGROUND = {
    "fetched": "tiercache_fill_bytes_total",
    "evicted": "tiercache_evicted_bytes_total",
    "scrubbed": "tiercache_scrubbed_bytes_total",
}


def _background_bytes(mount: Mount) -> dict[str, float]:
    """What the daemon has done so far besides answering, over all labels."""
    samples = mount.metrics()
    return {
        word: sum(value for sample, value in samples.items() if sample.partition("{")[0] == name)
        for word, name in BACKGROUND.items()
    }


def _loaded(lab: Lab, pairs: int) -> Result:
    """On a mount of its own with the large file pinned and room for half of the load, so that it is fetched again and again.

    Scrub goes on by itself. Demotion joins the load here when there is any.
    """
    with lab.mounted(hot_bytes=lab.sizes.big_bytes + lab.sizes.load_total_bytes // 2 + SPARE_BYTES) as mount:
        lab.run([Sequential(str(mount.root / "big"), lab.sizes.big_bytes)])
        pinned = mount.tiercache("pin", mount.root / "big", "--wait")
        if pinned.code:
            raise Broken(f"cannot pin: {pinned.err}")
        load = Churn([str(mount.root / name) for name in lab.fill_load()])
        before, began = _background_bytes(mount), time.monotonic()
        with lab.loaded([load]):
            result = _alternated(lab, mount, pairs)
        seconds = time.monotonic() - began
        rates = {word: (total - before[word]) / seconds / 1e6 for word, total in _background_bytes(mount).items()}
        if not rates["fetched"]:
            raise Broken("nothing was fetched where a load was wanted")
        result.remarks.append("meanwhile, MB/s: " + ", ".join(f"{word} {rate:.0f}" for word, rate in rates.items()))
        lab.verify(mount.root, ["big"])
        return result


_TARGETS = (Target(lambda result: result.ratios, MOST_TIMES, False, "times the p99 of the native file"),)

ROWS = (
    Row("latency-idle", "4 KiB at random places of the large file, page cache dropped: p99", "us", "native file", _idle,
        targets=_TARGETS),
    Row("latency-fills", "the same while other files are fetched", "us", "native file, also meanwhile", _loaded,
        targets=_TARGETS),
)  # fmt: skip
