"""Processes of a mount that a command watches or ends: each stands for itself, whoever gets its number later."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tiercache.errors import AccessDenied


class Process:
    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Waits that long for it."""
        return bool(select.select([self._descriptor], [], [], max(0.0, seconds))[0])

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """To the process, or with all that it started, if it leads a group as a keeper does. Raises AccessDenied."""
        try:
            if group and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise AccessDenied(f"process {self.pid} belongs to another user", hint="run this as root") from error


@contextmanager
def process_of(pid: int | None) -> Iterator[Process | None]:
    """None for a process that has gone, or that is not visible from here."""
    descriptor = None
    if pid is not None:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
    if pid is None or descriptor is None:
        yield None
        return
    try:
        yield Process(pid, descriptor)
    finally:
        os.close(descriptor)


def have_ended(processes: Sequence[Process], seconds: float) -> bool:
    """Waits that long for all of them."""
    deadline = time.monotonic() + seconds
    return all(process.has_ended(deadline - time.monotonic()) for process in processes)
