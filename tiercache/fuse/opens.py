"""OPENs that need Python, past libfuse and pyfuse3.

pyfuse3 takes one request in each pass of the event loop, after one task has handed its lock to the next. An open of a small cold
file is most of what Python does for it, and readers of many such files open them at the same time. So these requests have a queue
of their own, all of which is taken in one pass; the answers go the way that all answers go (`serving_reply`).
"""

from __future__ import annotations

from functools import partial

import trio

from tiercache.fuse.native import Native, OpenRequest  # before pyfuse3: see there
from tiercache.fuse.operations import Operations

import pyfuse3  # isort: skip

MAX_OPENS = 512  # under way; others wait in the queue


class Opens:
    def __init__(self, native: Native, operations: Operations, nursery: trio.Nursery) -> None:
        self._native = native
        self._operations = operations
        self._nursery = nursery
        self._running_count = 0
        self._fewer = trio.Event()
        self._is_serving = False

    async def serve(self) -> None:
        """Until it is cancelled. Opens that are under way then are not answered: a successor does that."""
        fd = self._native.opens_fd()
        self._is_serving = True
        try:
            while True:
                await trio.lowlevel.wait_readable(fd)
                for request in self._native.take_opens(max(1, MAX_OPENS - self._running_count)):
                    _, inode, flags = request
                    if not self._operations.open_small(inode, flags, partial(self._opened, request)):
                        self._begin(request)
                if self._running_count >= MAX_OPENS:
                    self._fewer = trio.Event()
                    await self._fewer.wait()
        finally:
            self._is_serving = False

    def _begin(self, request: OpenRequest) -> None:
        self._running_count += 1
        self._nursery.start_soon(self._answer, request)

    def _opened(self, request: OpenRequest, handle: int | None) -> None:
        """What an open without a task has come to. None: it needs one."""
        if not self._is_serving:
            return
        if handle is None:
            self._begin(request)
        else:
            self._native.answer_open(request[0], 0, handle)

    async def _answer(self, request: OpenRequest) -> None:
        unique, inode, flags = request
        number = handle = 0
        try:
            handle = await self._operations.open_file(inode, flags)
        except pyfuse3.FUSEError as error:
            number = error.errno
        finally:
            self._running_count -= 1
            self._fewer.set()
        self._native.answer_open(unique, number, handle)
