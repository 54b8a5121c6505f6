"""The machine that the figures belong to, and the page cache, which decides what a second read costs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import tiercache
from bench.usage import sampler
from tests.servers.weed import weed_binary

PACKAGES = ("pyfuse3", "trio", "lmdb", "boto3", "urllib3")


def facts(directory: Path) -> dict[str, str]:
    """What a reader of the figures has to know; `directory` is where all data of the run lies."""
    memory = f"{_memory_bytes() / 2**30:.1f} GiB memory"
    return {
        "machine": f"{os.cpu_count()} cores ({_processor()}), {memory}, Linux {platform.release()}",
        "disk": _disk(directory),
        "software": ", ".join(
            [
                f"tiercache {tiercache.__version__}",
                f"Python {platform.python_version()}",
                *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
                _weed_version(),
            ]
        ),
        "load": f"{os.getloadavg()[0]:.2f} (one minute, before the run)",
        "py-spy": sampler() or "not on the PATH: the part of CPU that holds the GIL is estimated from the threads' times only",
        "page cache": "dropped by /proc/sys/vm/drop_caches"
        if may_drop_caches()
        else "dropped file by file (posix_fadvise); as root it is /proc/sys/vm/drop_caches, which drops names and inodes too",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _disk(directory: Path) -> str:
    """Filesystem and device below `directory`."""
    number = directory.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    kind = source = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == device:
            kind, source = right.split()[:2]
    model = Path(f"/sys/dev/block/{device}/device/model")
    name = f"{source} ({model.read_text().strip()})" if model.exists() else source
    return f"{kind} on {name}, {free_bytes(directory) / 1e9:.0f} GB free, data in {directory}"


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def total_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize


def _weed_version() -> str:
    said = subprocess.run([weed_binary(), "version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", said)
    return f"SeaweedFS {found[0]}" if found else "SeaweedFS of unknown version"


def may_drop_caches() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def drop_caches() -> None:
    """Pages, names and inodes of the whole machine, after writing back what is dirty."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
