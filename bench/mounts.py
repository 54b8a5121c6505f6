"""Mounts as the benchmark needs them: by a path of reading, for a user, and with what they cached kept until the run ends.

Why kept: ext4 without a journal does not give an inode away again for a minute or more after it was deleted (`recently_deleted`
in its `ialloc.c`) and skips such inodes one by one. 2,000 creates right after 2,000 deletions took 0.4 to 0.9 ms each where they
take 0.01 to 0.02 ms otherwise. A benchmark that deletes the cache of one take before the next one thus charges the daemon for its
own clean-up. So files are only emptied, which gives their blocks back, and deleted when all is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.crowd import ROOT
from tests.fuse.mount import Mount, Ran, run
from tiercache.cli.options import MountFlags

FUSE_DEVICE = Path("/dev/fuse")
NOBODY = 65534


@dataclass(frozen=True)
class Way:
    """How the daemon answers reads (`-o read_path=`; None: as it is by itself) and as whom daemon and readers run."""

    read_path: str | None = None
    user_id: int | None = None

    @property
    def options(self) -> list[str]:
        return [] if self.read_path is None else ["-o", f"read_path={self.read_path}"]


def may_choose_path() -> str:
    """Why `read_path` cannot be chosen; '' when it can."""
    return "" if "read_path" in MountFlags.__struct_fields__ else "this daemon has no mount option read_path"


def may_mount_as_user() -> str:
    """Why the benchmark cannot have another user mount; '' when it can."""
    if os.geteuid() != 0:
        return "only root can run readers as another user (for an ordinary user the first table is that of one)"
    if FUSE_DEVICE.stat().st_mode & 0o006 != 0o006:
        return f"{FUSE_DEVICE} is not open to users: chmod 666 {FUSE_DEVICE}"
    try:
        subprocess.run(
            [sys.executable, "-c", "import bench.mounts"], cwd=ROOT, check=True, user=NOBODY, group=NOBODY, extra_groups=[]
        )
    except (OSError, subprocess.CalledProcessError):
        return f"other users may not run {sys.executable} on {ROOT}: use an interpreter and a place that they may read"
    return ""


class KeptMount(Mount):
    """One whose hot directory outlives it, emptied, and that may belong to another user."""

    def __init__(
        self, source: str, home: Path, *, way: Way, hot: Path, hot_size: str, options: Sequence[str], extra: Mapping[str, str]
    ) -> None:
        super().__init__(source, home, options=[*options, *way.options], extra=extra, hot=hot, hot_size=hot_size)
        self._user_id = way.user_id
        if self._user_id is not None:
            for path in (home.parent, home, self.point, hot):
                os.chown(path, self._user_id, self._user_id)

    def tiercache(self, *arguments: str | os.PathLike[str]) -> Ran:
        command = [sys.executable, "-m", "tiercache", *arguments]
        if self._user_id is None:
            return run(command, self.env)
        return run(command, self.env, user=self._user_id, group=self._user_id, extra_groups=[])

    def discard_hot(self) -> None:
        empty(self.hot)


def empty(directory: Path) -> None:
    """Give back the blocks of all files below it, and keep the files."""
    for place, _, names in os.walk(directory):
        for path in (os.path.join(place, name) for name in names):
            if os.path.isfile(path):
                os.truncate(path, 0)
