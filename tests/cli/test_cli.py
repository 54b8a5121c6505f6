"""The command line against a real socket: exit codes, the two forms of output, and arguments that nobody expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.admin.fake import FakeControl, serving
from tiercache import __version__
from tiercache.admin import socket as sockets
from tiercache.cli import pinning, spawn
from tiercache.cli.main import main
from tiercache.errors import SetupError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "mount",
    "serve",
    "umount",
    "upgrade",
    "status",
    "where",
    "refresh",
    "pin",
    "unpin",
    "pins",
    "evict",
    "scrub",
    "targets",
    "rebuild-index",
    "extract",
)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(sockets, "ROOT_DIRECTORY", directory)
    monkeypatch.setattr(sockets, "runtime_directory", lambda: directory)
    monkeypatch.setattr(sockets, "_searched", lambda: [directory])
    monkeypatch.delenv("TIERCACHE_SOCKET", raising=False)
    return directory


@pytest.fixture
def control(runtime: Path) -> Iterator[FakeControl]:
    fake = FakeControl()
    fake.add("a.bin", 100)
    fake.add("big.bin", 5000)
    with serving(fake, runtime / "fake.sock"):
        yield fake


class Ran:
    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> None:
        self.code = main(arguments)
        self.out, self.err = capsys.readouterr()

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def test_status_for_people(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["status"])
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "/mnt/fake: tiercache 0.1.0, pid 4711, up 3 h 12 min"
    assert lines[1] == "reads       plain (Linux 5.10 has no FUSE passthrough)"
    assert "TIER  STATE       USED  CAPACITY    FULL" in lines
    assert "hot   ok        250 MB   1.00 GB  25.0 %  /var/cache/fake" in lines
    assert "warm  absent         -         -       -" in lines
    assert "cold  degraded     0 B         -       -  2 of the last 10 requests failed" in lines
    assert lines[-1] == "notice: index was damaged and rebuilt"
    [row] = [line for line in lines if line.startswith("fake ")]
    assert row.split("  ")[-1] == "s3://bucket/train"
    assert "99.9 %" in row, "0.9996 is not 100 %"
    assert all(line == line.rstrip() for line in lines)


def test_status_for_machines_has_what_the_contract_names(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    status = Ran(capsys, ["status", "--json"]).document
    assert set(status) >= {"pid", "version", "mountpoint", "socket", "uptime_seconds", "path", "tiers", "datasets"}
    for tier in ("hot", "warm", "cold"):
        assert set(status["tiers"][tier]) >= {"used_bytes", "capacity_bytes", "state"}
    assert status["path"] == {"kind": "plain", "reason": "Linux 5.10 has no FUSE passthrough"}


def test_where_both_ways(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["where", "fake/a.bin", "/mnt/fake/big.bin"])
    assert ran.code == 0
    assert ran.out.splitlines()[1].split() == [
        "fake/a.bin", "100", "B", "hot", "cold", "100", "B", "1/1", "-", "77", "0123456789abcdef0123456789abcdef:100",
    ]  # fmt: skip
    files = Ran(capsys, ["where", "fake/a.bin", "--json"]).document["files"]
    assert files[0]["residency"] == ["hot", "cold"]


def test_where_of_a_missing_file_shows_the_others_and_fails(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["where", "fake/none", "fake/a.bin"])
    assert ran.code == 1
    assert "fake/a.bin" in ran.out
    assert ran.err == "tiercache: 'fake/none' does not exist; list its directory\n"
    document = Ran(capsys, ["where", "fake/none", "fake/a.bin", "--json"]).document
    assert document["error"] == "'fake/none' does not exist"
    assert [file["path"] for file in document["files"]] == ["fake/a.bin"]


def test_refresh(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["refresh", "/mnt/fake/a.bin"])
    assert (ran.code, ran.out) == (0, "/mnt/fake/a.bin: 2 changed, 1 gone\n")
    assert control.refreshed == ["fake/a.bin"]


def test_pin_wait_pins_unpin(control: FakeControl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "POLL_SECONDS", 0.001)
    ran = Ran(capsys, ["pin", "fake/a.bin", "--ttl", "1d", "--reason", "run 7", "--wait"])
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "1 of 1 files are hot, 100 B"
    assert control.pinned["fake/a.bin"].reason == "run 7"
    assert "run 7" in Ran(capsys, ["pins"]).out
    [pin] = Ran(capsys, ["pins", "--json"]).document["pins"]
    assert pin["expires_seconds"] - pin["created_seconds"] == 86400
    assert Ran(capsys, ["unpin", "fake/a.bin"]).out == "fake/a.bin: unpinned (0 B may be evicted)\n"
    again = Ran(capsys, ["unpin", "fake/a.bin"])
    assert (again.code, again.out) == (0, "fake/a.bin: was not pinned\n")
    assert Ran(capsys, ["pins"]).out == "nothing is pinned\n"


def test_a_refused_pin_says_the_numbers(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["pin", "fake/big.bin"])
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("tiercache: 5000 bytes are wanted, 1000 may be pinned; of 1.00 kB that may be pinned 0 B are")
    document = Ran(capsys, ["pin", "fake/big.bin", "--json"]).document
    assert (document["admitted"], document["wanted_bytes"], document["pinnable_bytes"]) == (False, 5000, 1000)
    assert document["error"]
    assert control.pinned == {}


def test_a_dry_run_pins_nothing(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["pin", "fake/a.bin", "--dry-run"])
    assert ran.code == 0
    assert ran.out == "there is room: 1 files, 100 B, of which 0 B are hot already; 1.00 kB more may be pinned\n"
    assert control.pinned == {}


def test_waiting_for_a_fetch_that_fails(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    control.fetch_error = "s3://bucket/train/a.bin: access denied"
    ran = Ran(capsys, ["pin", "fake/a.bin", "--wait", "--json"])
    assert ran.code == 1
    assert ran.document["progress"]["failed_count"] == 1
    assert ran.document["error"] == control.fetch_error
    assert ran.err == f"tiercache: {control.fetch_error}\n"


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["where", "x"], ["refresh", "x"], ["pin", "x"], ["unpin", "x"], ["pins"], ["where", "x", "--socket", "/none"]],
)
def test_no_daemon_is_exit_3(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, arguments)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("tiercache: no daemon ")
    document = Ran(capsys, [*arguments, "--json"]).document
    assert document["error"].startswith("no daemon ")
    assert "tiercache mount" in document["hint"]


def test_a_socket_of_somebody_else_is_named(
    control: FakeControl, runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "answer_of", lambda path: sockets.Answer.DENIED)
    ran = Ran(capsys, ["status"])
    assert ran.code == 3
    assert str(runtime / "fake.sock") in ran.err
    assert "admin.group" in ran.err


def test_two_daemons_need_a_choice(control: FakeControl, runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = FakeControl("/mnt/other", dataset="other")
    with serving(other, runtime / "other.sock"):
        ran = Ran(capsys, ["status"])
        assert ran.code == 2
        assert f"{runtime}/fake.sock, {runtime}/other.sock; choose one with --socket" in ran.err
        chosen = Ran(capsys, ["status", "--json", "--socket", str(runtime / "other.sock")])
        assert chosen.document["mountpoint"] == "/mnt/other"
        assert Ran(capsys, ["where", "/mnt/fake/a.bin"]).code == 0


BAD_USAGE = [
    ([], "Missing command"),
    (["nonsense"], "nonsense"),
    (["doctor"], "doctor"),
    (["status", "--nonsense"], "No such option: --nonsense"),
    (["status", "extra"], "extra"),
    (["where"], "Missing argument"),
    (["pin"], "Missing argument"),
    (["pin", "x", "--ttl", "soon"], "--ttl: 'soon' is not a duration"),
    (["pin", "x", "--ttl", "0"], "less than a second"),
    (["pin", "x", "--ttl"], "--ttl"),
    (["pin", "x", "--wait", "--dry-run"], "nothing to wait for"),
    (["serve"], "--config"),
    (["serve", "--config", "/none/tiercache.toml"], "/none/tiercache.toml"),
    (["mount", "s3://bucket"], "Missing argument"),
    (["mount", "bucket", "/mnt/x"], "has no scheme"),
    (["mount", "ftp://bucket", "/mnt/x"], "unknown scheme"),
    (["mount", "s3://bucket", ""], "MOUNTPOINT"),
    (["mount", "s3://bucket", "/mnt/x", "--hot-size", "lots"], "--hot-size"),
    (["mount", "s3://bucket", "/mnt/x", "-o", "rw"], "always read-only"),
    (["mount", "s3://bucket", "/mnt/x", "-o", "allow_other,sync"], "-o sync"),
    (["mount", "s3://bucket", "/mnt/x", "-o", "uid=root"], "-o uid=root"),
    (["mount", "s3://bucket", "/mnt/x", "-o", "uid"], "-o uid"),
    (["mount", "s3://bucket", "/mnt/x", "-o", "gid=4294967295"], "-o gid=4294967295"),
    (["mount", "s3://bucket", "/mnt/x", "-o", "file_mode=999"], "-o file_mode=999"),
    (["mount", "s3://bucket", "/mnt/x", "-o", "\x1b[31m"], "\\x1b[31m"),
    (["umount"], "MOUNTPOINT is missing"),
    (["status", "--socket", "/" + "x" * 200], "cannot be a socket"),
    (["status", "--socket", "a\0b"], "cannot be a socket"),
]


@pytest.mark.parametrize(
    ("arguments", "complaint"), BAD_USAGE, ids=[" ".join(map(ascii, arguments)) for arguments, _ in BAD_USAGE]
)
def test_bad_usage_is_exit_2_in_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("tiercache: ")
    assert ran.err.count("\n") == 1
    assert complaint in ran.err
    document = Ran(capsys, [*arguments, "--json"])
    assert document.code == 2
    assert document.document["error"]


@pytest.mark.parametrize(
    "name", [b"caf\xe9", b"\xff\xfe", b"a\nb", b"\x1b[2J", b"--", "ä".encode(), b"a" * 5000, b"a//b/../c", b""]
)
def test_case_15_odd_paths_are_asked_for_as_they_are(
    control: FakeControl, capsys: pytest.CaptureFixture[str], name: bytes
) -> None:
    """Missing ones are named in one line without control characters; present ones are found."""
    path = f"fake/{os.fsdecode(name)}"
    ran = Ran(capsys, ["where", "--", path])
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "\x1b" not in ran.err
    control.files[path] = 7
    document = Ran(capsys, ["where", "--json", "--", path]).document
    assert os.fsencode(document["files"][0]["path"]) == os.fsencode(path)


def test_json_after_a_double_dash_is_a_path(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["where", "--", "--json"])
    assert (ran.code, ran.out) == (1, "")


def test_help_lists_every_command_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["--help"])
    assert ran.code == 0
    listed = [line.split()[0] for line in ran.out.partition("Commands:")[2].splitlines() if line.strip() and line[2] != " "]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_socket(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, [command, "--help"])
    assert ran.code == 0
    assert "--json" in ran.out
    assert ("--socket" in ran.out) == (command != "extract"), "which asks no daemon"


def test_an_upgrade_that_is_refused_changes_nothing(control: FakeControl, capsys: pytest.CaptureFixture[str]) -> None:
    control.refuse_stop = SetupError("the installed program cannot be started: no module", hint="correct the installation")
    ran = Ran(capsys, ["upgrade"])
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "tiercache: the installed program cannot be started: no module; correct the installation\n"
    assert not control.handed_over.is_set()


def test_an_upgrade_of_a_mount_without_a_daemon(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert Ran(capsys, ["upgrade", str(tmp_path)]).code == 3
    assert Ran(capsys, ["upgrade"]).code == 3
    assert Ran(capsys, ["upgrade", str(tmp_path), "--config", "x.toml"]).code == 2


def test_a_successor_that_ends_is_a_failure(
    control: FakeControl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The daemon that is watched is a process that has ended; its log says why."""
    ended = subprocess.Popen(["true"])
    monkeypatch.setattr(sockets, "peer_pid", lambda path: ended.pid)
    log = tmp_path / "log"
    log.write_text('level=info event=hands_over\nlevel=error event=ended error="index is locked; wait"\n')
    monkeypatch.setattr(spawn, "log_path", lambda point: log)
    ran = Ran(capsys, ["upgrade", "--json"])
    ended.wait()
    assert control.handed_over.is_set()
    assert ran.code == 1
    assert ran.document["error"] == "/mnt/fake: the successor, version 0.2.0, ended: index is locked; wait"


def test_a_supervised_daemon_shows_it(
    control: FakeControl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "supervisor  nobody starts it again when it dies" in Ran(capsys, ["status"]).out.splitlines()
    found = msgspec.structs.replace(control.status(), supervisor="keeper", restarts_count=2, stall_seconds=0.8124)
    monkeypatch.setattr(control, "status", lambda: found)
    shown = "supervisor  keeper, restarted 2 time(s), readers waited 812 ms at the last takeover"
    assert shown in Ran(capsys, ["status"]).out.splitlines()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, ["--version"])
    assert (ran.code, ran.out) == (0, f"tiercache {__version__}\n")


# The program itself, as a shell runs it.


def program(*arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tiercache", *arguments]
    return subprocess.run(command, capture_output=True, timeout=30, cwd=ROOT, check=False, **options)


def test_the_program_asks_a_daemon_named_by_the_environment(control: FakeControl) -> None:
    done = program("status", "--json", env={**os.environ, "TIERCACHE_SOCKET": control.socket, "LC_ALL": "C"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["mountpoint"] == "/mnt/fake"


def test_the_program_takes_arguments_that_are_not_utf_8(control: FakeControl) -> None:
    done = program("where", b"fake/\xff\x1b", "--socket", control.socket)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b""


def test_a_reader_that_goes_away_is_no_traceback(control: FakeControl) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tiercache", "status", "--socket", control.socket]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=30, cwd=ROOT, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_ctrl_c_ends_quietly_with_130(control: FakeControl) -> None:
    control.hang = True
    command = [sys.executable, "-m", "tiercache", "where", "fake/a.bin", "--socket", control.socket]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    try:
        deadline = time.monotonic() + 20
        while not control.asked.wait(0.05):
            assert time.monotonic() < deadline
            assert process.poll() is None
        process.send_signal(2)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_status_is_quick() -> None:
    """No module that it does not need is imported: those cost more than all the rest. (httpx brings trio.)"""
    code = "import sys; from tiercache.cli.main import main; main(['status', '--socket', '/none']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT, check=True)
    assert not {"boto3", "botocore", "pyfuse3", "lmdb", "starlette", "hypercorn", "structlog"} & set(done.stdout.split())
