"""Start readers, let them begin together, and collect what they did. Nobody is left behind, whatever goes wrong.

Only readers touch the mount: a daemon that hangs holds up a process that can be killed, and not the benchmark.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.reader import GO, READY, Answer, Job
from bench.reads import Outcome

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 60.0
LIMIT_SECONDS = 600.0
END_SECONDS = 20.0


class Broken(Exception):
    """Something is wrong, rather than slow: a reader failed, bytes differ, the daemon died."""


@dataclass(frozen=True)
class Crowd:
    """`seconds` go from the first begin to the last end; `cpu_seconds` are those of all readers."""

    seconds: float
    cpu_seconds: float
    outcomes: list[Outcome]

    @property
    def count(self) -> int:
        return sum(outcome.count for outcome in self.outcomes)


@dataclass
class _Reader:
    process: subprocess.Popen[bytes]
    complaints: Path
    received: bytes = b""

    def say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `line` tells why it has ended
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def line(self, deadline: float) -> bytes:
        """The next line of its answers. Raises Broken when it ends instead, or says nothing in time."""
        assert self.process.stdout is not None
        while b"\n" not in self.received:
            left_seconds = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left_seconds)[0]:
                raise Broken("a reader did not come back in time")
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                said = self.complaints.read_text(errors="replace").strip().splitlines()
                raise Broken(f"a reader failed: {said[-1] if said else 'it said nothing'}")
            self.received += piece
        line, _, self.received = self.received.partition(b"\n")
        return line + b"\n"

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the mount dies with the daemon
            self.process.wait(END_SECONDS)


def run(
    jobs: Sequence[Job],
    before: Callable[[], None] = lambda: None,
    limit_seconds: float = LIMIT_SECONDS,
    user_id: int | None = None,
) -> Crowd:
    """Do the jobs at the same time, each in its own process; `before` is called when all are ready. Raises Broken."""
    with _ready(jobs, user_id) as readers:
        before()
        for reader in readers:
            reader.say(GO)
        deadline = time.monotonic() + limit_seconds
        answers = [msgspec.json.decode(reader.line(deadline), type=Answer) for reader in readers]
    seconds = max(answer.ended_seconds for answer in answers) - min(answer.began_seconds for answer in answers)
    return Crowd(seconds, sum(answer.cpu_seconds for answer in answers), [answer.outcome for answer in answers])


@contextlib.contextmanager
def running(jobs: Sequence[Job], user_id: int | None = None) -> Iterator[Callable[[], bool]]:
    """Jobs that go on for ever do so meanwhile; yields whether they still do. Raises Broken at the end when one has failed."""
    with _ready(jobs, user_id) as readers:
        for reader in readers:
            reader.say(GO)
        yield lambda: all(reader.process.poll() is None for reader in readers)
        for reader in readers:
            if reader.process.poll() is not None:
                reader.line(time.monotonic())  # tells why


@contextlib.contextmanager
def _ready(jobs: Sequence[Job], user_id: int | None) -> Iterator[list[_Reader]]:
    """Readers that wait for GO; at the end they are killed."""
    readers: list[_Reader] = []
    with tempfile.TemporaryDirectory(prefix="readers-") as directory:
        try:
            for number, job in enumerate(jobs):
                readers.append(_start(Path(directory) / str(number), user_id))
                readers[-1].say(msgspec.json.encode(job) + b"\n")
            for reader in readers:
                if reader.line(time.monotonic() + READY_SECONDS) != READY:
                    raise Broken("a reader was not ready")
            yield readers
        finally:
            for reader in readers:
                reader.end()


def _start(complaints: Path, user_id: int | None) -> _Reader:
    """`user_id` needs root; None: as whom this process runs."""
    with complaints.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT,
            user=user_id, group=user_id, extra_groups=None if user_id is None else [],
        )  # fmt: skip
    return _Reader(process, complaints)
