"""The mount itself: options, the main loop, and what is told to the kernel unasked.

`max_tasks` bounds the requests that are served at once. It is far above the kernel's own limit for read-ahead, so readers that
wait for a cold tier cannot keep a `stat` of something hot from being answered.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable

import structlog
import trio

from tiercache.core.record import Inode
from tiercache.errors import SetupError
from tiercache.fuse.bypass import Bypass
from tiercache.fuse.native import Connection, Native, Path  # before pyfuse3: see there
from tiercache.fuse.operations import Operations
from tiercache.mountinfo import visible_at

import pyfuse3  # isort: skip

MIN_TASKS = 64
MAX_TASKS = 512
READ_AHEAD_KIB = 1024  # the longest READ that libfuse agrees to

log = structlog.get_logger()

__all__ = ["Connection", "Session"]


class Session:
    """One mounted filesystem. At most one a process: pyfuse3 keeps its session in the module.

    `native` is None where every request goes through Python, which `why_not_native` explains.
    """

    def __init__(
        self,
        operations: Operations,
        mountpoint: str,
        source: str,
        *,
        allow_other: bool,
        native: Native | None = None,
        why_not_native: str = "",
    ) -> None:
        self._operations = operations
        self._mountpoint = mountpoint
        self._native = native
        self._why_not_native = why_not_native
        self._options = {f"fsname={_escaped(source)}", "subtype=tiercache", "ro", "default_permissions"}
        if allow_other:
            self._options.add("allow_other")

    def mount(self) -> None:
        """Blocks. Raises SetupError; nothing is left mounted then."""
        if self._native is not None:
            self._native.prepare(None)
        try:
            pyfuse3.init(self._operations, self._mountpoint, self._options)
        except RuntimeError as error:
            raise SetupError(
                f"cannot mount on {self._mountpoint}: {error}", hint="the lines above from fusermount3 or libfuse say why"
            ) from error
        if self._native is not None:
            self._native.mounted()

    def take_over(self, connection: Connection) -> None:
        """Go on with the connection of a process that ended. Blocks. Raises SetupError when this program cannot."""
        if self._native is None:
            raise SetupError(f"the mount cannot be taken over: {self._why_not_native}", hint="unmount it and mount anew")
        self._native.prepare(connection)
        try:
            pyfuse3.init(self._operations, f"/dev/fd/{connection.fuse_fd}", self._options)
        except RuntimeError as error:
            raise SetupError(
                f"the mount on {self._mountpoint} cannot be taken over: this daemon and the kernel would not agree",
                hint="unmount it and mount anew",
            ) from error
        self._native.mounted()

    @property
    def connection(self) -> Connection | None:
        """Of a mounted session. None where the native side does not serve: nothing can be handed over then."""
        return None if self._native is None else self._native.connection

    def choose_path(self) -> Path:
        """How hot files are read from now on. Blocks a little; to be called when the first request has been answered."""
        _read_farther_ahead(self._mountpoint)
        return Path("plain", self._why_not_native, False) if self._native is None else self._native.choose_path()

    async def serve(self) -> None:
        """Answer requests until the filesystem is unmounted. When cancelled, let go of the kernel: what is not answered is left
        to whoever holds the connection, else open files fail from then on.

        Whether the mount point goes as well is not decided here.
        """
        try:
            async with trio.open_nursery() as nursery:
                if self._native is not None and self._native.is_mounted:
                    bypass = Bypass(self._native, self._operations, nursery)
                    nursery.start_soon(bypass.serve_opens)
                    nursery.start_soon(bypass.serve_reads)
                await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=MAX_TASKS)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        if self._native is not None:
            self._native.stop()
        pyfuse3.close(unmount=False)
        if self._native is not None:
            self._native.close()

    def forget_names(self, names: Iterable[tuple[Inode, bytes]]) -> None:
        """Let the kernel look these names up again. Returns at once: a thread of pyfuse3's tells the kernel."""
        for parent, name in names:
            if self._native is not None:
                self._native.forget_name(parent, name)
            pyfuse3.invalidate_entry_async(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name), ignore_enoent=True)


def _read_farther_ahead(mountpoint: str) -> None:
    """Have the kernel ask for up to a MiB at once where a file is read in order, and not for 128 KiB: a file that was opened cold
    is read through this process (measured: 15 % more MB/s, an eighth of the requests). Only root may, and not in every container.
    """
    mount = visible_at(mountpoint)
    if mount is None or os.geteuid() != 0:
        return
    try:
        setting = pathlib.Path("/sys/class/bdi", mount.device, "read_ahead_kb")
        if int(setting.read_text()) < READ_AHEAD_KIB:
            setting.write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        log.info("kernel_read_ahead_not_raised", error=error.strerror)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(",", "\\,")
