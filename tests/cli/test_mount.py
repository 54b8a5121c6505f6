"""`mount` and `serve` with the real daemon on a directory: what a user sees, and that nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from tiercache.admin.socket import keeper_pid, socket_for
from tiercache.cli.main import main
from tiercache.cli.spawn import log_path
from tiercache.fuse.mountpoint import mount_at, unmount

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="needs /dev/fuse and root")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0


class Bench:
    """A source, a mount point and a cache directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source = directory / "source"
        self.point = directory / "mnt"
        self.hot = directory / "hot"
        for made in (self.source, self.point, self.hot):
            made.mkdir()
        (self.source / "a.txt").write_text("hello\n")
        self.url = f"file://{self.source}"

    @property
    def mount_arguments(self) -> list[str]:
        return ["mount", self.url, str(self.point), "--hot", str(self.hot), "--hot-size", "1GB"]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tiercache"]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=False)

    def mount(self, *more: str) -> Any:
        done = self.run(*self.mount_arguments, *more, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @property
    def is_mounted(self) -> bool:
        return mount_at(str(self.point)) is not None


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(Path(os.path.realpath(tmp_path)))
    try:
        yield made
    finally:
        done = made.run("umount", str(made.point))
        if done.returncode != 0:
            unmount(str(made.point), lazy=True)
        log_path(str(made.point)).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr


def test_mount_read_look_and_unmount(bench: Bench) -> None:
    done = bench.run(*bench.mount_arguments)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"{bench.url} is mounted on {bench.point}"
    assert [line.split()[0] for line in lines[1:5]] == ["reads", "hot", "socket", "log"]
    assert lines[2] == f"  hot     {bench.hot}, up to 1.00 GB"
    assert (bench.point / "a.txt").read_text() == "hello\n"
    where = bench.run("where", str(bench.point / "a.txt"), "--json")
    assert json.loads(where.stdout)["files"][0]["size_bytes"] == 6
    assert bench.run("umount", str(bench.point)).stdout == f"{bench.point}: unmounted\n"
    assert not bench.is_mounted


def test_mounting_again_is_fine_and_another_source_is_not(bench: Bench) -> None:
    first = bench.mount()
    again = bench.mount()
    assert (first["already_mounted"], again["already_mounted"]) == (False, True)
    assert first["status"]["pid"] == again["status"]["pid"]
    other = bench.directory / "other"
    other.mkdir()
    done = bench.run("mount", f"file://{other}", str(bench.point), "--hot", str(bench.hot))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{bench.point} is mounted already, with {bench.url}" in done.stderr
    assert (bench.point / "a.txt").read_text() == "hello\n"


def test_case_13_mounting_over_the_remains_of_a_killed_daemon(bench: Bench) -> None:
    """Its keeper was killed with it, as when a control group is killed."""
    pid = bench.mount()["status"]["pid"]
    keeper = keeper_pid(str(bench.point))
    assert keeper is not None
    assert os.getpgid(pid) == keeper
    os.killpg(keeper, signal.SIGKILL)
    again = bench.mount()
    assert not again["already_mounted"]
    assert (bench.point / "a.txt").read_text() == "hello\n"


def test_a_killed_daemon_is_started_again_by_its_keeper(bench: Bench) -> None:
    first = bench.mount()["status"]
    assert (first["supervisor"], first["restarts_count"]) == ("keeper", 0)
    os.kill(first["pid"], signal.SIGKILL)
    second = wait_for_another(bench, first["pid"])
    assert (second["supervisor"], second["restarts_count"]) == ("keeper", 1)
    assert (bench.point / "a.txt").read_text() == "hello\n"
    assert second["stall_seconds"] < 5
    log = Path(bench.mount()["log"] or log_path(str(bench.point))).read_text()
    assert "was killed by signal 9 (Killed)" in log
    assert bench.run("umount", str(bench.point)).returncode == 0
    assert keeper_pid(str(bench.point)) is None


def wait_for_another(bench: Bench, pid: int) -> Any:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done = bench.run("status", "--json", "--socket", str(socket_for(str(bench.point))))
        if done.returncode == 0:
            found = json.loads(done.stdout)
            if found["pid"] != pid and found["stall_seconds"] is not None:  # it has taken over
                return found
    raise AssertionError("nobody started it again")


def test_a_mount_that_fails_says_why_and_leaves_nothing(bench: Bench) -> None:
    (bench.point / "precious").touch()
    done = bench.run(*bench.mount_arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "is not empty" in done.stderr
    assert not bench.is_mounted
    (bench.point / "precious").unlink()


def test_the_socket_can_be_chosen(bench: Bench) -> None:
    address = bench.directory / "my.sock"
    status = bench.mount("--socket", str(address))["status"]
    assert status["socket"] == str(address)
    assert json.loads(bench.run("status", "--json", "--socket", str(address)).stdout)["pid"] == status["pid"]
    assert bench.run("umount", str(bench.point), "--socket", str(address)).returncode == 0
    assert not bench.is_mounted


def test_the_environment_chooses_the_socket_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    address = bench.directory / "env.sock"
    monkeypatch.setenv("TIERCACHE_SOCKET", str(address))
    status = bench.mount()["status"]
    assert status["socket"] == str(address)
    other = bench.directory / "other"
    other.mkdir()
    done = bench.run("mount", bench.url, str(other), "--hot", str(bench.directory / "hot2"))
    assert done.returncode == 1
    assert f"a daemon already listens on {address}; name another with --socket or TIERCACHE_SOCKET" in done.stderr
    assert bench.run("umount", str(bench.point)).returncode == 0
    assert not bench.is_mounted


def test_each_dataset_has_a_line_of_its_own(bench: Bench) -> None:
    more = bench.directory / "more"
    more.mkdir()
    (more / "b.txt").touch()
    config = bench.directory / "tiercache.toml"
    config.write_text(
        f'[mount]\npoint = "{bench.point}"\n[hot]\npaths = ["{bench.hot}"]\ncapacity = "1GB"\n'
        f'[[datasets]]\nname = "letters"\ncold = "{bench.url}"\n[[datasets]]\nname = "more"\ncold = "file://{more}"\n'
    )
    process = subprocess.Popen([*bench.command, "serve", "--config", str(config)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert said == [
            f"2 datasets are mounted on {bench.point}\n",
            f"  letters  {bench.url}\n",
            f"  more     file://{more}\n",
        ]
        socket = next(line.split()[1] for line in process.stdout if line.split()[0] == "socket")
        shown = bench.run("status", "--socket", socket).stdout.splitlines()
        assert [line.split()[0] for line in shown if "file://" in line] == ["letters", "more"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("what", ["--socket", "TIERCACHE_SOCKET", "--replica", "--hot", "log", "source"])
def test_nothing_that_the_daemon_needs_may_lie_in_its_mount(bench: Bench, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = bench.directory / "link"
    link.symlink_to(bench.point)
    inside = link / "x"
    arguments = bench.mount_arguments
    if what == "log":
        monkeypatch.setattr("tiercache.cli.spawn.log_path", lambda _: inside)
        monkeypatch.setattr("tiercache.cli.spawn.start_daemon", None)
    elif what == "source":
        arguments[1] = f"file://{inside}"
    elif what == "TIERCACHE_SOCKET":
        monkeypatch.setenv(what, str(inside))
    else:
        arguments += [what, str(inside)]
    for _ in range(2):
        errors = io.StringIO()
        with redirect_stderr(errors):
            assert main(arguments) == 2
        assert errors.getvalue().count("\n") == 1
        assert re.search(r"x lies inside (the mount point|MOUNTPOINT) ", errors.getvalue())
        link.unlink(missing_ok=True)  # and now as it is written
        arguments = [argument.replace(str(link), str(bench.point)) for argument in arguments]
        if what == "TIERCACHE_SOCKET":
            monkeypatch.setenv(what, str(bench.point / "x"))
        inside = bench.point / "x"
    assert list(bench.point.iterdir()) == []


@pytest.mark.parametrize("way", ["mount -f", "serve"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_until_a_signal(bench: Bench, way: str, number: signal.Signals) -> None:
    if way == "serve":
        config = bench.directory / "tiercache.toml"
        config.write_text(f"""
[mount]
point = "{bench.point}"
[hot]
paths = ["{bench.hot}"]
capacity = "1GB"
[[datasets]]
name = "letters"
cold = "{bench.url}"
""")
        arguments = ["serve", "--config", str(config)]
        file = bench.point / "letters" / "a.txt"
    else:
        arguments = [*bench.mount_arguments, "-f"]
        file = bench.point / "a.txt"
    process = subprocess.Popen([*bench.command, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{bench.url} is mounted on {bench.point}\n"
        assert file.read_text() == "hello\n"
        process.send_signal(number)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.communicate()
    assert not bench.is_mounted
