"""A program that starts nodes which kill themselves: each works on warm targets and dies at a chosen file operation on one.

Orders come as lines of JSON on stdin; what became of each goes to stdout: the signal that ended the process, or the number of
operations when it came to its end. Everything is imported once and each node is a fork, because 300 starts of Python take longer
than what is tested. Whoever dies by SIGKILL leaves to the kernel what was written, so nothing is really synced.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from tests.warm.contents import store_of
from tests.warm.nodes import node_on
from tiercache.tiers.warm import files, marking

ROOM_BYTES = 1 << 19


class Order(msgspec.Struct):
    """`work`: demotion, packing (some), repair, room; `again` writes what is there already a second time.

    The process dies at operation `at` (0: never): `when` it is before, half or after.
    """

    work: str
    home: str
    targets: list[str]
    at: int
    when: str


class DeadlyOs:
    """The module `os`, whose changing calls are counted once it is armed. Half of a write is what a kill in the middle leaves."""

    def __init__(self, at: int, when: str) -> None:
        self.count = 0
        self.is_armed = False
        self._at = at
        self._when = when
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if not flags & os.O_CREAT:
            return os.open(path, flags, *arguments, **named)
        return self._counted(os.open, path, flags, *arguments, **named)

    def fsync(self, file: int) -> None:
        self._counted(lambda: None)

    def rename(self, *arguments: Any, **named: Any) -> None:
        self._counted(os.rename, *arguments, **named)

    def mkdir(self, *arguments: Any, **named: Any) -> None:
        self._counted(os.mkdir, *arguments, **named)

    def unlink(self, *arguments: Any, **named: Any) -> None:
        self._counted(os.unlink, *arguments, **named)

    def writev(self, file: int, buffers: Sequence[memoryview]) -> int:
        def half() -> int:
            return os.write(file, b"".join(buffers)[: sum(map(len, buffers)) // 2])

        return self._counted(os.writev, file, buffers, half=half)

    def _counted(self, call: Any, *arguments: Any, half: Any = None, **named: Any) -> Any:
        with self._lock:
            self.count += self.is_armed
            is_last = self.is_armed and self.count == self._at
        if not is_last:
            return call(*arguments, **named)
        if self._when == "half" and half is not None:
            half()
        elif self._when == "after":
            call(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is dead")


async def work(order: Order, deadly: DeadlyOs) -> None:
    store = store_of(order.work)
    home = Path(order.home)
    async with node_on(home, [Path(target) for target in order.targets], store) as node:
        if order.work == "repair":
            deadly.is_armed = True
            await node.scrub(repair=True)
        elif order.work == "room":
            deadly.is_armed = True
            await node.warm.room.make_room(ROOM_BYTES)
        else:
            for key in store.keys:
                await node.mount.cat(key)
            await node.mount.settled()
            deadly.is_armed = True
            await (node.write_again() if order.work == "again" else node.demote())
        deadly.is_armed = False


def obey(order: Order, answer: int) -> None:
    """In a process of its own."""
    deadly = DeadlyOs(order.at, order.when)
    files.os = marking.os = deadly  # type: ignore[assignment, attr-defined]
    trio.run(work, order, deadly)
    os.write(answer, b"%d" % deadly.count)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # for what is logged
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                obey(order, writing)
            except BaseException:  # noqa: BLE001 - a fork must not go on in the loop of its parent
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        os.close(writing)
        counted = os.read(reading, 100)
        os.close(reading)
        _, status = os.waitpid(child, 0)
        outcome = {"status": os.waitstatus_to_exitcode(status), "count": int(counted or b"0")}
        os.write(answers, msgspec.json.encode(outcome) + b"\n")


if __name__ == "__main__":
    main()
