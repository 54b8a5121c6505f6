"""Ceph RADOS Gateway: a real S3 server that keeps all key names exact. Needs Debian's radosgw, ceph-mon, ceph-osd, ceph-common.

Four processes on loopback, the objects in memory (memstore): they are lost with the OSD.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import ServerProcess, free_ports, listens
from tests.servers.s3 import S3Account

_PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool")
_ACCESS_KEY, _SECRET_KEY = "testkey", "testsecret"
_FSID = "11111111-2222-3333-4444-555555555555"
_OSD_ID = "66666666-2222-3333-4444-555555555555"
_COMMAND_SECONDS = 60

# tcp_nodelay: without it each GET takes 48 ms. "ms mon client mode = crc": the default fails when cephx is off.
_CONFIGURATION = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
keyring = {home}/keyring
run dir = {home}/run
admin socket = {home}/run/$name.asok
log file = {home}/log/$name.log
crash dir = {home}/run/crash
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon max pg per osd = 2000
ms bind port min = {first_osd_port}
ms bind port max = {last_osd_port}
[mon]
mon data = {home}/mon
paxos propose interval = 0.05
paxos min wait = 0.01
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data avail crit = 2
mon data avail warn = 5
[osd]
osd data = {home}/osd0
osd objectstore = memstore
osd memory target = 939524096
osd numa auto affinity = false
osd op num shards = 2
osd op num threads per shard = 1
memstore device bytes = 2147483648
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw data = {home}/rgw
rgw rados pool pg num min = 8
rgw thread pool size = 32
rgw enable usage log = false
rgw enable ops log = false
debug rgw = 0
ms mon client mode = crc
"""


def is_installed() -> bool:
    return all(shutil.which(program) for program in _PROGRAMS)


class Rgw(S3Account):
    def __init__(self, home: Path) -> None:
        self._port, mon_v1, mon_v2 = free_ports(3)
        super().__init__(f"http://127.0.0.1:{self._port}", _ACCESS_KEY, _SECRET_KEY)
        self._home = home
        self._mon_address = f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"
        for name in ("run", "log", "mon", "osd0", "rgw"):
            (home / name).mkdir()
        configuration = _CONFIGURATION.format(
            fsid=_FSID, home=home, mon_v1=mon_v1, mon_v2=mon_v2, port=self._port, first_osd_port=22100, last_osd_port=24000
        )
        (home / "ceph.conf").write_text(configuration)
        # The system's Python runs `ceph`: it must not find this virtual environment's one first.
        path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != str(Path(sys.executable).parent))
        self._environment = {**os.environ, "PATH": path, "CEPH_CONF": str(home / "ceph.conf")}
        self._environment.pop("VIRTUAL_ENV", None)
        self._processes: list[ServerProcess] = []

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self._home, env=self._environment, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-1000:]}")

    def _launch(self, *command: str) -> ServerProcess:
        process = ServerProcess([*command, "-f"], self._home / "log" / f"{command[0]}.out", self._environment)
        process.launch()
        self._processes.append(process)
        return process

    def start(self) -> None:
        self._run("ceph-authtool", "--create-keyring", "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self._run("monmaptool", "--create", "--clobber", "--fsid", _FSID, "--addv", "a", self._mon_address, "monmap")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring")
        self._launch("ceph-mon", "-i", "a")
        self._run("ceph", "--connect-timeout", "30", "osd", "new", _OSD_ID, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", _OSD_ID)
        self._launch("ceph-osd", "-i", "0")
        self._run(
            "radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=test", "--display-name=test",
            f"--access-key={_ACCESS_KEY}", f"--secret-key={_SECRET_KEY}",
        )  # fmt: skip
        gateway = self._launch("radosgw", "-n", "client.rgw")
        gateway.wait_ready(lambda: listens(self._port))

    def kill(self) -> None:
        for process in reversed(self._processes):
            process.end()
        self._processes.clear()


@contextmanager
def running_rgw() -> Iterator[Rgw]:
    with tempfile.TemporaryDirectory(prefix="rgw-") as temporary:
        rgw = Rgw(Path(temporary))
        try:
            rgw.start()
            yield rgw
        finally:
            rgw.close_client()
            rgw.kill()
