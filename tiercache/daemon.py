"""The composition root: builds everything, holds the one nursery, and knows the order of starting and stopping.

Start: FUSE and mount point, sources, cache directories (each a check that can refuse, and nothing is mounted before
all have passed), index, engine, admin socket, mount. Stop: unmount, so that no request comes any more; cancel what runs; sync
what was written; only then does the index get its clean mark. A signal and `umount` by anybody go through the same stop. After a
bug the mount point is left behind, dead: programs see ENOTCONN, which nobody takes for an empty dataset, and the next `mount`
heals it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial

import structlog
import trio

from tiercache.admin.answers import Answers, Mounted
from tiercache.admin.app import serve_admin
from tiercache.admin.messages import ReadPath, StartReport, encode
from tiercache.admin.socket import prepare_runtime_directory, socket_for
from tiercache.config import Config, decode
from tiercache.core.record import Pin
from tiercache.engine.dataset import Dataset
from tiercache.engine.datasets import build_datasets, sources_of
from tiercache.engine.engine import Engine, Limits
from tiercache.engine.hotset import HotSet, open_hot
from tiercache.errors import SetupError, TiercacheError
from tiercache.fuse.mountpoint import check_fuse, is_mounted, prepare_mount_point, unmount
from tiercache.fuse.operations import Operations, Owner
from tiercache.fuse.session import Session
from tiercache.logs import configure
from tiercache.metrics.definitions import Metrics
from tiercache.metrics.tally import Tally
from tiercache.notify import notify

log = structlog.get_logger()

Report = Callable[[StartReport], None]

REPORT_FD = 3
FILES = 1 << 20
SWITCH_SECONDS = 0.001
"""How long a thread may hold the GIL while another wants it: threads that receive must not delay the event loop."""


def run(config: Config, *, report: Report) -> int:
    """Serve until unmounted; the exit code. `report` is called once, when the filesystem is usable or cannot be."""
    configure()
    sys.setswitchinterval(SWITCH_SECONDS)
    os.umask(0o077)
    _raise_file_limit()
    once = _Once(report)
    try:
        trio.run(_serve, config, once)
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
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Once:
    """A report that is given once: what goes wrong after the mount is in the log."""

    def __init__(self, report: Report) -> None:
        self._report: Report | None = report

    def __call__(self, outcome: StartReport) -> None:
        report, self._report = self._report, None
        if report is not None:
            report(outcome)


def main() -> int:
    """`python -m tiercache.daemon`: the configuration comes as JSON on standard input, the report goes to descriptor 3."""
    config = decode(sys.stdin.buffer.read())

    def report(outcome: StartReport) -> None:
        try:
            os.write(REPORT_FD, encode(outcome))
            os.close(REPORT_FD)
        except OSError as error:
            log.warning("nobody_hears_the_report", error=str(error))

    return run(config, report=report)


def _first(group: BaseExceptionGroup[TiercacheError]) -> TiercacheError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TiercacheError)
    return error


async def _serve(config: Config, report: Report) -> None:
    tally = Tally(Metrics())
    await trio.to_thread.run_sync(partial(check_fuse, allow_other=config.mount.allow_other))
    point = await trio.to_thread.run_sync(prepare_mount_point, config.mount.point)
    async with trio.open_nursery() as nursery:
        datasets = await build_datasets(config, tally, nursery)
        try:
            hot = await open_hot(config.hot, point.path, sources_of(config))
            if hot.index.health.rebuilt:
                tally.metrics.index_rebuilt.inc()
            daemon = Daemon(config, point.path, datasets, hot, tally)
            try:
                await daemon.live(report)
            finally:
                hot.stopping()
                await hot.close(clean=not daemon.engine_has_residue())
        finally:
            with trio.CancelScope(shield=True):
                for dataset in datasets:
                    await dataset.cold.aclose()
        nursery.cancel_scope.cancel()


class Daemon:
    """One mount while it lives."""

    def __init__(self, config: Config, point: str, datasets: list[Dataset], hot: HotSet, tally: Tally) -> None:
        self._config = config
        self._point = point
        self._datasets = datasets
        self._hot = hot
        self._tally = tally
        self._engine: Engine | None = None

    def engine_has_residue(self) -> bool:
        return self._engine is not None and self._engine.holdings.has_residue

    async def live(self, report: Report) -> None:
        """From the first task to the last. Raises SetupError when it cannot be mounted."""
        async with trio.open_nursery() as nursery:
            engine = self._engine = self._build(nursery)
            session = self._session(engine)
            socket = self._socket()
            mounted = Mounted(
                mountpoint=self._point,
                socket=socket,
                path=ReadPath("plain", "this version serves every read through the daemon"),
                hot_paths=self._hot.paths,
                notices=self._hot.notices,
                forget_names=session.forget_names,
                unmount=self._unmount,
            )
            answers = Answers(engine, self._tally, mounted, single=self._config.single)
            serve = partial(serve_admin, socket_path=socket, http=self._config.admin.http, group=self._config.admin.group)
            await nursery.start(serve, answers)
            await trio.to_thread.run_sync(session.mount)
            nursery.start_soon(self._hot.index.watch)
            async with trio.open_nursery() as serving:
                nursery.start_soon(self._stop_on_signal, serving.cancel_scope)
                serving.start_soon(session.serve)
                try:
                    await trio.to_thread.run_sync(os.statvfs, self._point)
                    await engine.index.prune()
                    engine.start()
                    await self._pin_configured(engine)
                except BaseException:
                    with trio.CancelScope(shield=True):
                        await self._leave_nothing_mounted()
                    raise
                report(StartReport(ready=answers.status()))
                notify("READY=1")
                log.info("mounted", mountpoint=self._point, hot=self._hot.paths, notices=self._hot.notices)
            notify("STOPPING=1")
            nursery.cancel_scope.cancel()

    def _build(self, nursery: trio.Nursery) -> Engine:
        config = self._config
        limits = Limits(
            chunk_bytes=config.hot.chunk_bytes,
            whole_file_bytes=config.policy.whole_file_bytes,
            read_ahead_bytes=config.policy.read_ahead_bytes,
            negative_ttl_seconds=config.mount.negative_ttl_seconds,
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
        return Session(operations, self._point, source, allow_other=mount.allow_other)

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

    async def _stop_on_signal(self, serving: trio.CancelScope) -> None:
        """A signal ends the mount even if files are open, because a supervisor waits for us: their next read fails then."""
        ending = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup(1) is obeyed
            ending.append(signal.SIGHUP)
        with trio.open_signal_receiver(*ending) as signals:
            async for _ in signals:
                notify("STOPPING=1")
                try:
                    await self._unmount()
                except SetupError as error:
                    log.warning("busy_mount_is_detached", mountpoint=self._point, error=error.line)
                    await trio.to_thread.run_sync(partial(unmount, self._point, lazy=True))
                    serving.cancel()

    async def _unmount(self) -> None:
        """Raises SetupError, with nothing changed, when it is busy."""
        if await trio.to_thread.run_sync(is_mounted, self._point):
            await trio.to_thread.run_sync(unmount, self._point)

    async def _leave_nothing_mounted(self) -> None:
        try:
            if await trio.to_thread.run_sync(is_mounted, self._point):
                await trio.to_thread.run_sync(partial(unmount, self._point, lazy=True))
        except TiercacheError as error:
            log.error("still_mounted", mountpoint=self._point, error=error.line)


if __name__ == "__main__":
    sys.exit(main())
