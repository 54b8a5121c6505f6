"""An ordinary user mounts through fusermount3, reads, and unmounts: nothing of root's is needed, nothing is open to others."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fuse.bucket import Bucket
from tests.fuse.mount import Ran, environment, is_running, kill_with_keeper
from tests.fuse.room import NOBODY, Room, for_users, room
from tests.servers.process import wait_until
from tests.servers.weed import Weed

OTHER = 65533


@dataclass
class User:
    """Somebody with a home, and the daemon that he may have started."""

    room: Room
    home: Path
    env: dict[str, str]
    pid: int = 0

    @property
    def point(self) -> Path:
        return self.home / "mnt"

    def tiercache(self, *arguments: str | os.PathLike[str]) -> Ran:
        return self.room.tiercache(*arguments, env=self.env, uid=NOBODY)

    def run(self, *command: str | os.PathLike[str], uid: int = NOBODY) -> Ran:
        return self.room.run(command, self.env, uid=uid)

    def mount(self, bucket: Bucket, *options: str) -> Ran:
        where = [bucket.source, str(self.point), "--endpoint-url", bucket.account.endpoint_url]
        ran = self.tiercache("mount", *where, "--hot-size", "200MB", "--json", *options)
        if ran.code == 0:
            self.pid = ran.json["status"]["pid"]
        return ran


@pytest.fixture
def user(weed: Weed, tmp_path: Path) -> Iterator[User]:
    if shutil.which("fusermount3") is None:
        pytest.skip("needs fusermount3")
    home = Path(tempfile.mkdtemp(prefix="home-"))  # pytest's own directory is closed to other users
    try:
        (home / "mnt").mkdir()
        (home / "run").mkdir(mode=0o700)
        for path in (home, home / "mnt", home / "run"):
            os.chown(path, NOBODY, NOBODY)
        env = environment(home, {**weed.environment, "XDG_RUNTIME_DIR": str(home / "run")})
        with room(tmp_path, *for_users()) as private:
            somebody = User(private, home, env)
            try:
                yield somebody
            finally:
                if somebody.pid:
                    with suppress(ProcessLookupError):
                        kill_with_keeper(somebody.pid)
                    wait_until(lambda: not is_running(somebody.pid), "the end of the daemon")
    finally:
        shutil.rmtree(home)


def test_a_user_mounts_reads_and_unmounts(user: User, bucket: Bucket, tmp_path: Path) -> None:
    body = random.Random(3).randbytes(9 << 20)
    bucket.put("dir/file", body)
    ran = user.mount(bucket)
    assert ran.code == 0, ran.err
    status = ran.json["status"]
    reason = status["path"]["reason"]
    assert status["path"]["kind"] == "plain"
    assert "CAP_SYS_ADMIN" in reason or "through Python" in reason
    hot = Path(status["tiers"]["hot"]["directories"][0]["path"])
    assert user.home in hot.parents
    for _ in range(2):
        assert user.run("sha256sum", user.point / "dir/file").out.split()[0] == sha256(body, tmp_path)
    listed = user.run("stat", "-c", "%u %g %a", user.point / "dir/file", user.point / "dir").out
    assert listed.split("\n")[:2] == [f"{NOBODY} {NOBODY} 444", f"{NOBODY} {NOBODY} 555"]
    assert user.run("touch", user.point / "new").code != 0
    status = user.tiercache("status", "--json").json
    assert status["pid"] == user.pid
    ran = user.tiercache("umount", user.point)
    assert ran.code == 0, ran.err
    assert not user.room.is_mounted(user.point)
    wait_until(lambda: not is_running(user.pid), "the end of the daemon")


def sha256(body: bytes, directory: Path) -> str:
    path = directory / "body"
    path.write_bytes(body)
    return subprocess.run(["sha256sum", str(path)], check=True, capture_output=True, text=True, timeout=30).stdout.split()[0]


def test_what_a_user_mounted_is_closed_to_others(user: User, bucket: Bucket) -> None:
    bucket.put("file", b"secret")
    ran = user.mount(bucket)
    assert ran.code == 0, ran.err
    status = ran.json["status"]
    assert user.run("cat", user.point / "file").out == "secret"
    for other in (OTHER, 0):
        assert user.run("cat", user.point / "file", uid=other).code != 0, "without allow_other not even root may look"
    hot = status["tiers"]["hot"]["directories"][0]["path"]
    assert user.run("ls", hot, uid=OTHER).code != 0
    as_other = {**user.env, "XDG_RUNTIME_DIR": "", "TIERCACHE_SOCKET": status["socket"]}
    ran = user.room.tiercache("status", env=as_other, uid=OTHER)
    assert ran.code in (1, 3)
    assert ran.err.count("\n") == 1


def test_a_users_stale_mount_is_healed(user: User, bucket: Bucket) -> None:
    bucket.put("file", b"content")
    assert user.mount(bucket).code == 0
    kill_with_keeper(user.pid)
    wait_until(lambda: not is_running(user.pid), "the end of the daemon")
    ran = user.mount(bucket)
    assert ran.code == 0, ran.err
    assert user.run("cat", user.point / "file").out == "content"
    assert user.tiercache("umount", user.point).code == 0


def test_a_users_daemon_is_followed_by_another_and_ended_by_force(user: User, bucket: Bucket) -> None:
    """Without CAP_SYS_ADMIN, and with no right to abort a connection where /sys/fs/fuse is not mounted."""
    bucket.put("file", b"content")
    assert user.mount(bucket).code == 0
    before = user.pid
    os.kill(before, signal.SIGKILL)

    def is_followed() -> bool:
        ran = user.tiercache("status", "--json")
        if ran.code == 0:
            user.pid = ran.json["pid"]
        return user.pid != before

    wait_until(is_followed, "the next daemon")
    assert user.run("cat", user.point / "file").out == "content"
    assert user.tiercache("status", "--json").json["restarts_count"] == 1
    upgraded = user.tiercache("upgrade", user.point)
    assert upgraded.code == 0 or "cannot be handed over" in upgraded.err
    keeper = os.getpgid(user.pid)
    os.kill(user.pid, signal.SIGSTOP)
    ran = user.tiercache("umount", "--force", user.point)
    assert (ran.code, ran.out) == (0, f"{user.point}: unmounted\n"), ran.err
    assert not user.room.is_mounted(user.point)
    assert not is_running(user.pid)
    assert not is_running(keeper)


def test_first_contact_without_fusermount3_is_one_line(user: User, bucket: Bucket) -> None:
    ran = user.room.run(["env", "PATH=/nowhere", *mount_command(user, bucket)], user.env, uid=NOBODY)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "fusermount3" in ran.err
    assert "install" in ran.err
    assert not user.room.is_mounted(user.point)


def test_first_contact_with_allow_other_that_is_not_allowed_is_one_line(user: User, bucket: Bucket) -> None:
    ran = user.mount(bucket, "-o", "allow_other")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "user_allow_other" in ran.err
    assert not user.room.is_mounted(user.point)


def mount_command(user: User, bucket: Bucket) -> list[str]:
    where = [bucket.source, str(user.point), "--endpoint-url", bucket.account.endpoint_url]
    return [sys.executable, "-m", "tiercache", "mount", *where]
