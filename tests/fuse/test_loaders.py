"""What data loaders do: shared descriptors, several streams on one handle, memory maps in parallel, many small files."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Mounting
from tests.servers.proxy import Proxy

MIB = 1 << 20
SECONDS = 120

READ_SHARED = """
    import os, sys
    path, workers_count, piece = sys.argv[1], int(sys.argv[2]), 131072
    descriptor = os.open(path, os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    share = size // workers_count
    children = []
    for worker in range(workers_count):
        pid = os.fork()
        if pid == 0:
            found = True
            with open(sys.argv[3], "rb") as truth:
                for offset in range(worker * share, (worker + 1) * share, piece):
                    length = min(piece, (worker + 1) * share - offset)
                    truth.seek(offset)
                    found = found and os.pread(descriptor, length, offset) == truth.read(length)
            os._exit(0 if found else 1)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""

INTERLEAVE = """
    import os, sys
    path, streams_count, piece = sys.argv[1], int(sys.argv[2]), 65536
    with open(sys.argv[3], "rb") as truth:
        expected = truth.read()
    descriptor = os.open(path, os.O_RDONLY)
    share = len(expected) // streams_count
    for step in range(0, share, piece):
        for stream in range(streams_count):
            offset = stream * share + step
            length = min(piece, share - step)
            if os.pread(descriptor, length, offset) != expected[offset : offset + length]:
                sys.exit(1)
"""

MAP = """
    import hashlib, mmap, sys
    for path in sys.argv[1:]:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            print(hashlib.sha256(mapped).hexdigest())
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, out


def a_file(bucket: Bucket, directory: Path, size_bytes: int) -> Path:
    truth = directory / "truth"
    truth.write_bytes(random.Random(18).randbytes(size_bytes))
    bucket.put("file", truth.read_bytes())
    return truth


def test_case_18_processes_share_one_descriptor_after_fork(
    bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path
) -> None:
    size_bytes = 48 * MIB
    truth = a_file(bucket, tmp_path, size_bytes)
    mount = mounting(bucket, via=proxy)
    with proxy.recording() as seen:
        assert end(start(READ_SHARED, mount.root / "file", 4, truth))[0] == 0
    assert size_bytes <= seen.object_bytes <= size_bytes * 1.05


def test_case_18_interleaved_streams_do_not_look_random(bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path) -> None:
    """A file too large to be taken whole: only streams that are recognised as such are filled in chunks and read ahead."""
    size_bytes = 96 * MIB
    truth = a_file(bucket, tmp_path, size_bytes)
    mount = mounting(bucket, via=proxy, settings={"policy": {"whole_file": "8MiB"}})
    with proxy.recording() as seen:
        assert end(start(INTERLEAVE, mount.root / "file", 4, truth))[0] == 0
    assert seen.object_bytes <= size_bytes * 1.1
    chunks_count = size_bytes // (8 * MIB)
    assert len(seen.gets) <= 4 * chunks_count, "a stream was served by one request a read"


def test_case_19_memory_maps_read_in_parallel_do_not_deadlock(bucket: Bucket, mounting: Mounting) -> None:
    bodies = {f"shard-{number}": random.Random(number).randbytes(10 * MIB) for number in range(6)}
    for key, body in bodies.items():
        bucket.put(key, body)
    digests = [hashlib.sha256(body).hexdigest() for body in bodies.values()]
    mount = mounting(bucket)
    paths = [mount.root / key for key in bodies]
    readers = [start(MAP, *paths[turn:], *paths[:turn]) for turn in range(6)]
    for turn, reader in enumerate(readers):
        code, out = end(reader)
        assert (code, out.split()) == (0, digests[turn:] + digests[:turn])
    assert (mount.root / "shard-0").stat().st_size == 10 * MIB


def test_many_small_files_by_many_processes(bucket: Bucket, proxy: Proxy, mounting: Mounting, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(200):
        (source / f"{number:04d}.bin").write_bytes(random.Random(number).randbytes(20_000))
    bucket.upload(source)
    mount = mounting(bucket, via=proxy)
    names = sorted(os.listdir(source))
    script = """
        import sys
        for name in sys.argv[3:]:
            with open(f"{sys.argv[1]}/{name}", "rb") as mounted, open(f"{sys.argv[2]}/{name}", "rb") as truth:
                if mounted.read() != truth.read():
                    sys.exit(name)
    """
    with proxy.recording() as seen:
        readers = [start(script, mount.root, source, *names[turn:], *names[:turn]) for turn in (0, 0, 50, 100, 150, 199)]
        assert [end(reader)[0] for reader in readers] == [0] * len(readers)
    assert len(seen.gets) == len(names)
    assert len(seen.lists) <= 20, "after some lookups the directory is listed, and no name is asked for again"
