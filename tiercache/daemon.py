"""The composition root: builds everything, holds the one nursery, and knows the order of starting and stopping.

Start: FUSE and mount point, sources, cache directories (each a check that can refuse, and nothing is mounted before
all have passed), index, engine, admin socket, mount. Stop: unmount, so that no request comes any more; cancel what runs; sync
what was written; only then does the index get its clean mark. A signal and `umount` by anybody go through the same stop.

A successor of a daemon that died, or that handed over, takes over the connection that was kept (`supervision.py`) instead of
mounting. Whatever would touch the mount point is left out, because nobody answers there yet, and the sources are taken
as known. When the connection is refused it is aborted, and the successor mounts freshly. Handing over is a stop that
leaves out the unmounting. After a bug, too, the mount is left: for the successor, or, where nobody keeps the connection, dead:
programs see ENOTCONN, which nobody takes for an empty dataset, and the next `mount` heals it.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import trio

from tiercache import __version__
from tiercache.admin.answers import Answers, Mounted
from tiercache.admin.app import serve_admin
from tiercache.admin.messages import ReadPath, StartReport, encode
from tiercache.admin.socket import prepare_runtime_directory, socket_for
from tiercache.config import Config, decode
from tiercache.config import encode as config_bytes
from tiercache.core.record import Pin
from tiercache.engine.dataset import Dataset
from tiercache.engine.datasets import build_datasets, sources_of
from tiercache.engine.engine import Engine, Limits
from tiercache.engine.hotset import HotSet, open_hot
from tiercache.engine.warmset import WarmSet, open_warm
from tiercache.errors import SetupError, TiercacheError
from tiercache.fuse.mountpoint import check_fuse, is_mounted, mount_at, unmount
from tiercache.fuse.native import Path as ReadingPath
from tiercache.fuse.native import native
from tiercache.fuse.operations import Operations, Owner
from tiercache.fuse.session import Session
from tiercache.fuse.takeover import connect, end_connection, keepsake, place_for
from tiercache.logs import configure
from tiercache.metrics.definitions import Metrics
from tiercache.metrics.tally import Tally
from tiercache.notify import notify
from tiercache.supervision import (
    Kept,
    Supervision,
    become_successor,
    drop,
    found,
    is_being_restarted,
    keep,
    rehearse_successor,
    tell,
)

log = structlog.get_logger()

Report = Callable[[StartReport], None]

REPORT_FD = 3
FILES = 1 << 20
SWITCH_SECONDS = 0.001
"""How long a thread may hold the GIL while another wants it: threads that receive must not delay the event loop."""
YOUNG_OBJECTS = 5000
"""After so many new objects garbage is looked for among them: most of those that a fill or an open makes have gone by then."""
COPIES_SECONDS = 0.5
"""How long after an unmount the kernel may take to end the connection. One that it does not end is held by copies of the mount in
other mount namespaces, or by files that were open when somebody detached it: it is ended for them too."""


def run(config: Config, *, report: Report) -> int:
    """Serve until unmounted; the exit code. `report` is called once, when the filesystem is usable or cannot be."""
    configure()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(YOUNG_OBJECTS)
    os.umask(0o077)
    _raise_file_limit()
    once = _Once(report)
    supervision = found()
    try:
        handover = trio.run(_serve, config, supervision, once)
        if handover is not None:
            become_successor(handover.kept, stopped_at_seconds=handover.stopped_at_seconds)
    except BaseExceptionGroup as group:
        wrong, bugs = group.split(TiercacheError)
        if bugs is not None or wrong is None:
            raise
        error = _first(wrong)
        log.error("ended", error=error.line)
        once(StartReport(error=str(error), hint=error.hint))
        return 1
    except TiercacheError as error:
        log.error("ended", error=error.line)
        once(StartReport(error=str(error), hint=error.hint))
        return 1
    return 0


def _raise_file_limit() -> None:
    """Every open hot file and every connection is a descriptor: take all that the hard limit allows, within reason."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if hard == resource.RLIM_INFINITY else min(hard, FILES), hard))


class _Once:
    """A report that is given once: what goes wrong after the mount is in the log."""

    def __init__(self, report: Report) -> None:
        self._report: Report | None = report

    def __call__(self, outcome: StartReport) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(outcome)


def main() -> int:
    """`python -m tiercache.daemon [--report]`: the configuration is a memory file with JSON on descriptor 0.

    With `--report`, which only the first daemon of a mount is given, a report goes to descriptor 3. `--rehearse` goes as far as a
    start can without touching anything and writes the version: what a daemon wants to know of its successor.
    """
    if "--rehearse" in sys.argv:
        decode(sys.stdin.buffer.read())
        Tally(Metrics())
        sys.stdout.write(__version__)
        return 0
    os.lseek(sys.stdin.fileno(), 0, os.SEEK_SET)  # predecessors have read it
    config = decode(sys.stdin.buffer.read())
    return run(config, report=_to_descriptor if "--report" in sys.argv else _to_nobody)


def _to_descriptor(outcome: StartReport) -> None:
    try:
        os.write(REPORT_FD, encode(outcome))
        os.close(REPORT_FD)
    except OSError as error:
        log.warning("nobody_hears_the_report", error=str(error))


def _to_nobody(outcome: StartReport) -> None:
    """A successor: the log says what became of it."""


def _first(group: BaseExceptionGroup[TiercacheError]) -> TiercacheError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TiercacheError)
    return error


class Handover(NamedTuple):
    """A connection for the program that this process becomes."""

    kept: Kept
    stopped_at_seconds: float


async def _serve(config: Config, supervision: Supervision, report: Report) -> Handover | None:
    tally = Tally(Metrics())
    await trio.to_thread.run_sync(partial(check_fuse, allow_other=config.mount.allow_other))
    kept = supervision.kept
    try:
        point = await trio.to_thread.run_sync(place_for, config.mount.point, kept)
        if point is None:
            log.warning("unmounted_while_no_daemon_ran", mountpoint=config.mount.point)
            return None
        async with trio.open_nursery() as nursery:
            datasets = await build_datasets(config, tally, nursery, known=kept is not None)
            try:
                sources = sources_of(config)
                hot = await open_hot(config.hot, point, [*sources, *(("warm target", path) for path in config.warm.targets)])
                if hot.index.health.rebuilt:
                    tally.metrics.index_rebuilt.inc()
                try:
                    apart = [*sources, *(("hot directory", path) for path in hot.paths)]
                    warm = await open_warm(nursery, config.warm, tally, Path(hot.paths[0]), point, apart)
                except BaseException:
                    await hot.close(clean=True)
                    raise
                daemon = Daemon(config, point, datasets, hot, warm, tally, supervision)
                try:
                    handover = await daemon.live(report)
                finally:
                    hot.stopping()
                    if warm is not None:
                        await warm.aclose()
                    await hot.close(clean=not daemon.engine_has_residue())
            finally:
                with trio.CancelScope(shield=True):
                    for dataset in datasets:
                        await dataset.cold.aclose()
            nursery.cancel_scope.cancel()
    except BaseException:
        if kept is not None and supervision.present is None:  # nobody holds it: it would be left behind, dead
            end_connection(kept.number)
        raise
    return handover


class Daemon:
    """One mount while it lives."""

    def __init__(
        self,
        config: Config,
        point: str,
        datasets: list[Dataset],
        hot: HotSet,
        warm: WarmSet | None,
        tally: Tally,
        supervision: Supervision,
    ) -> None:
        self._config = config
        self._point = point
        self._datasets = datasets
        self._hot = hot
        self._warm = warm
        self._tally = tally
        self._supervision = supervision
        self._connection_number = 0
        self._kept: Kept | None = None
        self._stall_seconds: float | None = None
        self._leaves_mount = False
        self._handover: Handover | None = None
        self._serving = trio.CancelScope()
        self._engine: Engine | None = None
        names = [dataset.name for dataset in datasets]
        descriptors = [directory.fd for directory in hot.files.directories]
        self._native, self._why_not_native = native(names, descriptors, config.mount.read_path)
        self._path = ReadingPath("plain", "not mounted yet", False)

    def engine_has_residue(self) -> bool:
        return self._engine is not None and self._engine.holdings.has_residue

    async def live(self, report: Report) -> Handover | None:
        """From the first task to the last. Raises SetupError when it cannot be mounted."""
        async with trio.open_nursery() as nursery:
            engine = self._engine = self._build(nursery)
            session = self._session(engine)
            socket = self._socket()
            mounted = Mounted(
                mountpoint=self._point,
                socket=socket,
                path=lambda: ReadPath(self._path.kind, self._path.reason),
                native_counts=lambda: None if self._native is None else self._native.counts(),
                hot_paths=self._hot.paths,
                notices=[*self._hot.notices, *(self._warm.targets.sharing if self._warm is not None else ())],
                forget_names=session.forget_names,
                unmount=self._unmount,
                hand_over=self._hand_over,
                supervisor=lambda: self._supervision.present,
                restarts_count=self._supervision.restarts_count,
                stall_seconds=lambda: self._stall_seconds,
            )
            answers = Answers(engine, self._tally, mounted, single=self._config.single, warm=engine.warm_controls)
            serve = partial(serve_admin, socket_path=socket, http=self._config.admin.http, group=self._config.admin.group)
            await nursery.start(serve, answers)
            await trio.to_thread.run_sync(connect, session, self._supervision.kept)
            await engine.reader.adopt()
            nursery.start_soon(self._hot.index.watch)
            async with trio.open_nursery() as serving:
                self._serving = serving.cancel_scope
                nursery.start_soon(self._stop_on_signal)
                serving.start_soon(session.serve)
                try:
                    await self._begin(engine, session)
                except BaseException:
                    with trio.CancelScope(shield=True):
                        await self._leave_nothing_mounted()
                    raise
                gc.freeze()  # what is there for good is not searched for garbage: 60 ms of the event loop each time
                report(StartReport(ready=answers.status()))
                notify("READY=1")
                log.info("mounted", mountpoint=self._point, hot=self._hot.paths, notices=answers.status().notices)
            if not self._leaves_mount:
                self._let_go()
            nursery.cancel_scope.cancel()
        return self._handover

    async def _begin(self, engine: Engine, session: Session) -> None:
        """What needs a mount; then the background work."""
        await trio.to_thread.run_sync(os.statvfs, self._point, abandon_on_cancel=True)  # else a session that fails is waited for
        mount = await trio.to_thread.run_sync(mount_at, self._point)
        self._connection_number = 0 if mount is None else mount.connection_number
        self._kept = keepsake(session, self._point)
        if self._kept is not None:
            keep(self._kept)
        self._path = await trio.to_thread.run_sync(session.choose_path)
        stopped_at_seconds = self._supervision.stopped_at_seconds
        if stopped_at_seconds is not None:
            self._stall_seconds = time.monotonic() - stopped_at_seconds
            log.info("taken_over", mountpoint=self._point, stall_seconds=round(self._stall_seconds, 3))
        if self._supervision.kept is None:  # else the kernel may still know inodes of old versions
            await engine.index.prune()
        engine.start()
        await self._pin_configured(engine)

    def _let_go(self) -> None:
        """The mount is gone: nothing of it is worth keeping."""
        tell("STOPPING=1")
        if self._kept is not None:
            drop(self._kept.number)

    def _build(self, nursery: trio.Nursery) -> Engine:
        config = self._config
        limits = Limits(
            chunk_bytes=config.hot.chunk_bytes,
            whole_file_bytes=config.policy.whole_file_bytes,
            read_ahead_bytes=config.policy.read_ahead_bytes,
            negative_ttl_seconds=config.mount.negative_ttl_seconds,
            scrub_bytes=config.hot.scrub_rate_bytes,
        )
        hot = self._hot
        return Engine(
            nursery,
            self._datasets,
            hot.index,
            hot.files,
            hot.ledgers,
            limits,
            self._tally,
            single=config.single,
            sweep=hot.sweep,
            publication=self._native,
            warm=self._warm,
        )

    def _session(self, engine: Engine) -> Session:
        mount = self._config.mount
        owner = Owner(
            uid=os.geteuid() if mount.uid is None else mount.uid,
            gid=os.getegid() if mount.gid is None else mount.gid,
            file_mode=mount.file_mode,
            dir_mode=mount.dir_mode,
        )
        operations = Operations(engine.namespace, engine.reader, engine.facts, owner, self._tally)
        source = self._datasets[0].source if self._config.single else "tiercache"
        return Session(
            operations,
            self._point,
            source,
            allow_other=mount.allow_other,
            native=self._native,
            why_not_native=self._why_not_native,
        )

    def _socket(self) -> str:
        if self._config.admin.socket is not None:
            return self._config.admin.socket
        prepare_runtime_directory()
        return str(socket_for(self._point))

    async def _pin_configured(self, engine: Engine) -> None:
        """Datasets that the configuration pins: no admission, the operator has decided."""
        pinned = {(pin.dataset, pin.prefix) for pin in engine.pinning.pins()}
        wanted = [
            Pin(dataset.name, dataset.prefix, False, "configuration", "pin = true", 0, 0, 0)
            for settings, dataset in zip(self._config.datasets, self._datasets, strict=True)
            if settings.pin and (dataset.name, dataset.prefix) not in pinned
        ]
        if wanted:
            await engine.pinning.add(wanted)

    async def _stop_on_signal(self) -> None:
        """A signal ends the mount even if files are open, because a supervisor waits for us: their next read fails then.

        Only systemd, when it stops us in order to start us again, wants the mount to be left to the next one.
        """
        ending = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup(1) is obeyed
            ending.append(signal.SIGHUP)
        with trio.open_signal_receiver(*ending) as signals:
            async for _ in signals:
                if self._supervision.kind == "systemd" and self._kept is not None:
                    self._leaves_mount = await trio.to_thread.run_sync(is_being_restarted) and not await self._held_up()
                tell("STOPPING=1")
                if self._leaves_mount:
                    log.info("left_to_the_next_daemon", mountpoint=self._point)
                    self._serving.cancel()
                    continue
                try:
                    await self._unmount()
                except SetupError as error:
                    log.warning("busy_mount_is_detached", mountpoint=self._point, error=error.line)
                    await self._unmount(lazy=True)

    async def _held_up(self) -> str:
        return "" if self._warm is None else await self._warm.held_up()

    async def _hand_over(self) -> str:
        """End soon, and let this process become the program that is installed now; its version.

        Raises SetupError, with nothing changed, when that cannot be done. What takes long is done while readers are still served.
        """
        if self._kept is None:
            raise SetupError(
                f"{self._point} cannot be handed over: its connection is not kept on this read path",
                hint="end its users, then `tiercache umount` and mount again",
            )
        version = await trio.to_thread.run_sync(rehearse_successor, config_bytes(self._config))
        if why := await self._held_up():
            raise SetupError(f"{self._point} cannot be handed over: {why}", hint="try again when it answers")
        for directory in range(len(self._hot.paths)):
            await trio.to_thread.run_sync(self._hot.files.syncfs, directory)
        kept = self._kept
        self._handover = Handover(
            Kept(os.dup(kept.fuse_fd), os.dup(kept.table_fd), kept.number),  # the session closes its own
            time.monotonic(),
        )
        self._leaves_mount = True
        log.info("hands_over", mountpoint=self._point, version=version)
        self._serving.cancel()
        return version

    async def _unmount(self, *, lazy: bool = False) -> None:
        """Serving ends soon afterwards. What others have mounted at the place of a mount that was detached is left alone.

        Raises SetupError, with nothing changed, when it is busy.
        """
        mount = await trio.to_thread.run_sync(mount_at, self._point)
        if mount is not None and self._connection_number in (0, mount.connection_number):
            await trio.to_thread.run_sync(partial(unmount, self._point, lazy=lazy))
        self._serving.deadline = trio.current_time() + COPIES_SECONDS

    async def _leave_nothing_mounted(self) -> None:
        """After a failed start; what was taken over is left to the next attempt of a supervisor."""
        if self._supervision.kept is not None and self._supervision.present is not None:
            return
        try:
            if await trio.to_thread.run_sync(is_mounted, self._point):
                await trio.to_thread.run_sync(partial(unmount, self._point, lazy=True))
        except TiercacheError as error:
            log.error("still_mounted", mountpoint=self._point, error=error.line)
        self._let_go()


if __name__ == "__main__":
    sys.exit(main())
