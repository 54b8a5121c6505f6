"""One mount as a user makes it: the real command line, a daemon of its own, and a teardown that leaves nothing behind.

Everything that the daemon writes lies below the test's directory, its log included (root's logs would lie in /var/log; the
one of a test is moved at the end). Processes are ended by pid, mounts are detached by path, whatever went wrong before.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.servers.process import wait_until
from tiercache.admin.socket import keeper_socket_for
from tiercache.cli.spawn import log_path

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_SECONDS = 60.0
_MNT_DETACH = 2

Settings = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Ran:
    """What a command did. `seconds` is how long it took."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the developer's own environment but PATH: his credentials and settings are not what is tested."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(REPOSITORY),
        "AWS_EC2_METADATA_DISABLED": "true",
        **extra,
    }


def run(command: Sequence[str | os.PathLike[str]], env: Mapping[str, str], **options: Any) -> Ran:
    began = time.monotonic()
    done = subprocess.run(
        [os.fspath(part) for part in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=dict(env),
        cwd="/",
        timeout=COMMAND_SECONDS,
        check=False,
        **options,
    )
    seconds = time.monotonic() - began
    return Ran(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"), seconds)


def tiercache(*arguments: str | os.PathLike[str], env: Mapping[str, str]) -> Ran:
    return run([sys.executable, "-m", "tiercache", *arguments], env)


def is_mounted(point: Path) -> bool:
    """Without touching the path."""
    return any(line.split(" ")[4] == str(point) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_with_keeper(pid: int) -> None:
    """A keeper leads a process group of its own, and would start another daemon. Raises ProcessLookupError."""
    leader = Path(f"/proc/{os.getpgid(pid)}")
    command = (leader / "cmdline").read_bytes() if leader.exists() else b""
    if b"tiercache.keeper" in command:
        os.killpg(int(leader.name), signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)


def detach(point: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    while is_mounted(point) and libc.umount2(os.fsencode(point), _MNT_DETACH) == 0:
        pass


class Mount:
    """`source` at `point`, by `tiercache mount`, or with `settings` (tables of the configuration) by `tiercache serve`.

    `root` is where the dataset's files are. Options not given have the defaults of the command.
    """

    def __init__(
        self,
        source: str,
        home: Path,
        *,
        options: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        hot: Path | None = None,
        hot_size: str | None = "2GB",
        settings: Settings | None = None,
    ) -> None:
        self.source = source
        self.home = home
        self.hot = hot or home / "hot"
        self.point = home / "mnt"
        self.log = home / "log"
        self.socket = home / "s"
        self.pid = 0
        self.more_datasets: list[dict[str, object]] = []
        self._options = list(options)
        self._hot_size = hot_size
        self._settings = settings
        self._serving: subprocess.Popen[bytes] | None = None
        home.mkdir(exist_ok=True)
        self.point.mkdir()
        self.env = environment(home, {"TIERCACHE_SOCKET": str(self.socket), **(extra or {})})

    @property
    def root(self) -> Path:
        return self.point if self._settings is None else self.point / "data"

    # -- life

    def start(self) -> dict[str, Any]:
        """Returns the `status` at the mount. Raises RuntimeError with all that was said when it fails."""
        if self._settings is not None:
            document = self._serve(self._settings)
        else:
            ran = self.mount()
            if ran.code:
                raise RuntimeError(f"mount failed with {ran.code}: {ran.err}")
            document = ran.json
        self.pid = document["status"]["pid"]
        status: dict[str, Any] = document["status"]
        return status

    def mount(self) -> Ran:
        """`tiercache mount`, whatever becomes of it."""
        size = ["--hot-size", self._hot_size] if self._hot_size else []
        where: list[str | Path] = [self.source, self.point, "--hot", self.hot, "--socket", self.socket]
        return self.tiercache("mount", *where, *size, "--json", *self._options)

    def _serve(self, settings: Settings) -> dict[str, Any]:
        tables: dict[str, dict[str, object]] = {
            "mount": {"point": str(self.point)},
            "hot": {"paths": [str(self.hot)], **({"capacity": self._hot_size} if self._hot_size else {})},
            "admin": {"socket": str(self.socket)},
        }
        text = ""
        for name in {**tables, **settings}:
            if name != "dataset":
                text += _table(f"[{name}]", {**tables.get(name, {}), **settings.get(name, {})})
        for dataset in ({"name": "data", "cold": self.source, **settings.get("dataset", {})}, *self.more_datasets):
            text += _table("[[datasets]]", dataset)
        config = self.home / "tiercache.toml"
        config.write_text(text)
        with self.log.open("ab") as log:
            self._serving = subprocess.Popen(
                [sys.executable, "-m", "tiercache", "serve", "--config", str(config), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.env,
                cwd="/",
            )
        return self._first_document(self._serving)

    def _first_document(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        said, deadline = b"", time.monotonic() + COMMAND_SECONDS
        while True:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not select.select([process.stdout], [], [], left_seconds)[0]:
                raise RuntimeError(f"serve said nothing: {self.log_text()}")
            piece = os.read(process.stdout.fileno(), 65536)
            said += piece
            with suppress(ValueError):
                document: dict[str, Any] = json.loads(said)
                if "error" in document:
                    raise RuntimeError(f"serve failed: {document['error']}; {document['hint']}")
                return document
            if not piece:
                raise RuntimeError(f"serve ended: {self.log_text()}")

    def umount(self) -> None:
        ran = self.tiercache("umount", self.point)
        assert ran.code == 0, ran.err
        self._await_end()

    def kill(self) -> None:
        """SIGKILL, together with its keeper if it has one; the mount is left stale."""
        kill_with_keeper(self.pid)
        self._await_end()

    def remount(self) -> dict[str, Any]:
        self.umount()
        return self.start()

    def exit_code(self) -> int:
        """Of a daemon that was served, once it has ended."""
        assert self._serving is not None
        code = self._serving.wait(COMMAND_SECONDS)
        self._await_end()
        return code

    def _await_end(self) -> None:
        if self._serving is not None:
            self._serving.wait(COMMAND_SECONDS)
            assert self._serving.stdout is not None
            self._serving.stdout.close()
            self._serving = None
        wait_until(lambda: not is_running(self.pid), f"the end of daemon {self.pid}")

    def close(self) -> None:
        """Leave nothing: no process, no mount, no cached bytes. The log stays, for who looks into a failure."""
        for pid in {self.pid, self._holder()} - {0}:
            with suppress(ProcessLookupError):
                kill_with_keeper(pid)
        if self._serving is not None:
            self._serving.kill()
        if self.pid:
            self._await_end()
        detach(self.point)
        keeper_socket_for(str(self.point)).unlink(missing_ok=True)
        theirs = log_path(str(self.point))
        if theirs.exists():
            shutil.move(theirs, self.log)
        self.discard_hot()

    def discard_hot(self) -> None:
        shutil.rmtree(self.hot, ignore_errors=True)

    def _holder(self) -> int:
        """The daemon that holds the cache directory, though `mount` failed to say so; 0 when there is none."""
        try:
            pid = int(json.loads((self.hot / "lock").read_bytes())["pid"])
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError, KeyError):
            return 0
        return pid if b"tiercache" in command else 0

    # -- what can be asked

    def tiercache(self, *arguments: str | os.PathLike[str]) -> Ran:
        return tiercache(*arguments, env=self.env)

    def status(self) -> dict[str, Any]:
        ran = self.tiercache("status", "--json")
        assert ran.code == 0, ran.err
        found: dict[str, Any] = ran.json
        return found

    def metrics(self) -> dict[str, float]:
        """Samples as the exporter writes them: 'name{label="value"}' to number."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), trust_env=False) as client:
            text = client.get("http://daemon/metrics").raise_for_status().text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def log_text(self) -> str:
        theirs = log_path(str(self.point))
        path = theirs if theirs.exists() else self.log
        return path.read_text(errors="replace") if path.exists() else ""

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmRSS")


Mounting = Callable[..., Mount]
"""What the fixture `mounting` gives."""


def _table(head: str, values: Mapping[str, object]) -> str:
    return "\n".join([head, *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])


def used_bytes(directory: Path) -> int:
    """What `du` says, in whole blocks; names that vanish meanwhile are not there."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in (place, *(os.path.join(place, name) for name in names)):
            with suppress(FileNotFoundError):
                total += os.lstat(name).st_blocks * 512
    return total


def drop_caches() -> None:
    """The kernel's pages and names: what is asked next comes to the daemon."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def difference(source: Path, mounted: Path) -> str:
    """What `diff -r` says; '' when nothing differs."""
    done = subprocess.run(["diff", "-r", str(source), str(mounted)], capture_output=True, timeout=300, check=False)
    return (done.stdout + done.stderr).decode(errors="replace")
