"""OPENs and READs that need Python, past libfuse and pyfuse3.

pyfuse3 takes one request in each pass of the event loop, after one task has handed its lock to the next, and copies the bytes of
a read on the loop. An open of a small cold file is most of what Python does for it, and readers of many such files open them at
the same time; reads of a large cold file would have the loop do little but copy. So these requests have queues of their own, and
all that is in one is taken in one pass. Bytes that lie in a hot file are not read here: threads of the extension are told where
(`placed.c`). The answers go the way that all answers go (`serving_reply`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import trio

from tiercache.core.record import Inode
from tiercache.fuse.native import Native, OpenRequest, ReadRequest  # before pyfuse3: see there
from tiercache.fuse.operations import Operations
from tiercache.tiers.hot import Placed

import pyfuse3  # isort: skip

R = TypeVar("R")

MAX_OPENS = 512  # under way; others wait in their queue
MAX_READS = 512


class Bypass:
    """Serves until it is cancelled. What is under way then is not answered: a successor does that."""

    def __init__(self, native: Native, operations: Operations, nursery: trio.Nursery) -> None:
        self._native = native
        self._operations = operations
        self._nursery = nursery
        self._serves_opens = False

    async def serve_opens(self) -> None:
        self._serves_opens = True
        try:
            await self._serve(self._native.opens_fd(), self._native.take_opens, self._open, MAX_OPENS, self._open_small)
        finally:
            self._serves_opens = False

    async def serve_reads(self) -> None:
        await self._serve(self._native.reads_fd(), self._native.take_reads, self._read, MAX_READS)

    async def _serve(
        self,
        fd: int,
        take: Callable[[int], list[R]],
        answer: Callable[[R], Coroutine[Any, Any, None]],
        most: int,
        begin: Callable[[R, Callable[[R], None]], bool] | None = None,
    ) -> None:
        """At most about `most` tasks; `begin` is asked first whether none is needed, and may start one later."""
        running_count = 0
        fewer = trio.Event()

        async def answer_counted(request: R) -> None:
            nonlocal running_count
            try:
                await answer(request)
            finally:
                running_count -= 1
                fewer.set()

        def start(request: R) -> None:
            nonlocal running_count
            running_count += 1
            self._nursery.start_soon(answer_counted, request)

        while True:
            await trio.lowlevel.wait_readable(fd)
            for request in take(max(1, most - running_count)):
                if begin is None or not begin(request, start):
                    start(request)
            if running_count >= most:
                fewer = trio.Event()
                await fewer.wait()

    def _open_small(self, request: OpenRequest, start: Callable[[OpenRequest], None]) -> bool:
        unique, inode, flags = request

        def opened(number: int, handle: int | None) -> None:
            if not self._serves_opens:
                return
            if number or handle is not None:
                self._native.answer_open(unique, number, handle or 0)
            else:
                start(request)

        return self._operations.open_small(inode, flags, opened)

    async def _open(self, request: OpenRequest) -> None:
        unique, inode, flags = request
        number = handle = 0
        try:
            handle = await self._operations.open_file(inode, flags)
        except pyfuse3.FUSEError as error:
            number = error.errno
        self._native.answer_open(unique, number, handle)

    async def _read(self, request: ReadRequest) -> None:
        unique, inode, offset, size = request
        try:
            found = await self._operations.find(inode, offset, size)
        except pyfuse3.FUSEError as error:
            self._native.answer_read(unique, error.errno, b"")
            return
        if isinstance(found, Placed):
            self._native.answer_read_from(unique, Inode(inode), found)
        else:
            self._native.answer_read(unique, 0, found)
