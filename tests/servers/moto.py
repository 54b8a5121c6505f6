"""moto as an S3 server: a mock, but with a full HTTP API and exact key names (a newline excepted)."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import ServerProcess, free_ports, listens
from tests.servers.s3 import S3Account


class Moto(S3Account):
    """Data is lost when it ends. It accepts any credentials."""

    def __init__(self, directory: Path, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}", "testkey", "testsecret")
        self._port = port
        self._process = ServerProcess(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], directory / "moto.log"
        )

    def start(self) -> None:
        self._process.launch()
        self._process.wait_ready(lambda: listens(self._port))

    def kill(self) -> None:
        self._process.end()


@contextmanager
def running_moto() -> Iterator[Moto]:
    with tempfile.TemporaryDirectory(prefix="moto-") as temporary:
        moto = Moto(Path(temporary), free_ports(1)[0])
        try:
            moto.start()
            yield moto
        finally:
            moto.close_client()
            moto.kill()
