"""Processes that read a mount of stamped files, each in its way, until they are told to stop."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuse import stamped
from tests.servers.process import wait_until

_END_SECONDS = 60.0


@dataclass
class Crowd:
    """`errors` and `waits` (begin and length of all that took long, in monotonic seconds) are known when it has ended."""

    states: list[Path]
    processes: list[subprocess.Popen[bytes]]
    errors: list[str] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    rounds_count: int = 0
    stale_count: int = 0

    def rounds(self) -> list[int]:
        def of(state: Path) -> int:
            data = state.read_bytes() if state.exists() else b""
            return struct.unpack("<Q", data)[0] if data else 0

        return [of(state) for state in self.states]

    def await_progress(self) -> None:
        """Everyone begins and ends at least one round from now on."""
        before = self.rounds()

        def all_went_on() -> bool:
            return all(now > then + 1 for now, then in zip(self.rounds(), before, strict=True))

        wait_until(all_went_on, "all readers to go on", 90.0)

    def stall_seconds(self, at: float) -> float:
        """The longest wait of anybody that was under way a moment after this one, as far as it lies behind it."""
        waits = (began + seconds - at for began, seconds in self.waits if began <= at + 0.2 and began + seconds > at)
        return max(waits, default=0.0)

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            assert process.stdout is not None
            said = process.stdout.read()
            code = process.wait(_END_SECONDS)
            process.stdout.close()
            if code:
                self.errors.append(f"a reader ended with {code}")
                continue
            found = json.loads(said)
            self.errors += found["errors"]
            self.waits += [(began, seconds) for began, seconds in found["slow"]]
            self.rounds_count += found["rounds_count"]
            self.stale_count += found["stale_count"]


@contextmanager
def reading(root: Path, directory: Path, kinds: Sequence[str]) -> Iterator[Crowd]:
    """One process for each of `kinds`; `directory` is for their state."""
    crowd = Crowd([directory / f"reader-{number}" for number in range(len(kinds))], [])
    try:
        for number, kind in enumerate(kinds):
            command = [sys.executable, stamped.__file__, kind, str(root), str(crowd.states[number]), str(number)]
            crowd.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        yield crowd
    finally:
        if all(process.poll() is None for process in crowd.processes) and sys.exc_info()[0] is None:
            crowd.end()
        for process in crowd.processes:
            if process.poll() is None:
                process.kill()
                process.wait(_END_SECONDS)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
