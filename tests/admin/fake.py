"""A `Control` with made-up files, served for real on a unix socket: what the admin tests and the CLI tests talk to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from tiercache.admin.app import Listening, serve_admin
from tiercache.admin.messages import (
    DatasetStatus,
    EvictRequest,
    Failure,
    HandingOver,
    HotDirectory,
    JobStarted,
    JobStatus,
    PinAnswer,
    PinProgress,
    PinRequest,
    Pins,
    PinStatus,
    ReadPath,
    Refreshed,
    ScrubRequest,
    Status,
    TargetsAnswer,
    TargetStatus,
    Tiers,
    TierStatus,
    Unpinned,
    Where,
)
from tiercache.errors import NotFound, SetupError, TiercacheError, UsageError

PINNABLE_BYTES = 1000
NOW_SECONDS = 1_700_000_000


class FakeWork:
    """Jobs that are asked for `polls_count` times before they end, as `outcome` says."""

    def __init__(self) -> None:
        self.asked: list[EvictRequest | ScrubRequest | str] = []
        self.has_warm = True
        self.joined = False
        self.polls_count = 2
        self.outcome: dict[str, Any] = {}
        self.jobs: dict[int, str] = {}

    def _started(self, kind: str, asked: EvictRequest | ScrubRequest | str) -> JobStarted:
        self.asked.append(asked)
        self.jobs[len(self.jobs) + 1] = kind
        return JobStarted(len(self.jobs), kind, self.joined)

    def evict(self, request: EvictRequest) -> JobStarted:
        if request.to == "warm" and not self.has_warm:
            raise UsageError("this mount has no warm tier", hint="mount with --warm-target")
        return self._started("eviction", request)

    def scrub(self, request: ScrubRequest) -> JobStarted:
        return self._started("scrub of the warm tier", request)

    def rebuild_index(self) -> JobStarted:
        return self._started("rebuilding of the index", "rebuild")

    def job(self, number: int) -> JobStatus:
        if number not in self.jobs:
            raise NotFound(f"there is no job {number}")
        self.polls_count -= 1
        if self.polls_count >= 0:
            return JobStatus(number, self.jobs[number], "running", 3, 1, 300, 100)
        return msgspec.structs.replace(JobStatus(number, self.jobs[number], "done", 3, 3, 300, 300), **self.outcome)

    def targets(self) -> TargetsAnswer:
        if not self.has_warm:
            return TargetsAnswer(0, 0, [])
        up = TargetStatus("/flash/0", "00" * 16, "up", "", 10**9, 3 * 10**9, 10**10, 2, False, True)
        down = TargetStatus("/flash/1", "", "down", "not mounted", None, None, None, 7, False, False)
        full = msgspec.structs.replace(up, path="/flash/2", is_full=True)
        return TargetsAnswer(2, 1, [up, down, full])


def failed(path: str, error: TiercacheError) -> Failure:
    return Failure(path, type(error).__name__, str(error), error.hint)


class FakeControl:
    """Files by `dataset/key` with their sizes. `stop` runs `when_stopped`, or fails with `refuse_stop`."""

    def __init__(self, mountpoint: str = "/mnt/fake", *, dataset: str = "fake", source: str = "s3://bucket/train") -> None:
        self.mountpoint = mountpoint
        self.dataset = dataset
        self.source = source
        self.socket = ""
        self.files: dict[str, int] = {}
        self.fetched_bytes: dict[str, int] = {}
        self.pinned: dict[str, PinStatus] = {}
        self.refreshed: list[str] = []
        self.refuse_stop: TiercacheError | None = None
        self.stopped = threading.Event()
        self.handed_over = threading.Event()
        self.hang = False
        self.asked = threading.Event()
        self.fetch_step_bytes = 40
        self.fetch_error = ""
        self.metrics_text = b"# HELP tiercache_up one\n# TYPE tiercache_up gauge\ntiercache_up 1\n"
        self.notices = ["index was damaged and rebuilt"]
        self.work = FakeWork()

    def add(self, key: str, size_bytes: int) -> None:
        self.files[f"{self.dataset}/{key}"] = size_bytes

    def _located(self, path: str) -> str:
        if path.startswith("/"):
            path = self.dataset + path.removeprefix(self.mountpoint)
        if path not in self.files:
            raise NotFound(f"{path!r} does not exist", hint="list its directory")
        return path

    def status(self) -> Status:
        hot = HotDirectory("/var/cache/fake", 250_000_000, 1_000_000_000, "ok")
        return Status(
            pid=4711,
            version="0.1.0",
            mountpoint=self.mountpoint,
            socket=self.socket,
            uptime_seconds=11_532.5,
            path=ReadPath("plain", "Linux 5.10 has no FUSE passthrough"),
            tiers=Tiers(
                TierStatus(250_000_000, 1_000_000_000, "ok", "", [hot]),
                TierStatus(0, None, "absent"),
                TierStatus(0, None, "degraded", "2 of the last 10 requests failed"),
            ),
            datasets=[
                DatasetStatus(
                    name=self.dataset,
                    source=self.source,
                    replica=None,
                    immutable=False,
                    hot_objects_count=12,
                    hot_bytes=250_000_000,
                    hits_ratio=0.9996,
                    opens_count=40,
                    reads={"hot": 9996, "cold": 4},
                    read_bytes={"hot": 1_310_000_000, "cold": 524_288},
                    unreachable_count=1,
                    pinned_bytes=sum(pin.wanted_bytes for pin in self.pinned.values()),
                )
            ],
            notices=self.notices,
        )

    async def where(self, path: str) -> Where:
        self.asked.set()
        if self.hang:
            await trio.sleep_forever()
        name = self._located(path)
        size_bytes = self.files[name]
        return Where(
            path=path,
            kind="file",
            dataset=self.dataset,
            key=name.partition("/")[2],
            version=f"0123456789abcdef0123456789abcdef:{size_bytes}",
            size_bytes=size_bytes,
            inode=77,
            residency=["hot", "cold"],
            hot_bytes=size_bytes,
            chunks_present=1,
            chunks_total=1,
            replica=False,
            pin=self.pinned.get(name),
        )

    async def refresh(self, path: str) -> Refreshed:
        name = self._located(path)
        self.refreshed.append(name)
        return Refreshed(path, changed_count=2, dropped_count=1)

    async def pin(self, request: PinRequest) -> PinAnswer:
        names = [self._located(path) for path in request.paths]
        wanted_bytes = sum(self.files[name] for name in names)
        before_bytes = sum(pin.wanted_bytes for pin in self.pinned.values())
        admitted = before_bytes + wanted_bytes <= PINNABLE_BYTES
        made = []
        if admitted and not request.dry_run:
            expires = None if request.ttl_seconds is None else NOW_SECONDS + int(request.ttl_seconds)
            for name in names:
                key = name.partition("/")[2]
                pin = PinStatus(
                    name, self.dataset, key, True, request.owner, request.reason, NOW_SECONDS, expires, self.files[name], 0
                )
                self.pinned[name] = pin
                self.fetched_bytes[name] = 0
                made.append(pin)
        refusal = "" if admitted else f"{wanted_bytes} bytes are wanted, {PINNABLE_BYTES - before_bytes} may be pinned"
        return PinAnswer(admitted, refusal, request.dry_run, len(names), wanted_bytes, 0, before_bytes, PINNABLE_BYTES, made)

    async def unpin(self, paths: Sequence[str]) -> Unpinned:
        names = {path: self._located(path) for path in paths}
        removed = [self.pinned.pop(name) for name in names.values() if name in self.pinned]
        gone = {pin.path for pin in removed}
        return Unpinned(removed, [path for path, name in names.items() if name not in gone])

    async def pin_progress(self, paths: Sequence[str]) -> PinProgress:
        names = [self._located(path) for path in paths]
        missing = [name for name in names if name not in self.pinned]
        if missing:
            raise NotFound(f"{missing[0]!r} is not pinned")
        for name in names:
            self.fetched_bytes[name] = min(self.fetched_bytes[name] + self.fetch_step_bytes, self.files[name])
        hot_bytes = sum(self.fetched_bytes[name] for name in names)
        wanted_bytes = sum(self.files[name] for name in names)
        whole = sum(self.fetched_bytes[name] == self.files[name] for name in names)
        failed = 1 if self.fetch_error else 0
        done = bool(failed) or hot_bytes == wanted_bytes
        return PinProgress(len(names), whole, wanted_bytes, hot_bytes, failed, self.fetch_error, done)

    def pins(self) -> Pins:
        return Pins(list(self.pinned.values()))

    def metrics(self) -> bytes:
        return self.metrics_text

    async def stop(self) -> None:
        if self.refuse_stop is not None:
            raise self.refuse_stop
        self.stopped.set()

    async def hand_over(self) -> HandingOver:
        if self.refuse_stop is not None:
            raise self.refuse_stop
        self.handed_over.set()
        return HandingOver(4711, self.mountpoint, "0.1.0", "0.2.0")


def busy(mountpoint: str) -> SetupError:
    return SetupError(f"{mountpoint} cannot be unmounted: files or directories there are in use", hint="close them")


@contextmanager
def serving(control: FakeControl, socket_path: Path) -> Iterator[FakeControl]:
    """The control behind a socket, in a thread of its own; ends by itself when it is asked to stop."""
    control.socket = str(socket_path)
    ready = threading.Event()
    failure: list[BaseException] = []
    ending: list[trio.lowlevel.TrioToken] = []
    scope = trio.CancelScope()

    async def main() -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                listening = await nursery.start(partial(serve_admin, control, socket_path=str(socket_path)))
                assert isinstance(listening, Listening)
                ending.append(trio.lowlevel.current_trio_token())
                ready.set()
                await trio.to_thread.run_sync(control.stopped.wait)
                nursery.cancel_scope.cancel()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001  (handed to the test)
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        if failure:
            raise failure[0]
        yield control
    finally:
        control.stopped.set()
        thread.join(10)
        assert not thread.is_alive()
    if failure:
        raise failure[0]
