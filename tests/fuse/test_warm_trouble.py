"""Targets die, fill up, turn read-only, hang or hold noise while files are read and demoted: with m of them nobody notices.

With one more the store gives the bytes, and without the store reads fail, soon.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mount, Mounting
from tests.fuse.test_failures import bounded, errno_of
from tests.fuse.warm import KIB, MIB, evict_all
from tests.fuse.warm_trouble import KINDS, BreakableTargets, breakable_targets
from tests.servers.process import wait_until
from tests.servers.proxy import Proxy
from tests.warm.surveying import survey
from tiercache.engine.warm_scrubbing import GRACE_SECONDS

READERS_COUNT = 2
SIZES_BYTES = (1, 20 * KIB, 100 * KIB, 700 * KIB, MIB + 3, 9 * MIB + 17)
LONG_SECONDS = 240.0
DEADLINE_SECONDS = 2.0
COLD = {"deadline": f"{DEADLINE_SECONDS:g}s"}
RESTART_SECONDS = 30.0
WARM_SECONDS = 10.0  # what is waited for targets that hang


class Files:
    """What the bucket has, and what reading it must give. Each round finds some that nobody has read before.

    All are there from the beginning: what was listed is believed for a minute.
    """

    def __init__(self, bucket: Bucket, rounds_count: int) -> None:
        rng = random.Random(1)
        self.contents: dict[str, bytes] = {}
        self._rounds: list[dict[str, bytes]] = []
        for directory, count in (("before", 12), *((f"round{number}", 8) for number in range(rounds_count))):
            names = [f"{directory}/{number}" for number in range(count)]
            self._rounds.append({name: rng.randbytes(SIZES_BYTES[at % len(SIZES_BYTES)]) for at, name in enumerate(names)})
            for name, data in self._rounds[-1].items():
                bucket.put(name, data)

    def more(self) -> dict[str, bytes]:
        """Those of the next round; `contents` are all so far."""
        added = self._rounds.pop(0)
        self.contents |= added
        return added


def read(mount: Mount, name: str) -> bytes:
    """Not from the kernel's page cache."""
    with open(mount.root / name, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


class Readers:
    """They read files at random, as long as the test goes on. `wrong` is what they were told that is not so."""

    def __init__(self, mount: Mount, contents: dict[str, bytes], seed: int) -> None:
        self.read_count = 0
        self.wrong: list[str] = []
        self._mount = mount
        self._contents = dict(contents)
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(seed + number,)) for number in range(READERS_COUNT)]

    def _read(self, seed: int) -> None:
        rng = random.Random(seed)
        names = sorted(self._contents)
        while not self._ends.is_set():
            name = rng.choice(names)
            try:
                if read(self._mount, name) != self._contents[name]:
                    self.wrong.append(f"{name}: wrong bytes")
            except OSError as error:
                self.wrong.append(f"{name}: {error}")
            self.read_count += 1

    def get_on(self, count: int) -> None:
        """Until they have read so many more files."""
        goal = self.read_count + count
        wait_until(lambda: self.read_count >= goal, f"{count} files read", LONG_SECONDS)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def reading(mount: Mount, contents: dict[str, bytes], seed: int) -> Iterator[Readers]:
    readers = Readers(mount, contents, seed)
    readers.start()
    try:
        yield readers
    finally:
        readers.stop()
    assert readers.wrong == []


def scrub(mount: Mount, *options: str) -> dict[str, int]:
    ran = mount.tiercache("scrub", "--tier", "warm", "--json", *options)
    assert ran.code == 0, (ran.out, ran.err)
    counts: dict[str, int] = ran.json["counts"]
    return counts


def await_full_redundancy(targets: BreakableTargets) -> None:
    """Repairs that reads have wished for may still be under way."""
    wrong: list[str] = []

    def is_whole() -> bool:
        wrong[:] = survey(targets.paths).incomplete(len(targets.paths))
        return not wrong

    with suppress(TimeoutError):
        wait_until(is_whole, "full redundancy")
    assert wrong == []


def go_through(
    mount: Mount, targets: BreakableTargets, files: Files, kinds: Sequence[str], rng: random.Random, number: int
) -> None:
    """m targets fail while files are read and demoted; then they come back, and everything is as if nothing had been."""
    with reading(mount, files.contents, number) as readers:
        readers.get_on(10)
        evict_quietly(mount)  # what is read next, is read from targets
        for kind in kinds:
            chosen = rng.choice([each for each in targets.suffering(kind) if each not in targets.broken])
            targets.break_one(chosen, kind, rng)
        readers.get_on(30)
        for name, data in files.more().items():
            assert read(mount, name) == data, name
        evict_quietly(mount)
        readers.get_on(30)
        targets.mend_all()
    evict_quietly(mount)
    targets.age(2 * GRACE_SECONDS)
    scrub(mount, "--repair")
    await_full_redundancy(targets)
    stored = {key: data for (key, _), data in survey(targets.paths).contents().items()}
    assert stored.items() <= files.contents.items()
    assert scrub(mount) == {}
    for name, data in files.contents.items():
        assert read(mount, name) == data, name


def evict_quietly(mount: Mount) -> None:
    """Everything that nobody has open goes to the warm tier."""
    ran = mount.tiercache("evict", mount.root, "--to", "warm", "--json")
    assert ran.code == 0, (ran.out, ran.err)


@contextmanager
def world(
    bucket: Bucket,
    proxy: Proxy,
    mounting: Mounting,
    place: Path,
    *,
    rounds_count: int = 0,
    hot_size: str = "2GB",
    cold: Mapping[str, object] | None = None,
) -> Iterator[tuple[Mount, BreakableTargets, Files]]:
    files = Files(bucket, rounds_count)
    with breakable_targets(place / "warm") as targets:
        if cold is None:
            mount = mounting(bucket, via=proxy, hot_size=hot_size, options=targets.options)
        else:
            warm = {"targets": [str(path) for path in targets.paths], "data_shards": 4, "parity_shards": 2}
            mount = mounting(bucket, via=proxy, settings={"warm": warm, "cold": cold})
        for name, data in files.more().items():
            assert read(mount, name) == data, name
        counts = evict_all(mount)
        assert counts["demoted"] + counts["already"] == len(files.contents)
        try:
            yield mount, targets, files
        finally:
            targets.mend_all()  # a daemon that is to end must not wait for them
            mount.close()


def test_with_m_targets_in_trouble_nobody_notices(bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path) -> None:
    pairs = [("deleted", "noise"), ("filled", "hung")]  # all of them in the soak test
    rng = random.Random(2)
    with world(bucket, proxy, mounting, tmp_path, rounds_count=len(pairs)) as (mount, targets, files):
        for number, kinds in enumerate(pairs):
            go_through(mount, targets, files, kinds, rng, number)


def everything_is_evicted(mount: Mount) -> None:
    ran = mount.tiercache("evict", mount.root, "--to", "drop", "--json")
    assert (ran.code, ran.json["counts"]["in_use"]) == (0, 0), (ran.out, ran.err)


def test_with_one_more_the_store_gives_the_bytes_and_without_it_reads_fail_soon(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path
) -> None:
    rng = random.Random(4)
    with world(bucket, proxy, mounting, tmp_path, cold=COLD) as (mount, targets, files):
        for number in targets.suffering("hung"):
            targets.break_one(number, "hung", rng)
        with bounded(RESTART_SECONDS):
            assert sum("does not answer" in notice for notice in mount.remount()["notices"]) == 2
        proxy.stop()
        for name, data in files.contents.items():
            assert read(mount, name) == data, name  # m are gone, and the store too
        everything_is_evicted(mount)
        targets.break_one(1, "noise", rng)
        for name in ("before/1", "before/4", "before/5"):  # of a pack, of one chunk, of two
            with bounded(DEADLINE_SECONDS + WARM_SECONDS):
                assert errno_of(partial(read, mount, name)) == "EIO", name
        proxy.start()
        with proxy.recording() as record:
            for name, data in files.contents.items():
                assert read(mount, name) == data, name
        asked = {seen.path.partition("/before/")[2] for seen in record.gets}
        assert asked >= {
            name.removeprefix("before/") for name, data in files.contents.items() if len(data) > 1
        }  # one shard is left


@pytest.mark.soak
def test_with_any_m_targets_in_trouble_nobody_notices(bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path) -> None:
    """The hot tier is too small for all files, so that they are demoted and evicted all the time."""
    pairs = list(combinations_with_replacement(KINDS, 2))
    rng = random.Random(3)
    with world(bucket, proxy, mounting, tmp_path, rounds_count=len(pairs), hot_size="64MB") as (mount, targets, files):
        for number, kinds in enumerate(pairs):
            go_through(mount, targets, files, kinds, rng, number)
