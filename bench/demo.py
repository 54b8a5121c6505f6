"""`make run`: a real S3 server on loopback, a dataset in it, mounted and read twice. `make stop` ends it.

Everything lies in `.demo/`; starting again stops what an earlier run left and begins from nothing.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.servers.process import free_ports  # noqa: E402
from tests.servers.weed import Weed  # noqa: E402
from tiercache.admin.socket import socket_for  # noqa: E402

HOME = ROOT / ".demo"
POINT, HOT, SERVER, PID = HOME / "mnt", HOME / "hot", HOME / "server", HOME / "server.pid"
BUCKET = "demo"
FILES_COUNT, FILE_BYTES = 500, 100 << 10
BIG_BYTES = 128 << 20
READERS = 16
TIERCACHE = [sys.executable, "-m", "tiercache"]


def main() -> int:
    if sys.argv[1:] == ["stop"]:
        stop()
        print("The demo is stopped.")
        return 0
    stop()
    shutil.rmtree(HOME, ignore_errors=True)
    for directory in (POINT, SERVER):
        directory.mkdir(parents=True)
    weed = Weed(SERVER, free_ports(5, also_above=10_000))
    weed.start()
    PID.write_text(str(weed.outlive()))
    total_bytes = FILES_COUNT * FILE_BYTES + BIG_BYTES
    print(f"1. SeaweedFS, an S3 server, runs on {weed.endpoint_url}; putting {total_bytes / 1e6:.0f} MB into s3://{BUCKET}")
    upload(weed)
    environment = {**os.environ, **weed.environment}
    mount = [*TIERCACHE, "mount", f"s3://{BUCKET}", str(POINT), "--endpoint-url", weed.endpoint_url, "--region", "us-east-1"]
    mount += ["--hot", str(HOT), "--hot-size", "1GB"]
    print(f"2. $ tiercache {' '.join(mount[3:])}\n")
    if subprocess.run(mount, env=environment, cwd=ROOT, check=False).returncode:
        stop()
        return 1
    print("\n3. Reading everything twice, as a training job does\n")
    print(f"   {'':22}{'first pass':>14}{'second pass':>14}")
    passes = [read_all() for _ in range(2)]
    for row in passes[0]:
        print(f"   {row:22}" + "".join(f"{each[row]:>14}" for each in passes))
    print("\n4. $ tiercache status\n")
    subprocess.run([*TIERCACHE, "status", "--socket", socket()], cwd=ROOT, check=True)
    print(f"\nIt stays mounted on {POINT.relative_to(Path.cwd()) if POINT.is_relative_to(Path.cwd()) else POINT}; look around.")
    print("`make stop` unmounts it and stops the server.")
    return 0


def upload(weed: Weed) -> None:
    weed.make_bucket(BUCKET)
    rng = random.Random(1)
    bodies = {f"images/{number:05d}.jpg": rng.randbytes(FILE_BYTES) for number in range(FILES_COUNT)}
    bodies["tokens.bin"] = rng.randbytes(BIG_BYTES)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda item: weed.put(BUCKET, *item), bodies.items()))
    weed.close_client()


def read_all() -> dict[str, str]:
    """What each part of a pass took, as the table shows it."""
    before = requests()
    began = time.perf_counter()
    names = sorted(os.listdir(POINT / "images"))
    with ThreadPoolExecutor(READERS) as threads:
        list(threads.map(lambda name: (POINT / "images" / name).read_bytes(), names))
    small = time.perf_counter() - began
    began = time.perf_counter()
    with (POINT / "tokens.bin").open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
    big = time.perf_counter() - began
    return {
        f"{FILES_COUNT} files of 100 KiB": f"{FILES_COUNT / small:.0f}/s",
        f"one file of {BIG_BYTES >> 20} MiB": f"{BIG_BYTES / big / 1e6:.0f} MB/s",
        "GET requests": str(requests() - before),
    }


def requests() -> int:
    """GETs that the daemon has sent so far, from its own metrics."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=socket())) as client:
        text = client.get("http://daemon/metrics").text
    wanted = 'tiercache_requests_total{operation="read",tier="cold"}'
    return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith(wanted))


def socket() -> str:
    """The socket of the daemon that serves the demo's mount point."""
    return str(socket_for(str(POINT)))


def stop() -> None:
    if HOME.exists():
        subprocess.run([*TIERCACHE, "umount", str(POINT)], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    if PID.exists():
        pid = int(PID.read_text())
        if b"weed" in command_of(pid):
            os.kill(pid, signal.SIGKILL)
        PID.unlink()


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


if __name__ == "__main__":
    sys.exit(main())
