"""Real file systems for tests: small ones, full ones, and ones whose disk fails under them. They need root and loop devices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=30)


def _unmount(point: Path) -> None:
    if subprocess.run(["umount", str(point)], capture_output=True, timeout=30, check=False).returncode != 0:
        _run("umount", "-l", point)


@contextmanager
def tmpfs(point: Path, size_bytes: int) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    point.mkdir(exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", point)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no mounts here: {error.stderr.decode().strip()}")
    try:
        yield point
    finally:
        _unmount(point)


@contextmanager
def ext4(image: Path, point: Path, size_bytes: int) -> Iterator[Path]:
    """An ext4 of this size in the sparse file `image`, without a journal (so that it survives the loss of its disk)."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    try:
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image)
        point.mkdir(exist_ok=True)
        _run("mount", "-o", "loop", image, point)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no loop mounts here: {error}")
    try:
        yield point
    finally:
        _unmount(point)


def fill_up(directory: Path) -> None:
    """Write until the file system is full."""
    with open(directory / "ballast", "wb", buffering=0) as file:
        for piece_bytes in (1 << 20, 4096, 1):
            while True:
                try:
                    file.write(bytes(piece_bytes))
                except OSError:
                    break
        os.fsync(file.fileno())
