"""A server process that a test owns: started on free loopback ports, ended by its own pid, never outliving the tests."""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# Below Linux's range for outgoing connections (32768 and up), so that none takes a port between its choice and its use.
_FIRST_PORT, _LAST_PORT = 12000, 22000
_POLL_SECONDS = 0.02

_running: set[subprocess.Popen[bytes]] = set()


@atexit.register
def _kill_what_is_left() -> None:
    for process in _running:
        process.kill()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int, also_above: int = 0) -> list[int]:
    """`count` different free ports; with `also_above`, port + also_above is free as well (gRPC twins)."""
    choice = random.Random(os.urandom(8))
    found: list[int] = []
    for _ in range(1000):
        port = choice.randrange(_FIRST_PORT, _LAST_PORT)
        if port not in found and _is_free(port) and (not also_above or _is_free(port + also_above)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports between {_FIRST_PORT} and {_LAST_PORT}")


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
    """Polls; for synchronous set-up code only."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_seconds} s")
        time.sleep(_POLL_SECONDS)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class ServerProcess:
    """One command, its log file, and its life."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._log = log
        self._environment = dict(environment) if environment is not None else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        assert not self.is_alive, "already running"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        _running.add(self._process)

    def wait_ready(self, is_ready: Callable[[], bool], timeout_seconds: float = 30.0) -> None:
        """Raises RuntimeError with the end of the log when the process dies or does not become ready."""

        def ready_or_dead() -> bool:
            return not self.is_alive or is_ready()

        wait_until(ready_or_dead, f"{self._command[0]} ready", timeout_seconds)
        if not self.is_alive:
            raise RuntimeError(f"{self._command[0]} died:\n{self._log.read_text(errors='replace')[-2000:]}")

    def outlive(self) -> int:
        """Let the process go on after this one has ended; its pid, by which somebody else has to end it."""
        assert self._process is not None, "not started"
        _running.discard(self._process)
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL, timeout_seconds: float = 20.0) -> None:
        """Idempotent. A process that ignores `number` for `timeout_seconds` is killed."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        _running.discard(self._process)
        self._process = None
