"""What all rows share: random data on the disk and in a real S3 server, mounts of it, and the checks that keep figures honest.

Native files, server, hot directories and downloads lie on one disk, the one that `--directory` names. What was read is
compared with the native files after the clock has stopped; a hot row that causes a GET, and a cold one that causes none, are
faults and not figures.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from boto3.s3.transfer import TransferConfig

from bench import machine
from bench.crowd import Broken, Crowd, run, running
from bench.gets import RANGE_BYTES, Store
from bench.measure import Sampled, Side, Take
from bench.mounts import KeptMount, Way, empty
from bench.reader import Job
from bench.reads import Digest, Forget
from bench.usage import (
    GilSampling,
    Usage,
    cpu_seconds_of,
    peak_resident_bytes,
    pid_of_child,
    sampler,
    sampling_gil,
    settled_usage_of,
    usage_of,
)
from tests.fuse.mount import Mount, is_running
from tests.servers.process import wait_until
from tests.servers.weed import Weed

BUCKET = "bench"
SERVER_PROGRAM = "weed"
PIECE_BYTES = 4 << 20
END_SECONDS, LOG_CHARACTERS = 3.0, 2000
COPIES = 5  # native, server, hot, download or a second hot, and one to spare
WARM_COPIES = 8  # of two data sets native, server, hot; and twice one and a half on targets, with what is to spare
CREATED_FILES, SLOW_CREATE_SECONDS = 64, 100e-6
SETTLE_SECONDS, SETTLE_STEP_SECONDS = 90.0, 5.0


@dataclass(frozen=True)
class Sizes:
    """`hot_reads` and `cold_reads` are 4 KiB reads a take; `first_bytes` is how often the first byte is waited for.

    `load` files are what is fetched while latencies are measured, `warm` files what goes to the warm tier and comes back.
    """

    big_bytes: int
    file_bytes: int
    files_count: int
    hot_reads_count: int
    cold_reads_count: int
    first_bytes_count: int
    load_bytes: int = 32 << 20
    load_count: int = 24
    warm_bytes: int = 64 << 20
    warm_count: int = 8

    @property
    def total_bytes(self) -> int:
        return self.big_bytes + self.file_bytes * self.files_count

    @property
    def load_total_bytes(self) -> int:
        return self.load_bytes * self.load_count

    @property
    def warm_total_bytes(self) -> int:
        return self.warm_bytes * self.warm_count


FULL = Sizes(512 << 20, 100 << 10, 2000, 10_000, 200, 30)
QUICK = Sizes(  # the large file must be larger than what is always fetched whole (64 MiB)
    96 << 20, 100 << 10, 200, 1000, 40, 30, load_bytes=24 << 20, load_count=12, warm_bytes=24 << 20, warm_count=3
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """What jobs took. `usage` is the daemon's, None where none had a part in it."""

    seconds: float
    count: int
    readers_seconds: float
    server_seconds: float
    usage: Usage | None = None

    def take(self, figure: float, work: float = 0.0) -> Take:
        return Take(figure, work, self.readers_seconds, self.server_seconds, self.usage)

    def after(self, earlier: Timed) -> Timed:
        """Both, one after the other; the count is this one's."""
        assert self.usage is not None
        assert earlier.usage is not None
        return Timed(
            earlier.seconds + self.seconds,
            self.count,
            earlier.readers_seconds + self.readers_seconds,
            earlier.server_seconds + self.server_seconds,
            earlier.usage + self.usage,
        )


class Lab:
    def __init__(self, directory: Path, sizes: Sizes, server: Weed) -> None:
        self.sizes = sizes
        self.native = directory / "native"
        self.download = directory / "download"
        self.store = Store(server.endpoint_url, server.access_key, server.secret_key, BUCKET)
        self.small_names = [f"small/{number:05d}.bin" for number in range(sizes.files_count)]
        self.peak_resident_bytes = 0
        self.create_seconds: list[float] = []
        self._directory = directory
        self._server = server
        self._digests: dict[tuple[str, ...], str] = {}
        self._load_names: list[str] = []
        self._more_names: dict[str, list[str]] = {}
        self._hot: Mount | None = None
        self._way = Way()
        self._sampling: list[GilSampling] | None = None

    # -- the data

    def fill(self) -> None:
        """Write the native files and put the same bytes into the bucket."""
        (self.native / "small").mkdir(parents=True)
        with (self.native / "big").open("wb") as file:
            for begin in range(0, self.sizes.big_bytes, PIECE_BYTES):
                file.write(os.urandom(min(PIECE_BYTES, self.sizes.big_bytes - begin)))
        self._server.make_bucket(BUCKET)
        client = self._server.client
        parts = TransferConfig(multipart_threshold=RANGE_BYTES, multipart_chunksize=RANGE_BYTES, max_concurrency=4)
        client.upload_file(str(self.native / "big"), BUCKET, "big", Config=parts)

        with ThreadPoolExecutor(8) as threads:
            for _ in threads.map(lambda name: self._put(name, os.urandom(self.sizes.file_bytes)), self.small_names):
                pass
        self._server.close_client()

    def _put(self, name: str, body: bytes) -> None:
        path = self.native / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body)
        self._server.put(BUCKET, name, body)

    def fill_more(self, kind: str, bodies: Iterable[bytes]) -> list[str]:
        """The names of further files, native and in the bucket; made at the first call for this kind."""
        if kind not in self._more_names:
            names = self._more_names[kind] = []
            for number, body in enumerate(bodies):
                names.append(f"{kind}/{number:03d}.bin")
                self._put(names[-1], body)
            self._server.close_client()
        return self._more_names[kind]

    def fill_load(self) -> list[str]:
        """The names of the files of the load, put into the bucket at the first call."""
        if not self._load_names:
            body = os.urandom(self.sizes.load_bytes)  # who reads them compares nothing
            self._load_names = [f"load/{number:03d}.bin" for number in range(self.sizes.load_count)]
            for name in self._load_names:
                self._server.put(BUCKET, name, body)
            self._server.close_client()
        return self._load_names

    def small(self, root: Path) -> list[str]:
        return [str(root / name) for name in self.small_names]

    @contextlib.contextmanager
    def place(self, kind: str) -> Iterator[Path]:
        """A new directory on the disk, whose files are only emptied at the end (see bench/mounts.py)."""
        path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=self._directory))
        try:
            yield path
        finally:
            empty(path)

    # -- mounts

    @contextlib.contextmanager
    def mounted(self, way: Way | None = None, hot_bytes: int | None = None, options: Sequence[str] = ()) -> Iterator[Mount]:
        """A new daemon with an empty hot directory, killed at the end (see bench/mounts.py). Raises Broken when it dies."""
        hot_bytes = hot_bytes or 3 * self.sizes.total_bytes + 10**9
        with tempfile.TemporaryDirectory(prefix="tc-") as home:  # short: the admin socket lies in it
            mount = KeptMount(
                f"s3://{BUCKET}",
                Path(home) / "m",
                way=way or self._way,
                hot=Path(tempfile.mkdtemp(prefix="hot-", dir=self._directory)),
                hot_size=f"{math.ceil(hot_bytes / 1e6)}MB",
                options=["--endpoint-url", self.store.endpoint_url, "--region", "us-east-1", *options],
                extra=self._server.environment,
            )
            try:
                self._start(mount)
                self.create_seconds.append(_create_seconds(self._directory / f"created-for-{mount.hot.name}"))
                os.sync()
                yield mount
                self.peak_resident_bytes = max(self.peak_resident_bytes, peak_resident_bytes(mount.pid))
            except (Broken, OSError, httpx.HTTPError) as error:
                raise Broken(f"{error or repr(error)}; {_state(mount)}") from error
            finally:
                mount.close()
                os.sync()

    def _start(self, mount: Mount) -> None:
        try:
            mount.start()
        except RuntimeError as error:
            raise Broken(f"cannot mount: {error}") from error

    @contextlib.contextmanager
    def going(self, way: Way) -> Iterator[None]:
        """Mounts and readers go this way meanwhile."""
        before, self._way = self._way, way
        try:
            yield
        finally:
            self._way = before

    @property
    def way(self) -> Way:
        return self._way

    @contextlib.contextmanager
    def kept_hot(self, mount: Mount) -> Iterator[None]:
        """`hot` is this mount meanwhile."""
        before, self._hot = self._hot, mount
        try:
            yield
        finally:
            self._hot = before

    @property
    def hot(self) -> Mount:
        assert self._hot is not None, "hot rows are measured on a mount that is hot"
        return self._hot

    def cold_reads(self, mount: Mount) -> int:
        """GETs that its daemon has sent so far."""
        wanted = 'tiercache_requests_total{operation="read",tier="cold"}'
        return int(mount.metrics().get(wanted, 0.0))

    # -- measuring

    def run(self, jobs: Sequence[Job], before: Callable[[], None] = lambda: None) -> Crowd:
        return run(jobs, before, user_id=self._way.user_id)

    @contextlib.contextmanager
    def loaded(self, jobs: Sequence[Job]) -> Iterator[None]:
        """These jobs go on meanwhile."""
        with running(jobs, self._way.user_id):
            yield

    def timed(
        self, mount: Mount, jobs: Sequence[Job], before: Callable[[], None] = lambda: None, *, settle: bool = True
    ) -> Timed:
        """Do the jobs on the mount. CPU is counted until the daemon is quiet again, or only to the last answer.

        Hot reads leave nothing to be done behind, while scrub, which goes on all the time, would be counted as theirs.
        """
        started: list[Usage] = []

        def begin() -> None:
            before()
            started.append(usage_of(mount.pid))

        def ended() -> Usage:
            return (settled_usage_of(mount.pid) if settle else usage_of(mount.pid)) - started[0]

        if self._sampling is None:
            return self._timed(jobs, begin, ended)
        with sampling_gil(mount.pid, self._directory) as sampling:
            timed = self._timed(jobs, begin, ended)
        self._sampling.append(sampling)
        return timed

    def compared(self, jobs: Sequence[Job], before: Callable[[], None] = lambda: None) -> Timed:
        """Do the jobs of the reference, which no daemon has a part in."""
        return self._timed(jobs, before, lambda: None)

    def _timed(self, jobs: Sequence[Job], begin: Callable[[], None], ended: Callable[[], Usage | None]) -> Timed:
        server = pid_of_child(SERVER_PROGRAM)
        started: list[float] = []

        def before() -> None:
            begin()
            started.append(cpu_seconds_of(server))

        crowd = self.run(jobs, before)
        usage = ended()
        return Timed(crowd.seconds, crowd.count, crowd.cpu_seconds, cpu_seconds_of(server) - started[0], usage)

    def sampled(self, side: Side) -> Sampled | None:
        """One more take, with py-spy attached; None without py-spy."""
        if sampler() is None:
            return None
        self._sampling = []
        try:
            take = side(self)
            complaints = [sampling.complaint for sampling in self._sampling if sampling.held_seconds is None]
            held_seconds = sum(sampling.held_seconds or 0.0 for sampling in self._sampling)
        finally:
            self._sampling = None
        if complaints or take.usage is None or take.usage.total_seconds <= 0:
            return Sampled(None, "; ".join(complaints) or "no CPU was used")
        return Sampled(held_seconds / take.usage.total_seconds)

    def quiet(self) -> None:
        """No write-back of an earlier take disturbs the next one."""
        self.download.unlink(missing_ok=True)
        os.sync()

    def drop_pages(self) -> None:
        """What is read next comes from the disk, natively and through the mount."""
        if machine.may_drop_caches():
            machine.drop_caches()
            return
        os.sync()
        objects = [str(path) for path in (self.hot.hot / "objects").glob("*/*")]
        ours = [str(root / name) for root in (self.native, self.hot.root) for name in ("big", *self.small_names)]
        self.run([Forget(ours + objects)])

    def verify(self, root: Path, names: Sequence[str], size_bytes: int = 0, seed: int = 0, count: int = 0) -> None:
        """Raises Broken when the bytes below `root` are not those of the native files."""
        kind = (*names, str(size_bytes), str(seed), str(count))
        if kind not in self._digests:
            self._digests[kind] = self._digest(self.native, names, size_bytes, seed, count)
        if self._digest(root, names, size_bytes, seed, count) != self._digests[kind]:
            raise Broken(f"wrong bytes in {names[0]}{' or its neighbours' if len(names) > 1 else ''}")

    def _digest(self, root: Path, names: Sequence[str], size_bytes: int, seed: int, count: int) -> str:
        job = Digest([str(root / name) for name in names], size_bytes, seed, count)
        return self.run([job]).outcomes[0].digest


def _state(mount: Mount) -> str:
    """Whether the daemon lives, after a moment in which it can die, and the end of its log."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not mount.pid or not is_running(mount.pid), "its end", END_SECONDS)
    state = "was not there" if not mount.pid else "is alive" if is_running(mount.pid) else "died"
    return f"the daemon {state}; its log ends: {mount.log_text()[-LOG_CHARACTERS:] or '(empty)'}"


def check_room(directory: Path, sizes: Sizes) -> None:
    """Raises Broken when the disk is too full: the cache would make room and nothing would be measured."""
    wanted_bytes = COPIES * sizes.total_bytes + WARM_COPIES * sizes.warm_total_bytes + machine.total_bytes(directory) // 10
    if machine.free_bytes(directory) < wanted_bytes:
        raise Broken(
            f"{directory} has {machine.free_bytes(directory) / 1e9:.1f} GB free and {wanted_bytes / 1e9:.1f} GB are needed"
            " (a tenth of the disk stays free); choose another --directory, or --quick"
        )


def settled_create_seconds(directory: Path) -> float:
    """What creating a file costs there, when inodes that somebody has just deleted are not in the way any more (bench/mounts.py).

    Waits a while for that, not for ever.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    for attempt in itertools.count():
        seconds = _create_seconds(directory / f"created-{attempt}")
        if seconds < SLOW_CREATE_SECONDS or time.monotonic() > deadline:
            break
        time.sleep(SETTLE_STEP_SECONDS)
    return seconds


def _create_seconds(directory: Path) -> float:
    """The median."""
    directory.mkdir()
    took = []
    for number in range(CREATED_FILES):
        began = time.perf_counter()
        os.close(os.open(directory / str(number), os.O_CREAT | os.O_WRONLY))
        took.append(time.perf_counter() - began)
    return statistics.median(took)


@contextlib.contextmanager
def directory_below(parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=parent))
    directory.chmod(0o755)  # for mounts of another user
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
        os.sync()  # inodes that are deleted on the disk can be used again sooner
