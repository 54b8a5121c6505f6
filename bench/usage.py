"""What the daemon used: CPU by /proc, memory, and (with py-spy on the PATH) the time that it held the GIL.

The process's CPU clock and the event loop thread's `schedstat` count nanoseconds; `stat` divides user from system time, by
samples of 10 ms. The kernel does not know the GIL, but a bound can be had. The loop's thread runs Python nearly all
the time that it runs. The other threads receive, write and hash without the GIL, which is mostly system time; their user
time is Python and copies of small buffers. So (all of the loop's thread + the user time of the others) is an
upper estimate of the CPU spent with the GIL held.

Where `py-spy` is installed the part is sampled instead: one more take, which counts for nothing else, because
sampling disturbs.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED; with ~pid above it the clock that clock_getcpuclockid(3) finds for another process
_QUIET_SECONDS, _QUIET_LIMIT_SECONDS = 0.1, 10.0
_QUIET_USAGE_SECONDS = 0.005
_SAMPLES_PER_SECOND = 200
_ATTACH_SECONDS, _REPORT_SECONDS = 20.0, 60.0


@dataclass(frozen=True)
class Usage:
    """CPU seconds of the process and of its event loop's thread; of its other threads in ticks, in user mode and in all."""

    total_seconds: float
    loop_seconds: float
    others_user_ticks: int
    others_ticks: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, before: Usage) -> Usage:
        return Usage(*(ours - theirs for ours, theirs in zip(astuple(self), astuple(before), strict=True)))

    @property
    def held_seconds(self) -> float:
        """The upper estimate of the CPU spent with the GIL held."""
        user_ratio = self.others_user_ticks / self.others_ticks if self.others_ticks > 0 else 0.0
        return self.loop_seconds + (self.total_seconds - self.loop_seconds) * user_ratio


def cpu_seconds_of(pid: int) -> float:
    """Of all threads of another process, ended ones too. Raises OSError when it has ended."""
    return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)


def pid_of_child(name: str) -> int:
    """The child of this process that runs the program `name`."""
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().strip() == name:
            return int(child)
    raise RuntimeError(f"no child process runs {name}")


def usage_of(pid: int) -> Usage:
    """Threads that have ended are in it. Raises OSError when the process has ended."""
    total_seconds = cpu_seconds_of(pid)
    loop_ns = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
    user, system = _ticks(Path(f"/proc/{pid}/stat"))
    loop_user, loop_system = _ticks(Path(f"/proc/{pid}/task/{pid}/stat"))
    others_user = max(0, user - loop_user)
    return Usage(total_seconds, loop_ns / 1e9, others_user, others_user + max(0, system - loop_system))


def settled_usage_of(pid: int) -> Usage:
    """When nothing has been used for a moment: work that goes on after the last reader belongs to the figure."""
    deadline = time.monotonic() + _QUIET_LIMIT_SECONDS
    usage = usage_of(pid)
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS)
        before, usage = usage, usage_of(pid)
        if usage.total_seconds - before.total_seconds <= _QUIET_USAGE_SECONDS:
            break
    return usage


def _ticks(stat: Path) -> tuple[int, int]:
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[11]), int(fields[12])


def peak_resident_bytes(pid: int) -> int:
    """Raises OSError when the process has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


@dataclass
class GilSampling:
    """`held_seconds` is None until the sampling has ended, and for ever when py-spy could not do it (`complaint`)."""

    held_seconds: float | None = None
    complaint: str = ""


def sampler() -> str | None:
    return shutil.which("py-spy")


@contextlib.contextmanager
def sampling_gil(pid: int, directory: Path) -> Iterator[GilSampling]:
    """Sample with py-spy who holds the GIL while the block runs. `directory` takes a small file."""
    program = sampler()
    assert program is not None, "ask `sampler` first"
    report = directory / f"gil-{pid}"
    settings = ["--gil", "--nonblocking", "--rate", str(_SAMPLES_PER_SECOND), "--duration", "unlimited"]
    process = subprocess.Popen(
        [program, "record", "--pid", str(pid), *settings, "--format", "raw", "--output", str(report)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    outcome = GilSampling()
    try:
        said = _until_said(process, b"Sampling process")
        yield outcome
        process.send_signal(signal.SIGINT)
        more, _ = process.communicate(timeout=_REPORT_SECONDS)
        if process.returncode == 0 and report.exists():
            counts = [int(line.rpartition(" ")[2]) for line in report.read_text(errors="replace").splitlines() if line]
            outcome.held_seconds = sum(counts) / _SAMPLES_PER_SECOND
        else:
            last = (said + more).decode(errors="replace").strip().splitlines()[-1:]
            outcome.complaint = f"py-spy failed: {' '.join(last)}"
    finally:
        process.kill()
        process.communicate()
        report.unlink(missing_ok=True)


def _until_said(process: subprocess.Popen[bytes], wanted: bytes) -> bytes:
    """What it said up to `wanted`, its end or the deadline."""
    assert process.stdout is not None
    said, deadline = b"", time.monotonic() + _ATTACH_SECONDS
    while wanted not in said and select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            break
        said += piece
    return said
