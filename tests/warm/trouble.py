"""What goes wrong with warm targets and nodes: calls on a target that fail or hang, and nodes that die between two of them.

The calls of `tiercache/tiers/warm/files.py` are wrapped in the test's process. Which node calls is known from the context of the
task, which threads inherit. Hanging calls go on when the target recovers: late, as they would.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from tests.warm.unsynced import Unsynced
from tiercache.tiers.warm import files, target, targets
from tiercache.tiers.warm.files import DraftFile
from tiercache.tiers.warm.target import Deadlines

HASTY = Deadlines(short_seconds=0.2, read_seconds=0.2, write_seconds=0.2, probe_seconds=0.2)
"""Of targets that hang. All others have their usual deadlines, so that a machine that is busy fails no test."""

_READING = ("read", "read_whole", "names", "scan", "usage")
_WRITING = ("begin", "append", "commit")
_ERRNOS = {"failing": errno.EIO, "read-only": errno.EROFS, "full": errno.ENOSPC}


class Life:
    """Of one node: after `left_count` more calls it is dead, and nothing that it does reaches a target."""

    def __init__(self) -> None:
        self.left_count: int | None = None
        self._lock = threading.Lock()

    def dies_after(self, count: int) -> None:
        self.left_count = count

    def spend(self) -> bool:
        """Is it alive?"""
        with self._lock:
            if self.left_count is None:
                return True
            self.left_count -= 1
            return self.left_count >= 0


_life: ContextVar[Life | None] = ContextVar("life", default=None)


@contextmanager
def living(life: Life) -> Iterator[None]:
    """What is done inside is done by this node."""
    token = _life.set(life)
    try:
        yield
    finally:
        _life.reset(token)


class Weather:
    """`kinds`: target -> failing, read-only, full, hanging, or mute: it does what it is asked for, and does not answer."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self._released: dict[str, threading.Event] = {}

    def begin(self, path: str, kind: str) -> None:
        self.end(path)
        self.kinds[path] = kind
        if kind in ("hanging", "mute"):
            self._released[path] = threading.Event()

    def end(self, path: str) -> None:
        self.kinds.pop(path, None)
        if path in self._released:
            self._released.pop(path).set()

    def end_all(self) -> None:
        for path in list(self.kinds):
            self.end(path)

    @property
    def hangs(self) -> bool:
        return bool(self._released)

    def pass_through(self, path: str, *, is_write: bool) -> None:
        """Raises OSError for what the weather does to a call; waits while the target hangs."""
        self._wait(path, "hanging")
        life = _life.get()
        if life is not None and not life.spend():
            raise OSError(errno.EIO, "the process is dead")
        kind = self.kinds.get(path)
        if kind in _ERRNOS and (is_write or kind == "failing"):
            raise OSError(_ERRNOS[kind], f"the target is {kind}")

    def _wait(self, path: str, kind: str) -> None:
        released = self._released.get(path)
        if released is not None and self.kinds.get(path) == kind:
            released.wait()

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "os", Unsynced())
        for name in _READING:
            monkeypatch.setattr(files, name, self._reading(getattr(files, name)))
        monkeypatch.setattr(files, "remove", self._removing(files.remove))
        monkeypatch.setattr(target, "probe", self._reading(target.probe))
        for name in _WRITING:
            monkeypatch.setattr(DraftFile, name, self._writing(getattr(DraftFile, name)))
        monkeypatch.setattr(DraftFile, "discard", self._discarding(DraftFile.discard))
        monkeypatch.setattr(targets, "Deadlines", lambda: HASTY if self.hangs else Deadlines())

    def _reading(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(path: str, *arguments: Any, **named: Any) -> Any:
            self.pass_through(path, is_write=False)
            try:
                return call(path, *arguments, **named)
            finally:
                self._wait(path, "mute")

        return watched

    def _removing(self, call: Callable[..., None]) -> Callable[..., None]:
        def watched(path: str, relative: str) -> None:
            self.pass_through(path, is_write=self.kinds.get(path) != "full")
            call(path, relative)
            self._wait(path, "mute")

        return watched

    def _writing(self, call: Callable[..., None]) -> Callable[..., None]:
        def watched(draft: DraftFile, *arguments: Any) -> None:
            with draft._work():
                self.pass_through(draft._path, is_write=True)
            call(draft, *arguments)
            self._wait(draft._path, "mute")

        return watched

    def _discarding(self, call: Callable[..., None]) -> Callable[..., None]:
        """It leaves the draft behind when it could not remove it."""

        def watched(draft: DraftFile) -> None:
            try:
                self.pass_through(draft._path, is_write=self.kinds.get(draft._path) != "full")
            except OSError:
                draft._file = -1
            call(draft)

        return watched
