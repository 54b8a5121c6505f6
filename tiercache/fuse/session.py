"""The mount itself: options, the main loop, and what is told to the kernel unasked.

`max_tasks` bounds the requests that are served at once. It is far above the kernel's own limit for read-ahead
(12 by default), so readers that wait for a cold tier cannot keep a `stat` of something hot from being answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pyfuse3
import trio

from tiercache.core.record import Inode
from tiercache.errors import SetupError
from tiercache.fuse.operations import Operations

MIN_TASKS = 64
MAX_TASKS = 512


class Session:
    """One mounted filesystem. At most one a process: pyfuse3 keeps its session in the module."""

    def __init__(self, operations: Operations, mountpoint: str, source: str, *, allow_other: bool) -> None:
        self._operations = operations
        self._mountpoint = mountpoint
        self._options = {f"fsname={_escaped(source)}", "subtype=tiercache", "ro", "default_permissions"}
        if allow_other:
            self._options.add("allow_other")

    def mount(self) -> None:
        """Blocks. Raises SetupError; nothing is left mounted then."""
        try:
            pyfuse3.init(self._operations, self._mountpoint, self._options)
        except RuntimeError as error:
            raise SetupError(
                f"cannot mount on {self._mountpoint}: {error}", hint="the lines above from fusermount3 or libfuse say why"
            ) from error

    async def serve(self) -> None:
        """Answer requests until the filesystem is unmounted. When cancelled, let go of the kernel: open files fail from then on.

        Whether the mount point goes as well is not decided here.
        """
        try:
            await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=MAX_TASKS)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(partial(pyfuse3.close, unmount=False))

    def forget_names(self, names: Iterable[tuple[Inode, bytes]]) -> None:
        """Let the kernel look these names up again. Returns at once: a thread of pyfuse3's tells the kernel."""
        for parent, name in names:
            pyfuse3.invalidate_entry_async(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name), ignore_enoent=True)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(",", "\\,")
