"""For tests of warm targets: one that is opened, and what they wait for and look at."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import trio

from tests.tiers.mirrored import Mirrored
from tiercache.tiers.warm.target import Deadlines, Target

DEADLINE_SECONDS = 10.0
SHORT = Deadlines(short_seconds=0.2, read_seconds=0.2, write_seconds=0.3, probe_seconds=0.2)


class Seen:
    """An `Observe`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []

    def __call__(
        self, target: str, operation: str, seconds: float, transferred_bytes: int, error: type[BaseException] | None
    ) -> None:
        assert seconds >= 0
        self.calls.append((operation, transferred_bytes, "" if error is None else error.__name__))


def make_target(path: Path, *, observe: Seen | None = None, deadlines: Deadlines | None = None) -> Target:
    return Target(
        str(path),
        identity=None,
        observe=observe if observe is not None else Seen(),
        deadlines=deadlines if deadlines is not None else Deadlines(),
        rng=random.Random(1),
        clock=time.monotonic,
    )


async def opened(path: Path, *, observe: Seen | None = None, deadlines: Deadlines | None = None) -> Target:
    target = make_target(path, observe=observe, deadlines=deadlines)
    await target.open(None)
    assert state(target) == "up", target.detail
    return target


def descriptors(under: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if place.startswith(str(under)):
            found.append(place)
    return found


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - threads and processes make it true
            await trio.sleep(0.005)


def state(target: Target) -> str:
    return target.state


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=30)


def hang(mirror: Mirrored, target: Target) -> None:
    """Deadlines are short while it hangs only: a busy machine is not to be taken for a hang."""
    mirror.fail("hang")
    target.deadlines = SHORT


async def recover(mirror: Mirrored, target: Target) -> None:
    mirror.work()
    target.deadlines = Deadlines()
    await until(lambda: target._patience.outstanding_count == 0)
    await target.probe(target.identity)
