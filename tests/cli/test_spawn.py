"""Starting a daemon: it reports, it fails, it dies, it hangs, and the user interrupts. The daemons here are short scripts."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import tiercache
from tests.admin.fake import FakeControl
from tiercache.admin.messages import StartReport, encode
from tiercache.cli import spawn
from tiercache.cli.spawn import log_path, start_daemon
from tiercache.errors import SetupError

SECONDS = 20.0


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # start_daemon leaves the working directory
    return tmp_path / "daemon.log"


def script(body: str) -> tuple[str, ...]:
    return ("-c", f"import os, sys, time, json, signal\n{body}")


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


READY = encode(StartReport(ready=FakeControl().status())).decode()


def test_a_daemon_that_is_ready_goes_on_without_us(log: Path, tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    body = f"""
config = sys.stdin.buffer.read().decode()
fds = sorted(map(int, os.listdir("/proc/self/fd")))[:4]
facts = dict(pid=os.getpid(), sid=os.getsid(0), cwd=os.getcwd(), config=config, fds=fds)
open({str(facts)!r}, "w").write(json.dumps(facts))
print("hello", flush=True)
os.write(3, {READY!r}.encode())
time.sleep(60)
"""
    outcome = start_daemon(b'{"config": 1}', log, arguments=script(body))
    found = json.loads(facts.read_text())
    try:
        assert outcome.report.ready == FakeControl().status()
        assert found["sid"] == found["pid"], "a session of its own: the terminal's signals do not reach it"
        assert (found["cwd"], found["config"], found["fds"]) == ("/", '{"config": 1}', [0, 1, 2, 3])
        assert log.read_text() == "hello\n"
        assert log.stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(found["pid"], signal.SIGKILL)
        os.waitpid(found["pid"], 0)


def test_a_report_in_pieces(log: Path) -> None:
    body = f"""
report = {READY!r}.encode()
for start in range(0, len(report), 100):
    os.write(3, report[start : start + 100])
"""
    assert start_daemon(b"", log, arguments=script(body)).report.ready is not None


def test_a_daemon_that_reports_an_error(log: Path) -> None:
    body = """os.write(3, json.dumps({"error": "no bucket", "hint": "make one"}).encode()); sys.exit(1)"""
    outcome = start_daemon(b"", log, arguments=script(body))
    assert outcome.report == StartReport(error="no bucket", hint="make one")
    assert outcome.last_lines == []


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("raise RuntimeError('a bug')", "exited with status 1"),
        ("print('RuntimeError: a bug', flush=True); os.kill(os.getpid(), 11)", "was killed by signal 11 (Segmentation fault)"),
        ("print('RuntimeError: a bug', flush=True); os._exit(0)", "exited with status 0"),
    ],
)
def test_a_daemon_that_dies_silently_shows_its_log(log: Path, body: str, how: str) -> None:
    log.write_text("of an earlier run\n")
    outcome = start_daemon(b"", log, arguments=script(body))
    assert outcome.report.error == f"the daemon {how} before it was mounted"
    assert str(log) in outcome.report.hint
    assert outcome.last_lines[-1] == "RuntimeError: a bug"
    assert "of an earlier run" not in outcome.last_lines


@pytest.mark.parametrize("report", ['{"ready":', '{"ready": 5}', "[]", "\xff"])
def test_a_report_that_makes_no_sense_ends_the_daemon(log: Path, tmp_path: Path, report: str) -> None:
    pid_file = tmp_path / "pid"
    body = f"""
open({str(pid_file)!r}, "w").write(str(os.getpid()))
os.write(3, {report!r}.encode("latin-1")); os.close(3); time.sleep(60)
"""
    with pytest.raises(SetupError, match="the daemon's report"):
        start_daemon(b"", log, arguments=script(body))
    assert ended(int(pid_file.read_text()))


def test_a_daemon_that_is_never_ready_is_stopped(log: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = f"""open({str(pid_file)!r}, "w").write(str(os.getpid())); time.sleep(60)"""
    with pytest.raises(SetupError, match="not ready in time"):
        start_daemon(b"", log, arguments=script(body), ready_seconds=0.5)
    if pid_file.exists():
        assert ended(int(pid_file.read_text()))


def test_a_daemon_that_ignores_the_request_to_end_is_killed(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "END_SECONDS", 0.2)
    pid_file = tmp_path / "pid"
    body = f"""
signal.signal(15, signal.SIG_IGN)
open({str(pid_file)!r}, "w").write(str(os.getpid()))
os.close(3); time.sleep(60)
"""
    outcome = start_daemon(b"", log, arguments=script(body))
    assert "was stopped" in outcome.report.error
    assert ended(int(pid_file.read_text()))


def test_an_interrupt_leaves_no_daemon_behind(log: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = f"""
with open({str(pid_file)!r} + ".new", "w") as file: file.write(str(os.getpid()))
os.rename({str(pid_file)!r} + ".new", {str(pid_file)!r}); time.sleep(60)
"""

    def interrupt() -> None:
        if eventually(pid_file.exists):
            os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        start_daemon(b"", log, arguments=script(body), ready_seconds=SECONDS)
    interrupting.join()
    assert ended(int(pid_file.read_text()))


def test_the_daemon_finds_this_package_wherever_it_is(log: Path) -> None:
    body = """
import tiercache
os.write(3, json.dumps({"error": tiercache.__file__}).encode())
"""
    arguments = ("-P", *script(body))
    assert start_daemon(b"", log, arguments=arguments).report.error == tiercache.__file__


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot write the log"):
        start_daemon(b"", tmp_path / "none" / "daemon.log", arguments=script(""))


def test_the_log_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = log_path("/mnt/data")
    assert path.parent == tmp_path / "state" / "tiercache"
    assert path.name.startswith("mnt-data-")
    assert path != log_path("/mnt-data")
    monkeypatch.setattr(spawn, "MAX_LOG_BYTES", 10)
    path.write_text("x" * 11)
    assert log_path("/mnt/data") == path
    assert not path.exists()
    assert path.with_suffix(".log.1").read_text() == "x" * 11


def test_a_directory_for_logs_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(SetupError, match="cannot keep a log"):
        log_path("/mnt/data")


def test_the_report_may_not_be_endless(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "MAX_REPORT_BYTES", 1000)
    with pytest.raises(SetupError, match="has no end"):
        start_daemon(b"", log, arguments=script("""os.write(3, b'{"error": "' + b"x" * 5000); time.sleep(60)"""))


def test_the_whole_configuration_arrives(log: Path) -> None:
    config = msgspec.json.encode({"key": "x" * 300_000})
    body = """os.write(3, json.dumps({"error": str(len(sys.stdin.buffer.read()))}).encode())"""
    assert start_daemon(config, log, arguments=script(body)).report.error == str(len(config))


def test_closed_standard_descriptors_do_no_harm(tmp_path: Path) -> None:
    """As cron or a careless parent starts us: 0 to 2 are closed, so that the pipe gets one of their numbers."""
    code = f"""
import os, sys
from pathlib import Path
from tiercache.cli.spawn import start_daemon
for number in (0, 1, 2):
    os.close(number)
body = 'import os, sys; os.write(3, b"{{\\\\"error\\\\": \\\\"" + sys.stdin.buffer.read() + b"\\\\"}}")'
outcome = start_daemon(b"intact", Path({str(tmp_path / "log")!r}), arguments=("-c", body))
os._exit(42 if outcome.report.error == "intact" else 1)
"""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.getcwd()})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
