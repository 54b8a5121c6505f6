"""Warm targets that can be broken as users' targets break, and mended again: directories, small disks, file systems that hang."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.fuse.mount import detach
from tests.fuse.warm import MIB, Targets
from tests.tiers.disks import ext4, fill_up
from tests.tiers.mirrored import Mirrored, mirrored

KINDS = ("deleted", "emptied", "read-only", "noise", "filled", "hung", "failing")
DISK_BYTES = 256 * MIB
_DIRECTORIES, _DISKS, _MIRRORS = (0, 1), (2, 3), (4, 5)


class BreakableTargets(Targets):
    """Six targets, 4+2: two directories, two on disks of their own, two on file systems that may hang."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        super().__init__(place, 4, 2)
        self.broken: dict[int, str] = {}
        self._gone_count = 0
        self._mirrors: dict[int, Mirrored] = {}
        self._disks: dict[int, Path] = {}
        for number in _DISKS:
            self._disks[number] = stack.enter_context(ext4(place / f"disk{number}.img", place / f"disk{number}", DISK_BYTES))
            self._lie_below(number, self._disks[number])
        for number in _MIRRORS:
            self._mirrors[number] = stack.enter_context(mirrored(place / f"mirror{number}"))
            self._lie_below(number, self._mirrors[number].path)
        stack.callback(self.mend_all)

    def _lie_below(self, number: int, mountpoint: Path) -> None:
        self.paths[number].rmdir()
        self.paths[number] = mountpoint / "target"
        self.paths[number].mkdir()

    def suffering(self, kind: str) -> tuple[int, ...]:
        """Those to which this can happen."""
        return {"filled": _DISKS, "hung": _MIRRORS, "failing": _MIRRORS}.get(kind, (*_DIRECTORIES, *_DISKS, *_MIRRORS))

    def break_one(self, number: int, kind: str, rng: random.Random) -> None:
        path = self.paths[number]
        self.broken[number] = kind
        match kind:
            case "deleted":
                self._put_away(number, path)
            case "emptied":
                for name in os.listdir(path):
                    self._put_away(number, path / name)
            case "read-only":
                _run("mount", "--bind", path, path)
                _run("mount", "-o", "remount,ro,bind", path)
            case "noise":
                self._replace_by_noise(path, rng)
            case "filled":
                fill_up(self._disks[number])
            case "hung":
                self._mirrors[number].fail("hang")
            case "failing":
                self._mirrors[number].fail("EIO")

    def mend_all(self) -> None:
        """They come back: as they were, or with an empty directory in their place."""
        for number, kind in self.broken.items():
            match kind:
                case "deleted":
                    self.paths[number].mkdir(exist_ok=True)
                case "read-only":
                    detach(self.paths[number])
                case "filled":
                    (self._disks[number] / "ballast").unlink()
                case "hung" | "failing":
                    self._mirrors[number].work()
        self.broken.clear()

    def age(self, seconds: float) -> None:
        """Everything on them was written so long ago: collection need not wait for it."""
        for number, path in enumerate(self.paths):
            mirror = self._mirrors.get(number)
            directory = path if mirror is None else mirror.source / path.name  # times are not passed on
            for file in [found for kind in ("shards", "manifests", "packs", "drafts") for found in (directory / kind).rglob("*")]:
                with suppress(FileNotFoundError):  # a draft that is finished just now
                    status = file.stat()
                    os.utime(file, (status.st_atime, status.st_mtime - seconds))

    def _put_away(self, number: int, path: Path) -> None:
        """At once, whoever writes into it."""
        self._gone_count += 1
        gone = self.paths[number].with_name(f"gone{self._gone_count}")
        path.rename(gone)
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()

    def _replace_by_noise(self, path: Path, rng: random.Random) -> None:
        """Every file that is there, the marker included, keeps its name and size."""
        for file in [found for found in path.rglob("*") if found.is_file()]:
            with suppress(FileNotFoundError), open(file, "r+b") as opened:
                opened.write(rng.randbytes(os.fstat(opened.fileno()).st_size))


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=30)


@contextmanager
def breakable_targets(place: Path) -> Iterator[BreakableTargets]:
    with ExitStack() as stack:
        yield BreakableTargets(place, stack)
